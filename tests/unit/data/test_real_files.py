"""The real files, where they are: what is known of each set holds."""

from __future__ import annotations

import pytest
import torch

from theodolite import data
from theodolite.data import catalog
from theodolite.data.fetch import digest
from theodolite.data.text import words


@pytest.fixture
def load(real, monkeypatch):
    monkeypatch.setenv("THEODOLITE_DATA", str(real))

    def load(name):
        try:
            return data.load(name)
        except data.MissingDataError:
            pytest.skip(f"{name} is not in $THEODOLITE_DATA")

    return load


@pytest.mark.parametrize(
    ("name", "shape", "classes", "least", "mean", "std"),
    [
        ("mnist", (1, 28, 28), 10, 60000, [0.1307], [0.3081]),
        ("fashion_mnist", (1, 28, 28), 10, 60000, [0.2860], [0.3530]),
        ("cifar10", (3, 32, 32), 10, 12500, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        ("cifar100", (3, 32, 32), 100, 5000, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
        ("svhn", (3, 32, 32), 10, 10000, [0.4377, 0.4438, 0.4728], [0.1980, 0.2010, 0.1970]),
    ],
)
def test_images(load, name, shape, classes, least, mean, std):
    found = load(name)
    assert found.x_train.shape[1:] == shape
    assert len(found.classes) == classes
    assert len(found.y_train) >= least
    assert torch.bincount(found.y_train, minlength=classes).min() > 0
    tolerance = 1e-4 if name.endswith("mnist") else 0.03  # published for the full sets
    for measured, published in zip(found.statistics(), (mean, std), strict=True):
        torch.testing.assert_close(measured, torch.tensor(published).double(), atol=tolerance, rtol=0)
    if name == "mnist":
        assert torch.bincount(found.y_train)[:3].tolist() == [5923, 6742, 5958]
    if name == "fashion_mnist":
        assert torch.bincount(found.y_test).tolist() == [1000] * 10
    if name == "cifar100":
        assert (found.classes[0], found.classes[99]) == ("apple", "worm")


def test_wikitext2(load):
    text = load("wikitext2")
    parts = [words(text.part(part)) for part in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [2088628, 217646, 245569]
    assert len(set(parts[0])) == 33278 == len(text.vocabulary())


def test_tiny_texts(load):
    text = load("tinyshakespeare")
    whole = text.train + text.valid + text.test
    assert len(whole) == 1115394
    assert len(text.alphabet()) == 65
    assert whole.startswith("First Citizen:\nBefore we proceed")
    stories = load("tinystories_sample")
    assert len((stories.train + stories.valid + stories.test).split()) == 37693


def test_weights(real):
    if not (real / "resnet20_cifar10.npz").is_file():
        pytest.skip("resnet20_cifar10.npz is not in $THEODOLITE_DATA")
    net = data.weights("resnet20_cifar10", folder=real)
    trained = {k: v for k, v in net.items() if not k.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert sum(tensor.numel() for tensor in trained.values()) == 269722
    assert net["linear.weight"].shape == (10, 64)


def test_stories260k(real):
    if not (real / "stories260k.npz").is_file():
        pytest.skip("stories260k.npz is not in $THEODOLITE_DATA")
    net, config = data.weights("stories260k", folder=real), data.stories260k_config(folder=real)
    assert sum(tensor.numel() for tensor in net.values()) == 260032
    assert net["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"]) == (512, 64)
    tok = data.stories260k_tokenizer(folder=real)
    assert len(tok) == 512
    text = "Once upon a time, there was a little girl named Lily."
    tokens = tok.encode(text)
    assert tokens[0] == 1
    assert tok.decode(tokens) == text
    assert len(tokens) < len(text) / 2
    assert [tok.pieces[t] for t in tok.encode("the day", begin=False)] == [" the", " day"]
    sample = data.load("tinystories_sample", folder=real).train
    assert tok.decode(tok.encode(sample)) == sample


def test_checksums(real):
    known = {file.name: file.digest for name in data.names() for file in catalog.get(name).files}
    present = [path for path in real.iterdir() if path.name in known]
    if not present:
        pytest.skip("no file of the table is in $THEODOLITE_DATA")
    for path in present:
        assert digest(path, "sha256") == known[path.name], path.name
