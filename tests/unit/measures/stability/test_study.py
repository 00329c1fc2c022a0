"""Replace-one stability: pairs, coupled training, metrics, and what bad input gets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import theodolite as th
from tests.unit.training.test_fleet_bitwise import MODELS, Attention
from theodolite.errors import NonFiniteError, NotRepeatableError
from theodolite.measures.stability import (
    convex_bounds,
    example_losses,
    largest_norm,
    largest_smoothness,
    make_pair,
    visiting_steps,
)
from theodolite.measures.stability.study import make_bench
from theodolite.measures.stability.training_pairs import LossTarget, Recipe, differences, distances, draw_swaps, null_swap
from theodolite.problem.batches import BatchParser
from theodolite.training.fleets.data import FleetFeed

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(260, 6, generator=GENERATOR)
Y = (X[:, 0] + 0.7 * torch.randn(260, generator=GENERATOR) > 0).long()
TRAIN, TEST = (X[:160], Y[:160]), (X[160:], Y[160:])
LOSS = nn.CrossEntropyLoss()


def small(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def line(seed: int) -> nn.Module:
    model = nn.Linear(6, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def study(factory=small, train=TRAIN, test=TEST, **options):
    given = {"sizes": [20, 40, 80], "pairs": 3, "steps": 40, "loss": LOSS, "batch_size": 10, "rate": 0.2, "progress": False}
    return th.stability(factory, "sgd", train, test, **{**given, **options})


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_check_01_a_pair_differs_in_one_example(m, seed):
    pool = torch.arange(40.0)[:, None], torch.arange(40)
    tests = 100 + torch.arange(9.0)[:, None], 100 + torch.arange(9)
    (x, y), (x2, y2), i, z = make_pair(pool, tests, m, np.random.default_rng(seed))
    assert len(set(x[:, 0].tolist())) == m
    assert (x != x2).nonzero()[:, 0].tolist() == [i] == (y != y2).nonzero()[:, 0].tolist()
    assert float(x2[i]) == 100 + z == int(y2[i])
    assert torch.equal(x[:, 0].long(), y)


def test_check_02_models_are_equal_until_the_example_is_seen_and_differ_after():
    seen = visiting_steps(torch.tensor([s.i for s in draw_swaps(160, 100, 80, 6, 0)]), 80, 10, 16, order_seed=0)
    first = seen.int().argmax(1)
    found = study(sizes=[80], pairs=6, steps=16, checkpoints=range(1, 16))
    for row in found.rows():
        parted = row["step"] > int(first[row["pair"]])
        assert (row["dist"] > 0) == parted
        assert (row["stab"] > 0) == parted
        assert row["visits"] == int(seen[row["pair"], : row["step"]].sum())
    assert {row["step"] for row in found.rows()} == set(range(1, 17))


@pytest.mark.parametrize("name", MODELS)
def test_check_03_a_null_swap_leaves_nothing_apart(name):
    make, inputs = MODELS[name]
    bench = make_bench((inputs[:70], LABELS[:70]), (inputs[70:], LABELS[70:]))
    recipe = Recipe(make, "sgd", LOSS, 15, 33, settings={"rate": 0.05, "momentum": 0.9})
    swaps = draw_swaps(70, len(inputs) - 70, 66, 4, 0)
    text, kept = null_swap(recipe, bench, swaps, 15)
    assert text.startswith("4 pairs on equal data stayed bitwise equal over 15 steps")
    fleet = kept.fleet(8)
    kept.train(fleet, bench.joined, torch.cat([swap.members.repeat(2, 1) for swap in swaps]), progress=False)
    apart = distances(fleet.parameters)
    assert float(apart["dist"].max()) == 0.0 == float(apart["ndist"].max())
    assert float(apart["norm_S"].min()) > 0
    outputs = fleet.outputs(bench.evaluation)
    losses = [example_losses(LOSS, one, LABELS[70:]) for one in outputs]
    assert differences(losses[0], losses[1])["stab"] == 0.0


LABELS = torch.randint(0, 3, (99,), generator=torch.Generator().manual_seed(1))


def test_a_model_with_randomness_of_its_own_is_refused():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.random = nn.Linear(6, 2), np.random.default_rng()

        def forward(self, x):
            return self.layer(x) + float(self.random.standard_normal())

    with pytest.raises(NotRepeatableError, match=r"Two runs on the same data differ after 3 steps"):
        study(lambda seed: Noisy())


def test_check_04_the_same_seeds_give_the_same_table():
    first, second = study(paths=1), study(paths=1)
    assert first.rows() == second.rows()
    assert [p.rows() for p in first.paths.values()] == [p.rows() for p in second.paths.values()]
    other = study(init_seed=5)
    assert other.rows() != first.rows()


@pytest.mark.parametrize(("m", "batch", "drop_last"), [(23, 4, True), (23, 4, False), (20, 5, True), (7, 10, True)])
def test_check_05_the_batches_that_differ_are_those_predicted(m, batch, drop_last):
    swap = draw_swaps(160, 100, m, 1, 3)[0]
    pool = torch.arange(260)[:, None].float(), torch.arange(260)
    index = swap.rows(160)
    feed = FleetFeed(
        pool, 2, shared=True, batch_size=min(batch, m), order_seeds=[7, 7], device=torch.device("cpu"), index=index,
        parse=BatchParser(own_loss=False, target_key="labels"), drop_last=drop_last,
    )  # fmt: skip
    expected = visiting_steps(torch.tensor([swap.i]), m, batch, 30, order_seed=7, drop_last=drop_last)[0]
    for step in range(30):
        targets = feed.batch(*divmod(step, feed.batches)).leaves[-1]
        assert bool((targets[0] != targets[1]).any()) == bool(expected[step])


def test_check_10_the_convex_inequalities_hold_at_every_checkpoint():
    labels = Y.float()[:, None]
    train, test = (X[:160], labels[:160]), (X[160:], labels[160:])
    sizes, batch, rate = [20, 40, 80], 10, 0.3
    found = study(
        line, train, test, sizes=sizes, pairs=6, steps=60, loss=nn.BCEWithLogitsLoss(), rate=rate, checkpoints=range(60)
    )
    largest, largest_test = largest_norm(X), largest_norm(X[160:])
    smooth = largest_smoothness(X, torch.arange(260).reshape(-1, 10))
    assert rate <= 2 / smooth / 2  # batches of the runs are others, but none is twice as steep
    used = 0
    for row in found.rows():
        bounds = convex_bounds(
            largest_input=largest,
            largest_test_input=largest_test,
            rate=rate,
            batch=batch,
            visits=row["visits"],
            smoothness=smooth,
        )
        assert bounds.hold(row["dist"], row["stab"])
        used += row["dist"] > 0.02 * float(bounds.distance_bound)
    assert used > 100  # the bound is of the size of what it bounds


def test_check_11_the_normalised_distance_is_at_most_two():
    for row in study().rows():
        assert row["ndist"] == pytest.approx(2 * row["dist"] / (row["norm_S"] + row["norm_S2"]), rel=1e-12)
        assert 0 <= row["ndist"] <= 2
    opposite = torch.ones(1, 4), -torch.ones(1, 4)
    assert float(distances({"w": torch.cat(opposite)})["ndist"]) == 2.0


def test_check_15_further_pairs_never_lower_the_maximum():
    few, many = study(pairs=2), study(pairs=5)
    for quantity in ("stab", "dist", "gap_loss"):
        for m in few.sizes:
            assert few.values(quantity)[m] == pytest.approx(many.values(quantity)[m][:2], rel=1e-6)
            assert max(many.values(quantity)[m]) >= max(many.values(quantity)[m][:2])
    fit = many.fit("dist")
    assert fit.b_low <= fit.b <= fit.b_high


def test_check_16_leaving_z_out_cannot_raise_the_maximum():
    found = study(pairs=6)
    assert all(row["stab_excl_z"] <= row["stab"] for row in found.rows())
    subset = study(pairs=6, eval_size=40)
    for all_, few in zip(found.rows(), subset.rows(), strict=True):
        assert few["stab"] <= all_["stab"]
        assert few["dist"] == all_["dist"]
    assert found.settings["eval_size"] == 100
    losses = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 4.0])
    assert differences(*losses, z=1) == pytest.approx(
        {"stab": 3.0, "stab_excl_z": 0.0, "worst": 1, "q50": 1.5, "q90": 2.7, "q99": 2.97, "q999": 2.997}
    )


def test_check_17_no_gap_on_the_training_set_itself():
    # the whole pool as training and as evaluation set: the same examples, gathered by two ways
    pool = X[:40], Y[:40]
    found = study(train=pool, test=pool, sizes=[40], pairs=2, steps=10)
    assert [(row["gap_loss"], row["gap_01"]) for row in found.rows()] == [(0.0, 0.0)] * 2
    assert any("whole pool" in note for note in found.notes)


def test_metrics_are_those_of_two_plain_loops():
    found = study(sizes=[40], pairs=2, steps=12)
    row = found.select(pair=1)[0]
    swap = draw_swaps(160, 100, 40, 2, 0)[1]
    inputs, targets = torch.cat([TRAIN[0], TEST[0]]), torch.cat([TRAIN[1], TEST[1]])
    models = []
    for members in swap.rows(160):
        torch.manual_seed(0)
        model = small(0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.2)
        th.train(model, LOSS, (inputs[members], targets[members]), sgd, steps=12, batch_size=10, seed=0, progress=False)
        models.append(model.requires_grad_(False))
    losses = [nn.functional.cross_entropy(m(TEST[0]).double(), TEST[1], reduction="none") for m in models]
    assert row["stab"] == pytest.approx(float((losses[0] - losses[1]).abs().max()), rel=1e-3)
    assert row["worst"] == int((losses[0] - losses[1]).abs().argmax())
    own = inputs[swap.members], targets[swap.members]
    gap = losses[0].mean() - nn.functional.cross_entropy(models[0](own[0]).double(), own[1])
    assert row["gap_loss"] == pytest.approx(float(gap), abs=1e-6)
    wrong = [float((models[0](x).argmax(1) != y).double().mean()) for x, y in (TEST, own)]
    assert row["gap_01"] == pytest.approx(wrong[0] - wrong[1], abs=1e-12)
    flat = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
    assert row["dist"] == pytest.approx(float((flat[0] - flat[1]).norm()), rel=1e-4)
    assert row["norm_S2"] == pytest.approx(float(flat[1].norm()), rel=1e-6)
    assert (row["i"], row["z"]) == (swap.i, swap.z)


def test_losses_of_single_examples_average_to_the_loss():
    outputs, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    cases = [
        (nn.CrossEntropyLoss(), outputs, labels),
        (nn.CrossEntropyLoss(label_smoothing=0.1), outputs, labels),
        (nn.MSELoss(), outputs, torch.randn(30, 4)),
        (nn.BCEWithLogitsLoss(), outputs[:, :1], (labels > 1).float()[:, None]),
        (nn.functional.cross_entropy, outputs, labels),
        (lambda out, target: (out - target).abs().mean(), outputs, torch.randn(30, 4)),
    ]
    for loss, out, target in cases:
        each = example_losses(loss, out, target)
        assert each.shape == (30,)
        assert each.dtype == torch.float64
        assert float(each.mean()) == pytest.approx(float(loss(out, target)), rel=1e-5)


def test_epochs_and_a_target_loss_end_the_runs():
    by_epochs = study(stop="epochs", epochs=3, steps=None)
    assert {row["m"]: row["steps_taken"] for row in by_epochs.rows()} == {20: 6, 40: 12, 80: 24}
    by_loss = study(stop="train_loss", loss_target=0.6, steps=400, sizes=[40, 80])
    assert all(0 < row["steps_taken"] < 400 for row in by_loss.rows())
    rule = LossTarget(0.5, 2)
    said = [rule(step, torch.tensor(losses)).tolist() for step, losses in enumerate([[0.4, 0.4], [0.4, 0.9], [0.9, 0.05]])]
    assert said == [[False, False], [True, False], [False, True]]


def test_trials_have_seeds_of_their_own_and_the_same_pairs():
    found = study(trials=2, checkpoints=[10])
    assert found.trials == (0, 1)
    a, b = (found.select(trial=trial, m=40, step=40) for trial in (0, 1))
    assert [row["z"] for row in a] == [row["z"] for row in b]
    assert [row["dist"] for row in a] != [row["dist"] for row in b]
    assert len(found.rows()) == 2 * 3 * 3 * 2
    assert found.fit("dist", trial=1, step=10).ms == (20, 40, 80)


def test_pairs_that_diverge_are_reported_and_left_out():
    found = study(lambda seed: nn.Linear(6, 1), (X[:160], X[:160, :1]), (X[160:], X[160:, :1]), loss=nn.MSELoss(), rate=0.9)
    lost = [row for row in found.rows() if row["diverged"]]
    assert lost
    assert all(math.isnan(row["stab"]) for row in lost)
    assert any("diverged" in note for note in found.notes)


def test_paths_join_the_pairs_of_the_smallest_and_largest_size():
    found = study(paths=2)
    assert len(found.paths) == 4
    path = next(iter(found.paths.values()))
    pair = next(iter(found.paths)).split()
    row = found.select(m=int(pair[3].strip(",")), pair=int(pair[5]))[0]
    assert float(path.test_accuracy[50]) == pytest.approx(row["test_accuracy"])
    assert "in one basin" in found.sentence()


def test_the_result_is_kept_on_disk(tmp_path):
    found = study(paths=1)
    found.save(tmp_path / "study")
    again = th.measures.stability.StabilityResult.load(tmp_path / "study")
    assert again.rows() == found.rows()
    assert str(again) == str(found)
    assert "Exchanging one of 80 examples" in str(found)


class Samples(Dataset):
    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int):
        return TRAIN[0][i] + self.noise * torch.randn(6), int(TRAIN[1][i])


def test_pools_may_come_as_data_sets_or_loaders():
    rows = study(sizes=[40]).rows()
    for pool in (
        Samples(),
        TensorDataset(*TRAIN),
        DataLoader(TensorDataset(*TRAIN), batch_size=32, shuffle=True),
        list(Samples()),
    ):
        assert study(train=pool, sizes=[40]).rows() == rows
    batches = [(TRAIN[0][i : i + 32], TRAIN[1][i : i + 32]) for i in range(0, 160, 32)]
    assert study(train=batches, sizes=[40]).rows() == rows


def growing():
    """A factory that makes a wider network every time."""
    widths = iter(range(3, 100))

    def make(seed: int) -> nn.Module:
        width = next(widths)
        return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2))

    return make


WRONG = [
    ({"sizes": [20, 161]}, ValueError, r"1 to 160 examples, as many as the training pool has. Got 161"),
    ({"sizes": [0]}, ValueError, r"1 to 160 examples"),
    ({"sizes": []}, ValueError, r"at least one"),
    ({"sizes": [20, 20]}, ValueError, r"different numbers"),
    ({"test": (X[:0], Y[:0])}, ValueError, r"test is empty"),
    ({"train": (X[:0], Y[:0])}, ValueError, r"train is empty"),
    ({"test": (X[:, :4], Y)}, ValueError, r"examples of one shape"),
    ({"eval_size": 0}, ValueError, r"eval_size must be a positive integer"),
    ({"train": Samples(noise=0.1)}, NotRepeatableError, r"example 0 changed between two readings"),
    ({"train": iter([TRAIN])}, ValueError, r"read only once"),
    ({"train": (X[:50], Y[:40])}, ValueError, r"as many inputs as targets"),
    ({"train": (X / 0, Y)}, NonFiniteError, r"NaN or inf"),
    ({"pairs": 0}, ValueError, r"pairs must be a positive integer"),
    ({"steps": None}, ValueError, r"steps must be a positive integer"),
    ({"stop": "never"}, ValueError, r"stop must be one of"),
    ({"stop": "train_loss"}, ValueError, r"needs loss_target"),
    ({"loss": None}, ValueError, r"give a loss of outputs and targets"),
    ({"factory": growing()}, ValueError, r"same architecture"),
    ({"rate": None}, ValueError, r"rate is missing"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
def test_bad_input_is_named(options, kind, message):
    with pytest.raises(kind, match=message):
        study(**options)


def test_a_factory_with_randomness_of_its_own_is_refused():
    random = np.random.default_rng()

    def careless(seed: int) -> nn.Module:
        model = small(seed)
        nn.init.constant_(model[2].bias, random.standard_normal())
        return model

    with pytest.raises(NotRepeatableError, match=r"factory\(0\) gave other weights when called again"):
        study(careless)


def test_models_without_a_vectorised_form_are_measured_one_by_one():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.cell(x.view(len(x), 3, 2))[0][:, -1])

    dropped = lambda seed: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 2))  # noqa: E731
    for factory in (lambda seed: Recurrent(), dropped):
        found = study(factory, sizes=[20], pairs=2, steps=8)
        assert found.cost.route == "loop"
        assert found.notes
        assert all(row["dist"] > 0 for row in found.rows())


def test_a_transformer_and_adam():
    tokens = torch.randint(0, 13, (90, 7), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 0] % 3
    found = th.stability(
        Attention, "adamw", (tokens[:60], labels[:60]), (tokens[60:], labels[60:]), sizes=[20, 50], pairs=2, steps=10, loss=LOSS,
        batch_size=7, rate=0.01, weight_decay=0.01, progress=False,
    )  # fmt: skip
    assert all(row["dist"] > 0 for row in found.rows())
