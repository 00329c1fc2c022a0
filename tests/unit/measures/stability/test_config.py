"""Arguments of a stability study: what is refused before anything is trained, and what the result keeps of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import theodolite as th
from tests.unit.measures.stability.test_study import LOSS, TEST, TRAIN, X, Y, line, small, study
from theodolite.measures.stability import example_losses, training_pairs
from theodolite.measures.stability.training_pairs import mean

G = torch.Generator().manual_seed(4)
LOGITS, LABELS = torch.randn(30, 4, generator=G).double(), torch.randint(0, 4, (30,), generator=G)
LONG, TOKENS = torch.randn(30, 4, 5, generator=G).double(), torch.randint(0, 4, (30, 5), generator=G)
PADDED = TOKENS.masked_fill(torch.rand(30, 5, generator=G) < 0.3, -100)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
BITS = (LOGITS > 0.3).double()


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT), LOGITS, LABELS),
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), LOGITS, LABELS),
        (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, LABELS),
        (nn.CrossEntropyLoss(weight=WEIGHT), LOGITS, LOGITS.softmax(1)),
        (nn.CrossEntropyLoss(), LONG, PADDED),
        (nn.CrossEntropyLoss(weight=WEIGHT), LONG, PADDED),
        (nn.CrossEntropyLoss(ignore_index=2), LONG, TOKENS),
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, ignore_index=1), LONG, TOKENS),
        (nn.NLLLoss(weight=WEIGHT), LOGITS.log_softmax(1), LABELS),
        (nn.MSELoss(), LOGITS, BITS),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), LOGITS, BITS),
        (nn.BCEWithLogitsLoss(weight=WEIGHT), LOGITS, BITS),
        (functional.cross_entropy, LOGITS, LABELS),
        (lambda outputs, targets: (outputs - targets).abs().mean(), LOGITS, BITS),
    ],
)
def test_losses_of_examples_average_exactly_to_the_loss(loss, outputs, targets):
    each = example_losses(loss, outputs, targets)
    assert each.shape == (30,)
    assert float(each.mean()) == pytest.approx(float(loss(outputs, targets)), rel=1e-13)


def test_a_reduction_of_its_own_does_not_mislead():
    class Own(nn.Module):
        reduction = "mean"

        def forward(self, outputs, targets):
            return functional.cross_entropy(outputs, targets)

    assert torch.equal(example_losses(Own(), LOGITS, LABELS), example_losses(functional.cross_entropy, LOGITS, LABELS))


def test_the_mean_does_not_depend_on_the_order():
    values = torch.randn(500, generator=G).double() * 10.0 ** torch.arange(500).remainder(30)
    assert mean(values) == mean(values.flip(0)) == mean(values[torch.randperm(500, generator=G)]) == math.fsum(values) / 500


def contrast(outputs, targets):
    """A loss of pairs of examples."""
    return (outputs @ outputs.T).logsumexp(1).mean()


def branching(outputs, targets):
    found = functional.cross_entropy(outputs, targets)
    return found if found < 1e9 else 0 * found


def weighted(outputs, targets):
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 3.0]))


class Named(nn.Module):
    """Returns its logits in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return {"logits": self.layer(x)}


def of_named(outputs, targets):
    return LOSS(outputs["logits"], targets)


REFUSED = [
    ({"loss": contrast}, r"depend on what else is in the batch\. Stability needs a loss that is a mean over examples"),
    ({"loss": branching}, r"cannot be taken of one example alone\. Stability needs a loss that is a mean"),
    ({"loss": weighted}, r"class weights and ignored labels as its own arguments"),
    ({"loss": nn.CrossEntropyLoss(reduction="sum")}, r"needs a loss that is a mean over examples"),
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"must be one number, a mean over the examples. Got shape \(256,\)"),
    ({"loss": nn.CrossEntropyLoss(ignore_index=0)}, r"train has examples without a label that counts: leave them out"),
    ({"loss": of_named, "factory": lambda seed: Named()}, r"returns a dict: wrap the model so that it returns the logits"),
    ({"loss": nn.BCEWithLogitsLoss(), "factory": line, "train": (X, Y.float())}, r"cannot be taken of outputs \(256, 1\)"),
    ({"loss": 3}, r"give a loss of outputs and targets"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_losses_without_a_value_per_example_are_refused_before_training(options, message, monkeypatch):
    monkeypatch.setattr(training_pairs.Recipe, "train", lambda *given, **more: pytest.fail("something was trained"))
    if "train" in options:
        options = {**options, "test": options["train"]}
    with pytest.raises(ValueError, match=message):
        study(**options)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast_against_the_outputs_are_refused():
    with pytest.raises(ValueError, match=r"outputs \(256, 1\) and targets \(256,\).* depend on what else is in the batch"):
        study(line, (X, X[:, 0]), (X, X[:, 0]), loss=nn.MSELoss())


def test_weighted_and_padded_losses_are_measured():
    row = study(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), sizes=[20], pairs=1, steps=4).rows()[0]
    assert math.isfinite(row["stab"])
    tokens = torch.randint(0, 3, (60, 4), generator=G)
    tokens[::2, 1:] = -100

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 12)

        def forward(self, x):
            return self.layer(x).view(len(x), 3, 4)

    found = study(lambda seed: Tagger(), (X[:60], tokens), (X[100:160], tokens), sizes=[20], pairs=1, steps=4)
    assert found.rows()[0]["dist"] > 0


BAD = [
    ({"sizes": [10.7]}, ValueError, r"Each of sizes must be an integer, at least 0. Got 10.7"),
    ({"sizes": 100}, ValueError, r"sizes must be a sequence of integers, such as \[100, 200, 400\]. Got 100"),
    ({"sizes": "100"}, ValueError, r"sizes must be a sequence of integers"),
    ({"sizes": ["20"]}, ValueError, r"Each of sizes must be an integer"),
    ({"sizes": [True]}, ValueError, r"Each of sizes must be an integer"),
    ({"checkpoints": [41]}, ValueError, r"checkpoints must lie within the run, 0 to 40 updates. Got 41"),
    ({"checkpoints": [-1]}, ValueError, r"Each of checkpoints must be an integer, at least 0"),
    ({"checkpoints": "12"}, ValueError, r"checkpoints must be a sequence"),
    ({"trials": [0, 0]}, ValueError, r"trials must be different numbers"),
    ({"trials": [-1]}, ValueError, r"Each of trials must be an integer, at least 0"),
    ({"trials": 0}, ValueError, r"trials must be"),
    ({"trials": -2}, ValueError, r"trials must be"),
    ({"paths": -1}, ValueError, r"paths must be an integer, at least 0. Got -1"),
    ({"batchnorm": "never"}, ValueError, r"batchnorm must be one of 'interpolate'"),
    ({"check_steps": -5}, ValueError, r"check_steps must be an integer, at least 0. Got -5"),
    ({"init_seed": -1}, ValueError, r"init_seed must be an integer"),
    ({"epochs": 3}, ValueError, r"epochs counts with stop='epochs' alone"),
    ({"loss_target": 0.1}, ValueError, r"loss_target counts with stop='train_loss' alone"),
    ({"stop": "epochs", "epochs": 3}, ValueError, r"takes epochs in place of steps"),
    ({"rate": [0.1, 0.2]}, ValueError, r"rate must be one number"),
    ({"momentun": 0.9}, TypeError, r"no argument 'momentun' \(nearest: momentum.*accepts rate, momentum, .*betas, eps"),
    ({"bitwise": False}, TypeError, r"no argument 'bitwise'"),
    ({"factory": nn.Linear(6, 2)}, TypeError, r"give a function that builds one"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_arguments_that_cannot_be_meant_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        study(**options)


def test_numbers_of_numpy_are_numbers():
    found = study(
        sizes=np.array([20, 40]), pairs=np.int64(2), steps=np.int64(8), checkpoints=[np.int32(4)], trials=np.int64(1),
        rate=np.float32(0.25), batch_size=np.int64(10), eval_size=np.int64(50),
    )  # fmt: skip
    assert found.rows() == study(sizes=[20, 40], pairs=2, steps=8, checkpoints=[4], rate=0.25, eval_size=50).rows()


def test_unknown_trials_and_steps_are_named():
    found = study(sizes=[20, 40], pairs=2, steps=8, checkpoints=[4])
    for read in (found.values, found.fit):
        with pytest.raises(ValueError, match=r"no trial 3\. They have 0"):
            read("stab", trial=3)
        with pytest.raises(ValueError, match=r"no step 5\. They have 4, 8"):
            read("stab", step=5)


def test_the_settings_repeat_the_run(tmp_path):
    given = {"sizes": [20, 40], "pairs": 2, "steps": 8, "checkpoints": [4], "trials": [1], "momentum": 0.5, "init_seed": 3}
    found = study(**given, order_seed=2, pair_seed=7, eval_size=60, schedule={0: 1.0, 5: 0.1})
    told = json.loads(json.dumps(found.settings, allow_nan=False))
    assert told == found.settings
    assert told["threads"] == torch.get_num_threads()
    assert (told["epochs"], told["loss_target"], told["eval_size"]) == (None, None, 60)
    names = ("rate", "batch_size", "drop_last", "stop", "steps", "epochs", "loss_target", "sizes", "pairs", "trials")
    again = {name: told[name] for name in (*names, "checkpoints", "eval_size", "init_seed", "order_seed", "pair_seed", "paths")}
    schedule = {int(step): factor for step, factor in told["schedule"].items()}
    repeated = th.stability(
        small, told["optimizer"], TRAIN, TEST, **again, **told["optimizer_settings"], schedule=schedule, loss=LOSS, progress=False
    )
    assert repeated.rows() == found.rows()
    assert repeated.settings == found.settings
    found.save(tmp_path / "study")
    assert json.dumps(th.measures.stability.StabilityResult.load(tmp_path / "study").settings) == json.dumps(found.settings)


def test_the_settings_of_a_function_are_those_it_makes():
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.02, betas=(0.8, 0.99))

    found = th.stability(
        small, adam, TRAIN, TEST, sizes=[20], pairs=1, stop="epochs", epochs=2, loss=LOSS, batch_size=10, progress=False,
        schedule=lambda step: 1.0,
    )  # fmt: skip
    told = found.settings
    assert told["optimizer"].startswith("Adam(betas=(0.8, 0.99)")
    assert (told["rate"], told["steps"], told["epochs"]) == (0.02, None, 2)
    assert "lambda" in told["schedule"]
    json.dumps(told, allow_nan=False)
