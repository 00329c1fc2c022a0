"""Two-class samples of the lab: balanced, scaled, disjoint, and honest about where they come from."""

from __future__ import annotations

import pytest
import torch

from theodolite.data import MissingDataError
from theodolite.experiments.lab.datasets import CLASSES, features, two_classes


@pytest.mark.parametrize("name", CLASSES)
def test_a_stand_in_is_balanced_scaled_and_disjoint(name):
    found = two_classes(name, 20, 100, side=8, source="stand-in", seed=1)
    assert found.origin in ("generated images", "digits of scikit-learn")
    assert (len(found.x), len(found.x_test)) == (20, 100)
    assert found.y.shape == (20, 1)
    assert float(found.y.sum()) == 0.0
    assert set(found.y.flatten().tolist()) | set(found.y_test.flatten().tolist()) == {-1.0, 1.0}
    assert float(found.x.square().mean()) == pytest.approx(1.0, rel=1e-5)
    assert float(torch.cdist(found.x.flatten(1), found.x_test.flatten(1)).min()) > 1e-3
    again = two_classes(name, 20, 100, side=8, source="stand-in", seed=1)
    other = two_classes(name, 20, 100, side=8, source="stand-in", seed=2)
    assert torch.equal(found.x, again.x)
    assert not torch.equal(found.x, other.x)


def test_no_more_test_points_than_there_are():
    found = two_classes("mnist", 64, 5000, side=8, source="stand-in")
    assert len(found.x) + len(found.x_test) == 355  # zeros and twos of scikit-learn


def test_missing_files_are_an_error_or_a_stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingDataError, match="ag_news"):
        two_classes("ag_news", 10, 10, side=8, source="files")
    assert two_classes("ag_news", 10, 10, side=8, source="either").origin == "generated images"


def test_unknown_sets_and_too_many_points_are_refused():
    with pytest.raises(ValueError, match="mnist, cifar10"):
        two_classes("imagenet", 10, 10, side=8, source="stand-in")
    with pytest.raises(ValueError, match="too few to train on 400"):
        two_classes("mnist", 400, 10, side=8, source="stand-in")


def test_features_of_images_recordings_and_counts():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert torch.equal(features(image, 2)[0, 0], torch.tensor([[2.5, 4.5], [10.5, 12.5]]))
    assert torch.equal(features(image, 8), image)
    tone = torch.sin(2 * torch.pi * 100 * torch.arange(800) / 800)[None, None]  # 100 of 400 frequencies
    assert int(features(tone, 4)[0].argmax()) == 3  # of 16 parts, the one that holds a quarter of the band
    counts = torch.ones(2, 5)
    assert torch.equal(features(counts, 8), counts)
