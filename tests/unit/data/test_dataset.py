"""`Dataset`, `Text` and `Documents`: small, checked, never changed in place."""

from __future__ import annotations

import pytest
import torch

from theodolite.data import Dataset, Documents, Text
from theodolite.data.text import encode, words


@pytest.fixture
def tiny():
    x = torch.arange(6 * 3 * 2 * 2, dtype=torch.uint8).reshape(6, 3, 2, 2)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    return Dataset(x, y, x[:3] + 100, y[:3], ("cat", "dog", "eel"), "tiny")


def test_repr_says_what_is_inside(tiny):
    assert repr(tiny) == "Dataset(tiny: 6 train, 3 test, 3x2x2 uint8, 3 classes)"


def test_scaled_is_between_zero_and_one(tiny):
    scaled = tiny.scaled(dtype=torch.float64)
    assert scaled.x_train.dtype == torch.float64
    assert torch.equal(scaled.x_train, tiny.x_train.double() / 255)
    assert tiny.x_train.dtype == torch.uint8
    assert torch.equal(scaled.scaled(dtype=torch.float64).x_test, scaled.x_test)  # a second time changes nothing


def test_scaled_normalises_each_channel(tiny):
    mean, std = tiny.statistics()
    normal = tiny.scaled(mean.tolist(), std.tolist(), dtype=torch.float64).x_train
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(3).double(), atol=1e-7, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3), correction=0), torch.ones(3).double())
    one = tiny.scaled(0.5, 0.25).x_train
    torch.testing.assert_close(one, (tiny.x_train / 255 - 0.5) / 0.25)
    with pytest.raises(ValueError, match="1 or 3 numbers"):
        tiny.scaled((0.1, 0.2))


def test_peak_is_what_one_means(tiny):
    from dataclasses import replace

    assert torch.equal(replace(tiny, peak=16.0).scaled().x_train, tiny.x_train / 16)


def test_subset_is_the_beginning_or_a_seeded_choice(tiny):
    first = tiny.subset(4, 1)
    assert torch.equal(first.x_train, tiny.x_train[:4])
    assert torch.equal(first.y_test, tiny.y_test[:1])
    state = torch.get_rng_state()
    a, b, c = (tiny.subset(5, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a.x_train, b.x_train)
    assert not torch.equal(a.x_train, c.x_train)
    assert len({tuple(x.flatten().tolist()) for x in a.x_train}) == 5
    with pytest.raises(ValueError, match=r"n_train must lie in 0\.\.6"):
        tiny.subset(7, 1)


def test_classes_only_relabels_in_the_given_order(tiny):
    for wanted in ((2, 0), ("eel", "cat")):
        two = tiny.classes_only(wanted)
        assert two.classes == ("eel", "cat")
        assert two.y_train.tolist() == [1, 0, 1, 0]
        assert torch.equal(two.x_train, tiny.x_train[[0, 2, 3, 5]])
    for wrong, message in (((3,), "classes must be one of 0"), (("dgo",), "dog"), ((1, 1), "distinct"), ((), "at least one")):
        with pytest.raises(ValueError, match=message):
            tiny.classes_only(wrong)


def test_flat_keeps_the_order_of_pixels(tiny):
    assert torch.equal(tiny.flat().x_test, tiny.x_test.reshape(3, 12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": torch.tensor([0, 1])}, "equally long"),
        ({"y_train": torch.tensor([0, 1, 2, 0, 1, 3])}, r"0\.\.2.*0\.\.3"),
        ({"y_test": torch.zeros(3)}, "int64"),
        ({"x_test": torch.zeros(3, 1, 2, 2)}, "one shape"),
    ],
)
def test_what_does_not_fit_is_refused(tiny, change, message):
    from dataclasses import replace

    with pytest.raises(ValueError, match=message):
        replace(tiny, **change)


def test_text_as_characters_and_words():
    text = Text("to be or\nnot to be\n", "to do\n", "be\n", "play")
    assert repr(text) == "Text(play: 19, 6, 3 characters)"
    assert "".join(text.alphabet()) == "\n bdenort"
    assert "".join(text.alphabet()[i] for i in text.characters("valid")) == "to do\n"
    assert text.vocabulary(4) == ("<unk>", "<eos>", "be", "to")
    known = text.vocabulary()
    assert [known[i] for i in text.words("valid")] == ["to", "<unk>", "<eos>"]
    assert len(text.words()) == len(words(text.train)) == 8
    with pytest.raises(ValueError, match="'train', 'valid' or 'test'"):
        text.part("dev")


def test_encode_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="'z'"):
        encode("abz", "abc")


def test_bag_of_words_counts():
    news = Documents(("The cat, the dog.", "A dog"), torch.tensor([0, 1]), ("Dog dog eel",), torch.tensor([1]), ("x", "y"))
    bag = news.bag_of_words(3)
    assert bag.x_train.tolist() == [[1, 2, 0], [1, 0, 1]]  # dog, the, a
    assert bag.x_test.tolist() == [[2, 0, 0]]
    assert bag.classes == ("x", "y")
