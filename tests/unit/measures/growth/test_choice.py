"""`landscape_aware_growth`: the same batches for all, the best goes on exactly where its trial ended, a killed search resumes."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import theodolite as th
from tests.unit.measures.growth.small import CRITERION, TRAIN, VALID, Network, given, trained
from theodolite.measures import growth
from theodolite.measures.growth import grow, growth_operators, landscape_aware_growth, runs
from theodolite.measures.growth.diagnostics import trial_steps
from theodolite.measures.growth.validation import batch_check_sum, validation_problem
from theodolite.results import Outcome
from theodolite.testing import same
from theodolite.training.own_order import OwnOrder


def chosen(**more):
    return landscape_aware_growth(**given(**{"lag": 6, "every": 3, "baselines": (), **more}))


def validation_loss(model):
    return th.Problem(model, CRITERION, VALID).loss()


# The same for all


def test_the_same_search_gives_the_same_bits():
    one, two = chosen(), chosen()
    assert torch.equal(one.parts, two.parts)
    assert same(one.model.state_dict(), two.model.state_dict())
    assert one.best == two.best


def test_the_choice_does_not_depend_on_the_order_of_the_operators():
    operators = growth_operators(2, 1, inits=("copy", "random", "identity"))
    one, two = chosen(operators=operators), chosen(operators=operators[::-1])
    assert torch.equal(one.parts, two.parts)
    assert one.ranking == two.ranking


@pytest.mark.slow
def test_the_choice_does_not_depend_on_the_engine():
    here = chosen(operators=["last", "random-top"])
    there = chosen(operators=["last", "random-top"], engine="joblib")
    assert torch.allclose(here.parts, there.parts, rtol=1e-5, atol=0)
    assert here.ranking == there.ranking


def test_lag_0_is_the_least_loss_right_after_growing():
    choice = chosen(lag=0)
    model, _ = trained()
    x = {"inputs": VALID[0]}
    losses = [validation_loss(grow(model, o, seed=0, **(x if o.init == "identity" else {})).model) for o in choice.operators]
    assert choice.steps == (0,)
    assert np.allclose(choice.curves.losses[:, 0], losses, rtol=1e-6, atol=0)
    assert choice.best == choice.operators[int(np.argmin(losses))]
    assert choice.trial_steps == 0


def test_every_candidate_sees_the_batches_of_a_plain_run():
    choice = chosen(operators=["last", "random-top"])
    seen = []
    model, optimizer = trained()
    observe = lambda step, model, batch, optimizer: seen.append(batch)  # noqa: E731
    th.train(model, CRITERION, TRAIN, optimizer, steps=6, first=10, batch_size=16, observe=observe)
    stream = 0
    for batch in seen:
        stream = batch_check_sum(batch, stream)
    assert choice.stream == stream


def test_a_shuffling_loader_gives_all_models_the_same_batches_whatever_they_draw(monkeypatch):
    """Dropout of models of three depths draws differently; the second epoch is the same all the same."""
    streams = {}
    plain = runs.Runs.__call__

    def noted(self, job):
        rows = plain(self, job)
        streams[runs.name_of(self.arms[job["arm"]])] = rows[-1]["stream"]
        return rows

    monkeypatch.setattr(runs.Runs, "__call__", noted)
    loader = DataLoader(TensorDataset(*TRAIN), batch_size=16, shuffle=True)
    choice = chosen(data=loader, operators=["last", "random-top"], lag=9, every=9, dropout=0.5)
    assert len(set(streams.values())) == 1
    stream = 0
    order = OwnOrder(loader, 0, first=2)  # step 10 is the third batch of the third epoch
    for x, y in itertools.islice(itertools.chain(order, order, order), 2, 11):
        stream = batch_check_sum(th.problem.Batch((x,), {}, y, len(x)), stream)
    assert choice.stream == stream


# What goes on


def test_training_goes_on_from_exactly_where_the_trial_ended():
    choice = chosen()
    last = [row for row in choice.rows() if row["operator"] == choice.best.name and row["step"] == choice.lag]
    problem = validation_problem(choice.model, CRITERION, VALID, "labels")
    assert last[0]["loss"] == choice.curves.losses[choice.curves.leader, -1]
    assert runs.part_losses(problem, choice.model) == choice.parts[choice.curves.leader, -1].tolist()
    model, optimizer = trained()
    grown = grow(model, choice.best, optimizer=optimizer, seed=0, inputs=VALID[0] if choice.best.init == "identity" else None)
    th.train(grown.model, CRITERION, TRAIN, grown.optimizer, steps=12, first=10, batch_size=16)
    more = {"steps": 12 - choice.lag, "first": choice.next_step, "batch_size": 16}
    th.train(choice.model, CRITERION, TRAIN, choice.optimizer, **more)
    assert same(choice.model.state_dict(), grown.model.state_dict())


def test_the_small_model_and_its_optimizer_are_left_as_found():
    arguments = given(lag=3, every=3)
    before = copy.deepcopy((arguments["model"].state_dict(), arguments["optimizer"].state_dict()))
    landscape_aware_growth(**arguments)
    assert same((arguments["model"].state_dict(), arguments["optimizer"].state_dict()), before)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in arguments["model"].parameters())


def test_the_schedule_goes_on_at_the_global_step():
    asked = []
    chosen(schedule=lambda step: asked.append(step) or 1e-3, operators=["last"])
    assert set(asked) == set(range(10, 16))


def test_dropout_is_off_in_validation():
    choice = chosen(operators=["identity"], dropout=0.5, lag=0, baselines=("small",))
    small = next(row for row in choice.rows() if row["operator"] == "small")
    model, _ = trained(dropout=0.5)
    assert small["loss"] == pytest.approx(validation_loss(model), rel=1e-6)
    assert choice.curves.losses[0, 0] == pytest.approx(small["loss"], rel=1e-6)  # an identity keeps the loss


# Planted candidates


def test_a_broken_candidate_is_never_chosen(monkeypatch):
    plain = runs.grow

    def broken(model, operator, **options):
        grown = plain(model, operator, **options)
        if operator.name == "0/1/copy":
            with torch.no_grad():
                grown.model.head.weight.fill_(math.nan)
        return grown

    monkeypatch.setattr(runs, "grow", broken)
    choice = chosen()
    assert choice.best.name != "0/1/copy"
    assert choice.ranking[-1].name == "0/1/copy"
    assert [row["loss"] for row in choice.rows() if row["operator"] == "0/1/copy"] == [math.inf]
    assert choice.outcome is Outcome.FINISHED
    lost = chosen(operators=["0/1/copy"])
    assert lost.outcome is Outcome.DIVERGED
    assert "diverged" in lost.sentence()


def test_equal_candidates_are_called_equal():
    """Identity blocks in two places compute the same function before the first step."""
    operators = growth_operators(2, 1, inits=("identity",))
    choice = chosen(operators=operators, lag=0)
    assert len(choice.tied) == 1
    assert choice.best == operators[0]  # of equal ones the first
    assert "Not told apart" in choice.sentence()
    assert choice.transition is None


def test_pruning_keeps_the_best():
    operators = ["last", "0/1/copy", "identity"]
    every = chosen(lag=24, every=3, prune=False, operators=operators)
    fewer = chosen(lag=24, every=3, operators=operators)
    assert fewer.best == every.best
    assert fewer.trial_steps <= every.trial_steps == trial_steps(len(every.operators), 24)
    kept = fewer.curves.alive
    assert torch.equal(fewer.parts[kept], every.parts[kept])


def test_an_automatic_trial_costs_at_most_the_training_it_is_for():
    choice = chosen(lag="auto", every=4, steps=120, operators=["last", "random-top", "identity"], prune=False)
    assert 3 * choice.lag <= 120
    assert choice.settled in (True, False)
    assert choice.horizon == 120
    words = "have settled" if choice.settled else "before the ranks settled"
    assert words in choice.sentence()


# FLOPs


def test_flops_of_a_step_are_those_on_paper():
    """A Linear layer of m inputs and n outputs takes 2 B m n forward, as much for its weights, as much for its inputs."""
    choice = chosen(operators=["last"], lag=1)
    forward = 2 * 16 * (4 * 6 + 3 * 2 * 6 * 8 + 6 * 3)
    assert choice.step_flops == 3 * forward - 2 * 16 * 4 * 6  # nobody asks for the gradient of the data
    assert choice.trial_flops == choice.step_flops


def test_baselines_have_equal_flops_with_and_without_the_trials():
    choice = chosen(operators=["last", "random-top"], baselines=("scratch", "small"))
    ends = {(row["operator"], row["equal_to"]): row for row in choice.baselines}
    assert abs(ends["small", "all trials"]["flops"] - choice.trial_flops) <= choice.small_step_flops / 2
    assert abs(ends["small", "the best operator alone"]["flops"] - 6 * choice.step_flops) <= choice.small_step_flops / 2
    assert ends["scratch", "all trials"]["flops"] == choice.trial_flops
    assert choice.paid in (True, False)
    assert ("has paid" in choice.sentence()) == choice.paid
    model, optimizer = trained()
    small = ends["small", "all trials"]
    th.train(model, CRITERION, TRAIN, optimizer, steps=small["step"], first=10, batch_size=16)
    assert small["loss"] == pytest.approx(validation_loss(model), rel=1e-6)


# Killed and resumed


class Killed(Exception):  # noqa: N818
    """Stands for the end of the process."""


class Counted(nn.Module):
    """A loss that counts its training calls and ends the process at one of them."""

    def __init__(self, end=math.inf):
        super().__init__()
        self.calls, self.end = 0, end

    def forward(self, output, target):
        if output.requires_grad:
            self.calls += 1
            if self.calls > self.end:
                raise Killed
        return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("end", [2, 20, 31])
def test_a_killed_search_goes_on_where_it_was(tmp_path, end):
    options = {"operators": ["last", "random-top", "identity"], "lag": 9, "baselines": ("small",), "prune": False}
    plain, full = Counted(), None
    full = chosen(loss=plain, **options)
    with pytest.raises((Killed, ValueError)):
        chosen(loss=Counted(end), checkpoint=tmp_path, **options)
    rest = Counted()
    resumed = chosen(loss=rest, checkpoint=tmp_path, resume=True, **options)
    assert torch.equal(resumed.parts, full.parts)
    assert same(resumed.model.state_dict(), full.model.state_dict())
    assert same(resumed.optimizer.state_dict(), full.optimizer.state_dict())
    assert same([*resumed.rows()], [*full.rows()])
    assert rest.calls <= plain.calls - (end - 3) + 8  # at most a look's steps again, and what is called before the first step


def test_a_folder_with_another_search_is_refused(tmp_path):
    chosen(operators=["last"], checkpoint=tmp_path)
    with pytest.raises(FileExistsError, match="resume=True"):
        chosen(operators=["last"], checkpoint=tmp_path)
    with pytest.raises(ValueError, match="another choice of: arms"):
        chosen(operators=["random-top"], checkpoint=tmp_path, resume=True)
    with pytest.raises(ValueError, match="another choice of: looks"):
        chosen(operators=["last"], every=2, checkpoint=tmp_path, resume=True)


# Bad input


class Drawn(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(4), torch.randint(3, ())


def foreign():
    return torch.optim.SGD(Network().parameters(), lr=0.1)


BAD = {
    "layers not above L": ({"layers": 2}, "layers must be above the 2"),
    "more new layers than old": ({"layers": 5}, "'double'"),
    "an operator of another depth": ({"operators": growth_operators(4, 1)}, "wanted are 3 of the 2"),
    "an unknown operator": ({"operators": ["lats"]}, "did you mean 'last'"),
    "no operator": ({"operators": []}, "at least one"),
    "a block that does not divide": ({"operators": ["0/3/copy"]}, "block must divide"),
    "foreign optimizer": ({"optimizer": foreign()}, "parameters that model does not have"),
    "a name without a rate": ({"optimizer": "adam"}, "learning rate"),
    "validation inside the training data": ({"validation": tuple(t[:32] for t in TRAIN)}, "stand in the training data"),
    "an iterator": ({"data": iter([TRAIN])}, "read only once"),
    "a stream that is not repeatable": ({"data": [TRAIN], "every": "often"}, "every must be"),
    "a lag below zero": ({"lag": -1}, "lag must be 'auto'"),
    "an unknown baseline": ({"baselines": ("large",)}, "baselines must be of"),
    "no validation data": ({"validation": []}, "validation"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_with_its_remedy(case):
    arguments, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        chosen(**arguments)


def test_a_stream_that_differs_when_read_again_is_refused():
    class Moving:
        start = 0

        def __len__(self):
            return 3

        def __iter__(self):
            Moving.start += 1
            return iter([tuple(t[Moving.start : Moving.start + 16] for t in TRAIN) for _ in range(3)])

    with pytest.raises(ValueError, match="cannot be repeated"):
        chosen(data=Moving())


def test_an_endless_stream_is_read_as_far_as_it_is_needed():
    loader = DataLoader(Drawn(), batch_size=8)
    torch.manual_seed(3)
    choice = chosen(data=loader, operators=["last"], first=0)
    assert choice.lag == 6


def test_there_must_be_room_for_two_models(monkeypatch):
    monkeypatch.setattr(runs, "available_bytes", lambda device: 100)
    with pytest.raises(ValueError, match="no room for two models"):
        chosen()


def test_validation_text_inside_the_training_text_is_found_at_any_offset():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 30, (4000,), generator=generator)
    rows = text[:3840].reshape(-1, 60)
    model = th.models.gpt(30, 60, 8, 1, 1, seed=0)
    loss = lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    inside = torch.stack([text[start : start + 50] for start in range(5, 3000, 61)])
    fresh = torch.randint(0, 30, (40, 50), generator=generator)
    check = growth.validation.refuse_shared_text
    data = [(rows[i : i + 8], rows[i : i + 8]) for i in range(0, 64, 8)]
    check(model, loss, data, validation_problem(model, loss, (fresh[:, :-1], fresh[:, 1:]), "labels"), "labels")
    with pytest.raises(ValueError, match=r"50 of its 50 samples hold 24 tokens in a row that stand"):
        check(model, loss, data, validation_problem(model, loss, (inside[:, :-1], inside[:, 1:]), "labels"), "labels")


def test_adafactor_keeps_its_state_and_goes_on():
    """Old layers have their factored moments, random ones begin at zero."""
    model, _ = trained()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    th.train(model, CRITERION, TRAIN, optimizer, steps=3, batch_size=16)
    choice = chosen(model=model, optimizer=optimizer, operators=["random-top"], lag=0)
    old, new = (choice.optimizer.state[choice.model.blocks[i].into.weight] for i in (0, 2))
    assert float(old["step"]) == 3
    assert torch.equal(old["row_var"], optimizer.state[model.blocks[0].into.weight]["row_var"])
    assert float(new["step"]) == 0
    assert float(new["row_var"].abs().max()) == 0
    before = choice.model.blocks[2].out.weight.clone()
    th.train(choice.model, CRITERION, TRAIN, choice.optimizer, steps=1, batch_size=16)
    assert not torch.equal(choice.model.blocks[2].out.weight, before)
