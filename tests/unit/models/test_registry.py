"""Networks by name, with the nearest names where there is none."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from theodolite import models
from theodolite.models import registry
from theodolite.models.initialisation import LAYER_INITS, TOKEN_INITS

NEEDED = {"NTK-FCN": {"inputs": 8}, "NTK-CNN": {"image": (3, 4, 4)}}


@pytest.mark.parametrize("name", models.names())
def test_every_listed_name_builds(name):
    needed = next((arguments for prefix, arguments in NEEDED.items() if name.startswith(prefix)), {})
    with torch.device("meta"):  # no memory, whatever the size
        model = models.build(name, **needed)
    assert models.count_parameters(model) > 1000
    assert model.initialisation in {*LAYER_INITS, *TOKEN_INITS}


@pytest.mark.parametrize(
    ("name", "near"),
    [("LeNet-5", "LeNet5"), ("F200^2", "F-200^2"), ("resnet20", "ResNet20"), ("WRN-10", "WRN-10-1"), ("VGG11-48", "VGG11-W48")],
)
def test_unknown_names_get_the_nearest(name, near):
    with pytest.raises(ValueError, match=r"no model is called .*names\(\) lists them all") as error:
        models.build(name)
    assert near in str(error.value)


def test_other_numbers_than_the_listed_ones():
    assert models.build("VGG11-W5").conv8.weight.shape == (5, 5, 3, 3)
    assert models.build("F-300-100").fc2.weight.shape == (100, 300)
    assert models.build("LeNet5-BN-(conv2-9)").conv2.weight.shape == (9, 6, 5, 5)
    assert len(models.build("ViT-2", dim=12).layers) == 2
    assert len(models.build("ResNet8").layer1) == 1


def test_a_name_may_not_be_contradicted():
    with pytest.raises(ValueError, match="width: the name 'VGG11-W48' already says 48"):
        models.build("VGG11-W48", width=64)


def test_names_by_pattern():
    assert models.names("NTK-*")[0] == "NTK-FCN-2"
    assert models.names("nosuch*") == []
    assert len(set(models.names())) == len(models.names())


def test_each_name_belongs_to_one_family():
    for name in models.names():
        assert sum(re.fullmatch(f.pattern, name) is not None for f in registry._FAMILIES) in (1, 2)
    # ResNet18 has a family of its own, before the pattern of the 6n + 2 networks.
    assert type(models.build("ResNet18-W4")).__name__ == "ResNet18"


def test_listing_names_does_not_load_torch():
    code = "from theodolite import models; import sys; models.names(); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_of_contents_is_complete():
    for name in models.__all__:
        assert callable(getattr(models, name))
        assert getattr(models, name).__doc__
    assert set(models.__all__) <= set(dir(models))
    with pytest.raises(AttributeError, match="nosuch"):
        models.nosuch  # noqa: B018


def test_what_a_name_leaves_open_must_be_said():
    with pytest.raises(ValueError, match="NTK-FCN-2 needs inputs"):
        models.build("NTK-FCN-2")
    assert models.build("NTK-FCN-2", inputs=3, width=4) is not None
    with pytest.raises(ValueError, match="name must look like"):
        models.build("F-10^0")
