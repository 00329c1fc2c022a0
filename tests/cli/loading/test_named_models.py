"""Built-in networks by name: sizes from the data, data where none is named, stored weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from tests.cli.loading.conftest import one_line
from theodolite.cli.loading.losses import token_cross_entropy
from theodolite.cli.loading.subject import load_subject


def has_note(subject, *words: str) -> bool:
    return any(all(word in note for word in words) for note in subject.notes)


@pytest.mark.parametrize("name", ["F-40^2", "LeNet-mini", "CNN-4-8", "WRN-10-1", "NTK-FCN-2", "NTK-CNN-2", "ViT-1"])
def test_sizes_follow_the_data(surveyed, name):
    subject = surveyed(name, "digits", samples=6)
    assert subject.name == f"{name} on digits"
    assert subject.model(subject.data[0]).shape == (6, 10)
    assert subject.population == 1438
    assert isinstance(subject.loss, nn.CrossEntropyLoss)
    assert has_note(subject, "cross-entropy", "integers")
    assert 0 <= float(subject.data[0].min()) <= float(subject.data[0].max()) <= 1


def test_nothing_named_is_a_small_network_on_digits(surveyed):
    subject = surveyed(None)
    assert subject.name == "F-40^2 on digits"
    assert len(subject.data[1]) == 1000
    assert all(has_note(subject, words) for words in ("no --model", "no --data", "1000 of 1438"))


def test_other_seeds_are_other_weights_and_samples():
    first, second = (load_subject("F-40^2", "digits", samples=5, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.data[0], second.data[0])
    assert not torch.equal(first.model.fc1.weight, second.model.fc1.weight)


def test_images_too_small_are_enlarged(surveyed):
    subject = surveyed("LeNet5", samples=4)
    assert subject.data[0].shape == (4, 1, 32, 32)
    assert has_note(subject, "enlarged", "8×8")


def test_language_networks_without_data_get_random_tokens(surveyed):
    subject = surveyed("GPT-small", samples=3)
    x, y = subject.data
    assert x.shape == y.shape == (3, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert subject.loss is token_cross_entropy
    assert has_note(subject, "random tokens")


def test_bert_is_asked_for_hidden_tokens(surveyed):
    subject = surveyed("BERT-small", samples=2)
    x, y = subject.data
    assert ((y != -100).sum(1) == 10).all()  # 15 % of 64
    assert (x[y != -100] == 65).all()


def test_characters_of_a_text_file(surveyed, here):
    (here / "poem.txt").write_text("a rose is a rose is a rose\n" * 200)
    subject = surveyed("GPT-small", "poem.txt", samples=4)
    assert subject.model.head.out_features == len(set("a rose is\n"))
    assert subject.data[0].shape == (4, 64)
    assert subject.population > 4
    assert surveyed(None, "poem.txt", samples=2).name == "GPT-small on poem"
    assert surveyed("BERT-small", "poem.txt", samples=2).model.head.out_features == len(set("a rose is\n")) + 1


def test_a_short_text_gives_what_it_has(surveyed, here):
    (here / "short.txt").write_text("a rose is a rose")
    assert surveyed("GPT-small", "short.txt").data[0].shape == (1, 15)
    (here / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="at least 2") as error:
        load_subject("GPT-small", "empty.txt")
    one_line(error)


def test_stories260k_without_files_is_random_and_says_so(surveyed, no_data):
    subject = surveyed("stories260k", samples=2)
    assert has_note(subject, "weights are random")
    assert has_note(subject, "random tokens")


def test_stories260k_with_its_weights_knows_stories(surveyed, real):
    subject = surveyed("stories260k", samples=8)
    assert "tinystories_sample" in subject.name
    assert th.Problem(subject.model, subject.loss, subject.data).loss() < 2.5
    assert subject.population > 1000


def test_resnet20_with_its_weights_knows_cifar10(surveyed, real):
    if not (real / "resnet20_cifar10.npz").is_file() or not (real / "cifar10_subset.npz").is_file():
        pytest.skip("resnet20_cifar10.npz or cifar10_subset.npz is not in $THEODOLITE_DATA")
    subject = load_subject("ResNet20", None, samples=16)
    assert th.Problem(subject.model, subject.loss, subject.data).loss() < 0.3
    assert subject.population == 12500


def test_losses_by_word(surveyed):
    assert isinstance(surveyed("F-40^2", "digits", "cross_entropy", samples=4).loss, nn.CrossEntropyLoss)
    for word, kind in (("mse", nn.MSELoss), ("l1", nn.L1Loss), ("bce", nn.BCEWithLogitsLoss)):
        subject = surveyed("F-40^2", "digits", word, samples=4)
        assert isinstance(subject.loss, kind)
        assert subject.data[1].shape == (4, 10)
        assert has_note(subject, "vectors of 0 and 1")


def test_batches(surveyed):
    subject = surveyed("F-40^2", "digits", samples=10, batch_size=4)
    assert [len(y) for _, y in subject.data] == [4, 4, 2]


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("LeNet-5", None, {}, "LeNet5"),
        ("F-40^2", "digist", {}, "digits"),
        ("F-40^2", "stories260k", {}, "--model takes those"),
        ("F-40^2", "nosuch.npz", {}, "no file nosuch.npz"),
        ("F-40^2", "digits", {"loss": "cros-entropy"}, "cross-entropy"),
        ("F-40^2", "digits", {"samples": 0}, "--samples"),
        ("F-40^2", "digits", {"batch_size": -1}, "--batch-size"),
        ("F-40^2", "digits", {"checkpoint": "nosuch.pt"}, "nosuch.pt"),
        ("GPT-small", "digits", {}, "integer tokens"),
        ("mine.py", None, {}, "mine.py:ATTRIBUTE"),
        (".", None, {}, "hf:."),
    ],
)
def test_wrong_words_are_one_clear_line(here, model, data, options, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_subject(model, data, **options)
    assert message in one_line(error)


def test_text_is_not_for_image_networks(here):
    (here / "poem.txt").write_text("a rose is a rose")
    with pytest.raises(ValueError, match="takes numbers, not text") as error:
        load_subject("LeNet5", "poem.txt")
    one_line(error)
