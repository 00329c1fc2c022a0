"""Loading weights: all or nothing. The stored networks reach the accuracy and the loss stated for them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite import models
from theodolite.data import Tokenizer


def test_weights_round_trip():
    source, target = (models.build("ResNet20", width=4, seed=seed) for seed in (0, 1))
    source(torch.randn(4, 3, 8, 8))  # moves the running statistics
    assert models.load_weights(target, source.state_dict()) is target
    assert target.initialisation == "loaded"
    for (name, a), b in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_one_name_of_tied_weights_is_enough():
    model = models.gpt(seed=0)
    weights = {name: torch.ones_like(value) for name, value in model.state_dict().items() if name != "head.weight"}
    models.load_weights(model, weights)
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.eq(1).all()


def test_faults_are_listed_and_nothing_is_copied():
    model = models.build("F-20^2", inputs=8, seed=0)
    before = model.fc1.bias.clone()
    weights = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    weights["fc3.weights"] = weights.pop("fc3.weight")
    weights["fc2.bias"] = torch.ones(21)
    message = (
        r"missing fc3\.weight; unexpected fc3\.weights \(nearest: fc3\.weight\); wrong shapes: fc2\.bias is \(21,\), not \(20,\)"
    )
    with pytest.raises(ValueError, match=message):
        models.load_weights(model, weights)
    assert torch.equal(model.fc1.bias, before)


def test_long_lists_are_cut():
    with pytest.raises(ValueError, match="and 89 more"):
        models.resnet20_from(
            {"conv1.weight": torch.zeros(16, 3, 3, 3), "bn1.weight": torch.zeros(16), "bn1.bias": torch.zeros(16)}
        )


def test_only_tensors():
    with pytest.raises(TypeError, match=r"bias is a ndarray \(torch.from_numpy"):
        models.load_weights(nn.Linear(2, 1), {"weight": torch.zeros(1, 2), "bias": np.zeros(1)})


# The stored files ----------------------------------------------------------------------------------------------------


def stored(name: str) -> Path:
    """A file of the data folder; the test is skipped where it is absent."""
    folder = os.environ.get("THEODOLITE_DATA")
    if not folder:
        pytest.skip("THEODOLITE_DATA names no data folder")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name} is not in the data folder")
    return path


def tensors(name: str) -> dict[str, Tensor]:
    with np.load(stored(name)) as members:
        return {key: torch.from_numpy(members[key]) for key in members.files}


def test_resnet20_accuracy_on_the_stored_images():
    """91.6 % of the first 2500 test images of CIFAR-10 (91.73 % of all 10000 is the published value)."""
    images = stored("cifar10_subset.npz")
    model = models.resnet20_from(tensors("resnet20_cifar10.npz"))
    assert models.count_parameters(model) == 269_722
    with np.load(images) as data:
        x, y = torch.from_numpy(data["x_test"]), torch.from_numpy(data["y_test"]).long()
    x = x.permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.no_grad():
        right = [
            (model((part - mean) / std).argmax(1) == target) for part, target in zip(x.split(250), y.split(250), strict=True)
        ]
    assert len(y) == 2500
    assert torch.cat(right).double().mean().item() == pytest.approx(0.916, abs=0.0005)


@pytest.mark.slow
def test_near_zero_loss_the_edge_of_resnet20_is_no_limit():
    """At three times the critical rate the loss of training images never rises."""
    with np.load(stored("cifar10_subset.npz")) as data:
        x, y = torch.from_numpy(data["x_train"][:32]), torch.from_numpy(data["y_train"][:32]).long()
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    model = models.resnet20_from(tensors("resnet20_cifar10.npz"))
    problem = th.Problem(model, nn.CrossEntropyLoss(), ((x.permute(0, 3, 1, 2).float() / 255 - mean) / std, y))
    critical = th.critical_learning_rate(problem, trial=True, progress=False)
    assert critical.never_rose is not None
    assert critical.never_rose >= 3 * critical.value
    assert "the edge is no limit here" in critical.sentence()
    found = th.survey(problem, lr=3 * critical.value, only=["rate", "spikes"], progress=False)
    assert [finding.label for name in ("rate", "spikes") for finding in found.of(name)] == ["edge is no limit"] * 2


@pytest.fixture(scope="module")
def stories() -> tuple[nn.Module, Tokenizer]:
    about = json.loads(stored("stories260k.json").read_text(encoding="utf-8"))
    model = models.stories260k_from(tensors("stories260k.npz"), about["config"])
    assert models.count_parameters(model) == 260_032
    return model, Tokenizer(*zip(*about["tokens"], strict=True))


def text_loss(model: nn.Module, ids: Tensor, context: int = 512) -> float:
    """Nats per token, the text cut into pieces of one context each; only the first piece has the token that begins a text."""
    pieces = zip(ids[:-1].split(context), ids[1:].split(context), strict=True)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x[None])[0], y, reduction="sum") for x, y in pieces]
    return sum(losses).item() / (len(ids) - 1)


@pytest.mark.parametrize(
    ("name", "characters", "loss"),
    [
        ("tinystories_sample.txt.gz", 20_000, 1.34),  # published validation loss: 1.297
        ("wikitext2_test.txt.gz", 6_000, 6.0),
        ("wikitext2_test.txt.gz", 40_000, 5.47),  # a prefix says little about WikiText: articles differ by 1 nat
    ],
)
def test_stories260k_loss_on_the_stored_texts(stories, name, characters, loss):
    """The first characters of each file, with one line end between paragraphs as in what the network was trained on."""
    model, tokenizer = stories
    with gzip.open(stored(name), "rt", encoding="utf-8") as file:
        text = file.read(characters).replace("\n\n", "\n")
    assert text_loss(model, tokenizer.encode(text)) == pytest.approx(loss, abs=0.02)
