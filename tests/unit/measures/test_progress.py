"""Is it learning: constant predictions against their closed forms, states on planted trainings, gradients layer by layer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

import theodolite as th
from theodolite.measures.audit import audit_parameters, dead_units
from theodolite.measures.progress import LearningProgress, check_setup, gradient_flow, judge_state, learning_progress
from theodolite.measures.progress.gradient_flow import record_forward
from theodolite.measures.progress.learning import jackknife, trend
from theodolite.measures.progress.new_weights import draw_at_scale, looks_new, new_module, redraw
from theodolite.measures.progress.trivial import first_loss, label_entropy
from theodolite.testing import ResultContract


def classes(count: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    return torch.randn(count, 6, generator=generator) + 2 * functional.one_hot(y, 6), y


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*parts[:-1])


# The best constant prediction


def best_constant(problem: th.Problem, shape: tuple[int, ...]) -> float:
    """The loss of the best constant output, found by descent in float64."""
    free = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.LBFGS([free], lr=0.5, max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")
    batches = list(problem.data)

    def objective() -> Tensor:
        descent.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for share, batch in zip(problem.weighting.shares, batches, strict=True):
            total = total + share * problem.loss_function(free.expand(len(batch.target), *shape), batch.target)
        total.backward()
        return total

    descent.step(objective)
    return float(objective().detach())


COUNTED = torch.tensor([0] * 300 + [1] * 150 + [2] * 50)
RATES = (torch.arange(500)[:, None] % torch.tensor([2, 5, 10]) == 0).double()
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), COUNTED, (3,)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), COUNTED, (3,)),
    "class weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]).double()), COUNTED, (3,)),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), COUNTED, (3,)),
    "both": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]).double(), label_smoothing=0.2), COUNTED, (3,)),
    "ignored labels": (nn.CrossEntropyLoss(ignore_index=1), COUNTED, (3,)),
    "probabilities": (nn.CrossEntropyLoss(), torch.softmax(RATES, 1), (3,)),
    "their own": (lambda z, y: functional.cross_entropy(z, y), COUNTED, (3,)),
    "squares": (nn.MSELoss(), RATES * torch.tensor([1.0, 10.0, -3.0]), (3,)),
    "their own squares": (lambda z, y: 0.5 * ((z - y) ** 2).sum() / len(y), RATES, (3,)),
    "binary": (nn.BCEWithLogitsLoss(), RATES, (3,)),
    "binary with weights": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 4.0, 9.0]).double()), RATES, (3,)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_constant_output_is_better_than_the_constant_prediction(name):
    loss, target, shape = LOSSES[name]
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(500, 4, generator=torch.Generator().manual_seed(1)).double(), target[order]
    problem = th.Problem(model, loss, [(x[:200], y[:200]), (x[200:], y[200:])])  # batches of different weight
    found = learning_progress(problem)
    assert found.trivial == pytest.approx(best_constant(problem, shape), rel=1e-5)
    assert found.loss == pytest.approx(problem.loss(), rel=1e-9)


def test_an_absolute_error_is_compared_with_the_median():
    y = torch.tensor([0.0, 0.0, 0.0, 10.0, 1.0]).repeat(20)[:, None]
    found = learning_progress(th.Problem(nn.Linear(1, 1), nn.L1Loss(), (torch.randn(100, 1), y)))
    assert (found.trivial, found.trivial_name) == (pytest.approx(2.2), "always predicting the median of the targets")


@pytest.mark.parametrize("delta", [0.01, 100.0])
def test_between_squares_and_absolute_values_the_better_one_of_mean_and_median_counts(delta):
    y = torch.tensor([0.0, 0.0, 0.0, 10.0, 1.0]).repeat(20)[:, None]
    loss = nn.HuberLoss(delta=delta)
    found = learning_progress(th.Problem(nn.Linear(1, 1), loss, (torch.randn(100, 1), y)))
    both = [float(loss(torch.full_like(y, value), y)) for value in (0.0, 2.2)]
    assert found.trivial == pytest.approx(min(both), rel=1e-5)


def test_probabilities_are_compared_with_the_base_rate_itself():
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    y = (torch.arange(100) % 4 == 0).float()[:, None]
    found = learning_progress(th.Problem(model, nn.BCELoss(), (torch.randn(100, 2), y)))
    assert found.trivial == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), rel=1e-5)


class OwnLoss(nn.Module):
    """A language model that shifts its labels itself, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def test_language_models_are_compared_with_the_frequencies_of_the_tokens_they_predict():
    tokens = torch.randint(5, (200, 9), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0  # never predicted
    found = learning_progress(th.Problem(OwnLoss(), None, {"input_ids": tokens, "labels": tokens}), lr=0.1)
    shares = tokens[:, 1:].flatten().bincount().double() / (8 * 200)
    assert found.trivial == pytest.approx(-float((shares * shares.log()).sum()), rel=1e-6)
    assert "token frequencies" in found.sentence()
    assert found.accuracy is not None


def test_few_labels_of_many_classes_do_not_flatter_their_own_frequencies():
    """A hundred labels from a thousand equally frequent classes: their own frequencies would give ln 100 or less."""
    counts = torch.randint(1000, (100,), generator=torch.Generator().manual_seed(0)).bincount(minlength=1000).double()
    assert abs(label_entropy(counts) - math.log(1000)) < 0.1
    plain = torch.tensor([500.0, 250.0, 250.0])
    assert label_entropy(plain) == pytest.approx(1.5 * math.log(2))


def test_an_absolute_error_of_far_targets_is_not_taken_for_a_squared_one():
    y = 1e5 + torch.randn(100, 1)
    for power, kind in ((1, "absolute error"), (2, "squared error")):
        problem = th.Problem(nn.Linear(2, 1), lambda z, t, p=power: (z - t).abs().pow(p).mean(), (torch.randn(100, 2), y))
        assert first_loss(problem, 50)[0].name == kind


def test_an_unknown_loss_has_no_constant_prediction():
    problem = th.Problem(nn.Linear(2, 1), lambda z, y: (z - y).abs().sqrt().mean(), (torch.randn(40, 2), torch.randn(40, 1)))
    found = learning_progress(problem, lr=1e-3)
    assert found.trivial is None
    assert found.state in ("learning", "unknown")


# Errors and states


def test_the_error_of_the_loss_is_that_of_the_choice_of_samples():
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    problem = th.Problem(model, lambda z, y: z.mean(), (losses[:, None], torch.zeros(1000, 1).double()))
    found = learning_progress(problem)
    assert found.loss == pytest.approx(float(losses.mean()))
    assert found.loss_error == pytest.approx(float(losses.std()) / math.sqrt(1000), rel=0.5)
    shares = torch.tensor([0.2, 0.3, 0.5])
    assert jackknife(shares, torch.full((3,), 7.0)) == pytest.approx(0.0, abs=1e-6)


def test_the_trend_is_the_change_per_step_and_has_no_error_without_noise():
    slope, error = trend([-0.5 * t for t in range(40)])
    assert slope == pytest.approx(-0.5)
    assert error < 0.1 * 0.5


@pytest.mark.parametrize(
    ("numbers", "more", "state"),
    [
        ((0.4, 2.3, 0.01, 0.0, 0.001), {}, "learned"),
        ((0.4, 2.3, 0.01, -0.01, 0.001), {}, "learning"),
        ((0.01, 2.3, 0.001, -0.001, 1e-5), {}, "learned"),  # nothing more to gain
        ((2.3, 2.3, 0.01, -0.01, 0.001), {"losses": (2.3,) * 40}, "learning"),
        ((2.3, 2.3, 0.01, -0.01, 0.001), {"losses": (2.3,) * 40, "knows_more": False}, "not learning"),
        ((2.3, 2.3, 0.01, 0.0, 0.001), {"losses": (2.3,) * 40, "knows_more": True}, "learning"),  # a plateau
        ((2.3, 2.3, 0.01, 0.1, 0.001), {"losses": (2.3,) * 40, "knows_more": True}, "diverges"),
        ((2.3, 2.3, 0.01, 0.01, 0.001), {"losses": (2.3,) * 40, "knows_more": True}, "not learning"),
        ((0.4, 2.3, 0.01, 0.2, 0.001), {"losses": (0.4,) * 40}, "diverges"),  # what was known is lost
        ((0.4, 2.3, 0.01, None, None), {"losses": (0.4, math.inf)}, "diverges"),
        ((0.4, 2.3, 0.01, None, None), {}, "learned"),
        ((2.3, 2.3, 0.01, None, None), {}, "unknown"),
        ((2.3, None, math.inf, 0.0, 0.001), {}, "unknown"),
        ((2.3, None, math.inf, -0.1, 0.001), {}, "learning"),
    ],
)
def test_states_by_their_rules(numbers, more, state):
    assert judge_state(*numbers, **more) == state


def progress_of(model: nn.Module, lr: float, data: tuple[Tensor, Tensor] | None = None, **more: object) -> object:
    return learning_progress(th.Problem(model, nn.CrossEntropyLoss(), data or classes()), lr=lr, **more)


def test_a_training_is_followed_from_its_start_to_its_end():
    model, (x, y) = mlp(6, 12, 3), classes()
    optimizer = SGD(model.parameters(), lr=0.2)
    start = progress_of(model, 0.2, optimizer=optimizer)
    assert (start.state, start.learning, start.knows_more) == ("learning", True, True)
    assert start.sentence().startswith("It begins to learn: loss ")
    assert start.slope < -5 * start.slope_error
    th.train(model, nn.CrossEntropyLoss(), (x, y), optimizer, steps=400)
    end = progress_of(model, 0.2, valid=th.Problem(model, nn.CrossEntropyLoss(), classes(seed=1)))
    assert (end.state, end.learning) == ("learned", True)
    assert end.accuracy > 0.8
    assert end.gap == pytest.approx(end.valid_loss - end.loss)
    assert 0 < end.gap_error < 0.1
    assert "The validation loss is" in end.sentence()


NUMBERS = {"loss": 1.79, "loss_error": 0.01, "trivial": 2.3, "trivial_name": "chance", "state": "learned", "steps": 40}


@pytest.mark.parametrize(
    ("slope", "error", "said"),
    [
        (0.0, 1e-4, "does not fall any further in 40 steps"),  # 3 errors over 40 steps are 0.7 %
        (-0.0012, 6e-4, "whether it still falls cannot be told from 40 steps"),  # a fall of 2.7 % in 40 steps, at 2 errors
        (0.001, 2e-3, "whether it still falls cannot be told from 40 steps"),
    ],
)
def test_that_a_loss_does_not_fall_is_said_only_where_the_error_rules_a_fall_out(slope, error, said):
    assert said in LearningProgress(**NUMBERS, slope=slope, slope_error=error).sentence()


def test_a_longer_run_that_falls_overrules_the_trend_of_a_short_one():
    short = LearningProgress(**NUMBERS, slope=0.0, slope_error=1e-4)
    found = short.followed(1.79, 1.71, 60)
    assert (found.state, "does not fall" in found.sentence()) == ("learning", False)
    assert "60 steps on a copy, the last of them at a falling rate, lower it by 4.5 %" in found.sentence()
    assert short.followed(1.79, 1.78, 60) is short
    above = replace(short, loss=2.3, state="not learning")
    assert (above.followed(2.3, 2.0, 60).state, above.followed(9.0, 2.3, 60).state) == ("learning", "learning")
    assert above.followed(2.3, 2.3, 60).state == "not learning"


def test_a_fall_in_train_mode_is_told_from_the_loss_in_eval_mode():
    found = LearningProgress(
        **{**NUMBERS, "loss": 7.45, "trivial": 0.28, "state": "learning"}, slope=-0.00166, slope_error=1e-4, still=(0.46,) * 40
    )
    assert "in train mode, where it is 0.46, it falls by 0.00166 per step" in found.sentence()


def test_the_model_and_the_optimizer_are_left_as_found():
    model = mlp(6, 12, 3)
    optimizer = Adam(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    progress_of(model, 0.1, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_learn_is_told_from_a_plateau():
    dead = mlp(6, 12, 12, 3)
    nn.init.constant_(dead[2].bias, -100.0)
    found = progress_of(dead, 0.2)
    assert (found.state, found.constant) == ("not learning", True)
    assert "outputs are the same for all samples" in found.sentence()
    deep = progress_of(mlp(6, *[24] * 8, 3, activation=nn.Sigmoid), 0.2)
    assert (deep.state, deep.knows_more) == ("not learning", False)
    plateau = progress_of(mlp(6, *[24] * 4, 3), 0.03, classes(600))
    assert (plateau.state, plateau.knows_more) == ("learning", True)
    assert progress_of(mlp(6, 12, 3), 1e4).state == "diverges"


# Layer by layer


def test_gradients_and_updates_by_layer_are_those_of_autograd_and_of_the_optimizer():
    x, y = classes()
    model = mlp(6, 8, 8, 3, activation=nn.Tanh).double()
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    th.train(model, nn.CrossEntropyLoss(), (x.double(), y), optimizer, steps=3)
    flow = gradient_flow(th.Problem(model, nn.CrossEntropyLoss(), (x.double(), y)), lr=0.01, optimizer=optimizer)
    assert [row["layer"] for row in flow.layers] == ["0", "2", "4"]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.double()), y).backward()
    gradients = [float(model[i].weight.grad.norm() / model[i].weight.detach().norm()) for i in (0, 2, 4)]
    assert [row["gradient_ratio"] for row in flow.layers] == pytest.approx(gradients)
    before = [model[i].weight.detach().clone() for i in (0, 2, 4)]
    optimizer.step()
    moved = [float((model[i].weight.detach() - old).norm() / old.norm()) for i, old in zip((0, 2, 4), before, strict=True)]
    assert [row["update_ratio"] for row in flow.layers] == pytest.approx(moved)


class Backwards(nn.Module):
    """Layers written down in another order than they are called, activations as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = nn.Linear(8, 3), nn.BatchNorm1d(8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).sigmoid()


def test_layers_stand_in_the_order_of_the_forward_pass_with_their_activations():
    seen = record_forward(th.Problem(Backwards(), nn.MSELoss(), (torch.randn(20, 6), torch.rand(20, 3))))
    assert list(seen.order) == ["first", "norm", "last"]
    assert seen.layers["first"].activation == "relu"  # behind the normalisation
    assert seen.layers["last"].activation == "sigmoid"
    assert seen.layers["last"].saturated is None  # it makes the output
    assert seen.output_activation == "sigmoid"


def test_scales_saturation_and_units_alive():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[100.0], [0.01]]))
        model[2].bias.copy_(torch.tensor([-50.0, 5.0, 5.0, -50.0]))
    x = torch.tensor([[-1.0], [1.0], [2.0], [-2.0]])
    rows = {row["layer"]: row for row in gradient_flow(th.Problem(model, nn.MSELoss(), (x, x))).layers}
    assert rows["0"]["input_scale"] == pytest.approx(math.sqrt(2.5))
    assert rows["0"]["saturated"] == 0.5
    assert rows["2"]["alive"] == 0.5
    assert rows["0"]["update_ratio"] is None


def test_units_of_a_linear_layer_over_tokens_are_its_last_axis():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(4, 2), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-50.0, 5.0, -50.0, -50.0]))
    x = torch.randn(5, 3, 2)
    rows = {row["layer"]: row for row in gradient_flow(th.Problem(model, nn.MSELoss(), (x, x[..., :1]))).layers}
    assert rows["0"]["alive"] == 0.25


def test_vanishing_and_growing_show_in_one_number_each():
    x, y = classes()
    deep = gradient_flow(th.Problem(mlp(6, *[24] * 8, 3, activation=nn.Sigmoid), nn.CrossEntropyLoss(), (x, y)))
    assert deep.first_to_last < 1e-4
    large = mlp(6, *[24] * 5, 3)
    with torch.no_grad():
        [module.weight.mul_(10.0) for module in large if isinstance(module, nn.Linear)]
    flow = gradient_flow(th.Problem(large, nn.CrossEntropyLoss(), (x, y)))
    assert flow.amplification > 100
    assert flow.layers[1]["growth"] == pytest.approx(10.0, rel=0.2)
    usual = gradient_flow(th.Problem(mlp(6, 24, 24, 3), nn.CrossEntropyLoss(), (x, y)))
    assert 0.02 < usual.first_to_last < 50


# New weights


def test_new_weights_are_drawn_without_touching_the_old_ones():
    layer = nn.Linear(30, 20)
    before = layer.weight.clone()
    fresh = new_module(layer)
    assert torch.equal(layer.weight, before)
    assert not torch.equal(fresh.weight, before)
    assert looks_new(layer)
    assert new_module(nn.ReLU()) is None
    layer.weight.data.mul_(1.3)  # between the scales of the usual rules
    assert not looks_new(layer)
    assert looks_new(nn.Conv2d(8, 8, 3))


def test_single_units_are_drawn_anew():
    layer = nn.Linear(5, 4)
    before = layer.weight.detach().clone()
    redraw(layer, torch.tensor([False, True, False, True]))
    same = (layer.weight == before).all(1).tolist()
    assert same == [True, False, True, False]


@pytest.mark.parametrize(("activation", "name"), [(nn.ReLU, "relu"), (nn.Tanh, "tanh"), (nn.Sigmoid, "sigmoid")])
def test_weights_at_scale_keep_gradients_alive_through_ten_layers(activation, name):
    x, y = classes()
    model = mlp(6, *[48] * 10, 3, activation=activation)
    names = {str(2 * i): name if i < 10 else "" for i in range(11)}
    draw_at_scale(model, names)
    flow = gradient_flow(th.Problem(model, nn.CrossEntropyLoss(), (x, y)))
    assert 1e-2 < flow.first_to_last < 1e2


def test_dead_units_are_found_one_by_one():
    model = mlp(6, 8, 3)
    with torch.no_grad():
        model[0].bias[[1, 5]] = -100.0
    problem = th.Problem(model, nn.CrossEntropyLoss(), classes())
    assert torch.nonzero(dead_units(problem)["0"]).flatten().tolist() == [1, 5]
    model[0].bias.data.fill_(-100.0)
    audit = audit_parameters(problem)
    assert (audit.shut, audit.starved) == ((("0",),), ("2",))


# The set-up


def test_weight_decay_is_measured_in_steps():
    model = mlp(6, 8, 3)
    problem = th.Problem(model, nn.CrossEntropyLoss(), classes())
    half = {
        SGD(model.parameters(), lr=0.1, weight_decay=0.2): math.log(2) / 0.02,
        SGD(model.parameters(), lr=0.1, weight_decay=0.2, momentum=0.9): math.log(2) / 0.2,
        AdamW(model.parameters(), lr=0.01, weight_decay=3.0): math.log(2) / 0.03,
    }
    for optimizer, steps in half.items():
        found = check_setup(problem, lr=optimizer.param_groups[0]["lr"], optimizer=optimizer)
        assert found.decay_half_life == pytest.approx(steps)
        assert found.decay_force > 0
    assert check_setup(problem, lr=0.1, optimizer=SGD(model.parameters(), lr=0.1)).decay_half_life == math.inf


class TestProgress(ResultContract):
    def make(self):
        return progress_of(mlp(6, 8, 3), 0.1, valid=th.Problem(mlp(6, 8, 3), nn.CrossEntropyLoss(), classes(seed=1)), steps=8)


class TestFlow(ResultContract):
    def make(self):
        return gradient_flow(th.Problem(mlp(6, 8, 3), nn.CrossEntropyLoss(), classes()), lr=0.1)


class TestSetup(ResultContract):
    def make(self):
        model = mlp(6, 8, 3)
        problem = th.Problem(model, nn.CrossEntropyLoss(), classes())
        return check_setup(problem, lr=0.1, optimizer=SGD(model.parameters(), lr=0.1))
