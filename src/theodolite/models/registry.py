"""Networks by the names the sources give them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from theodolite.text import nearest

if TYPE_CHECKING:
    from torch import nn

Arguments = Callable[["re.Match[str]"], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """Names of one shape: the pattern they fit, some of them, the builder, and the arguments a name stands for."""

    pattern: str
    examples: tuple[str, ...]
    module: str
    builder: str
    arguments: Arguments = lambda match: {}


def _numbers(match: re.Match[str]) -> dict[str, Any]:
    """The named groups of the pattern that took part, as whole numbers."""
    return {key: int(value) for key, value in match.groupdict().items() if value is not None}


def _norm(match: re.Match[str]) -> dict[str, Any]:
    return {"batchnorm": True} if match["bn"] else {}


def _lenet(match: re.Match[str]) -> dict[str, Any]:
    return _norm(match) | ({match["layer"]: int(match["width"])} if match["layer"] else {})


def _widths(match: re.Match[str]) -> dict[str, Any]:
    return {"widths": tuple(int(width) for width in match["widths"].split("-"))}


def _fixed(**arguments: Any) -> Arguments:
    return lambda match: arguments


_BERT = {"vocabulary": 30522, "context": 512}
_PACKAGE = "theodolite.models"
_FAMILIES = [
    Family(
        r"F(-\d+(\^\d+)?)+(-BN)?",
        ("F-200^2", "F-200^2-100", "F-200^2-BN", "F-200^4", "F-600", "F-600^2", "F-600^4", "F-600^8", "F-1500^3", "F-40^2"),
        "feedforward", "f_network", lambda match: {"name": match[0]},
    ),
    Family(
        r"LeNet5(?P<bn>-BN)?(-\((?P<layer>conv1|conv2|fc1|fc2)-(?P<width>\d+)\))?",
        ("LeNet5", "LeNet5-BN", "LeNet5-(fc1-80)", "LeNet5-(fc1-100)", "LeNet5-(fc1-150)"),
        "feedforward", "lenet5", _lenet,
    ),
    Family(r"LeNet-mini(?P<bn>-BN)?", ("LeNet-mini", "LeNet-mini-BN"), "feedforward", "lenet_mini", _norm),
    Family(
        r"VGG11(-W(?P<width>\d+))?",
        ("VGG11", "VGG11-W32", "VGG11-W48", "VGG11-W64", "VGG11-W80", "VGG11-W200"),
        "feedforward", "vgg11", _numbers,
    ),
    Family(
        r"ResNet18(-W(?P<width>\d+))?",
        ("ResNet18", "ResNet18-W48", "ResNet18-W64", "ResNet18-W80"),
        "resnet", "resnet18", _numbers,
    ),
    Family(r"ResNet(?P<depth>\d+)", ("ResNet20", "ResNet32", "ResNet56"), "resnet", "cifar_resnet", _numbers),
    Family(
        r"WRN-(?P<depth>\d+)-(?P<k>\d+)",
        ("WRN-10-1", "WRN-10-2", "WRN-10-10", "WRN-16-2"),
        "resnet", "wrn", _numbers,
    ),
    Family(r"Myrtle-5", ("Myrtle-5",), "feedforward", "myrtle5"),
    Family(r"CNN-(?P<widths>\d+(-\d+)*)", ("CNN-16-32", "CNN-16-32-64"), "feedforward", "cnn", _widths),
    Family(r"ViT-(?P<depth>\d+)", ("ViT-4",), "transformers", "vision_transformer", _numbers),
    Family(r"GPT-small", ("GPT-small",), "transformers", "gpt"),
    Family(r"GPT-2", ("GPT-2",), "transformers", "gpt", _fixed(vocabulary=50257, context=1024, dim=768, depth=12, heads=12)),
    Family(r"BERT-small", ("BERT-small",), "transformers", "bert"),
    Family(r"BERT-base", ("BERT-base",), "transformers", "bert", _fixed(**_BERT, dim=768, depth=12, heads=12)),
    Family(r"BERT-large", ("BERT-large",), "transformers", "bert", _fixed(**_BERT, dim=1024, depth=24, heads=16)),
    Family(r"stories260k", ("stories260k",), "transformers", "llama_decoder"),
    Family(r"NTK-FCN-(?P<depth>\d+)", ("NTK-FCN-2", "NTK-FCN-3", "NTK-FCN-4", "NTK-FCN-5"), "ntk", "ntk_fcn", _numbers),
    Family(r"NTK-CNN-(?P<depth>\d+)", ("NTK-CNN-2", "NTK-CNN-5"), "ntk", "ntk_cnn", _numbers),
]  # fmt: skip


def names(pattern: str = "*") -> list[str]:
    """Names `build` knows, those that fit a glob. Numbers may be others: "F-300-100", "VGG11-W24", "WRN-28-10".

    >>> names("WRN*")
    ['WRN-10-1', 'WRN-10-2', 'WRN-10-10', 'WRN-16-2']
    """
    return [name for family in _FAMILIES for name in family.examples if fnmatchcase(name, pattern)]


def build(name: str, /, **arguments: Any) -> nn.Module:
    """The network called `name`; `seed`, `init`, sizes and the like are passed on to its builder.

    >>> model = build("LeNet5-(fc1-80)", seed=0)
    >>> model.fc1, model.initialisation
    (Linear(in_features=400, out_features=80, bias=True), 'xavier')
    """
    found = _find(name)
    if found is None:
        near = ", ".join(nearest(str(name), names(), count=3))
        raise ValueError(f"No model is called {name!r}. Nearest names: {near}. theodolite.models.names() lists them all.")
    family, match = found
    said, builder = family.arguments(match), _builder(family)
    twice = [key for key in said if key in arguments]
    if twice:
        raise ValueError(f"{twice[0]}: the name {match[0]!r} already says {said[twice[0]]!r}.")
    parts = inspect.signature(builder).parameters
    missing = [key for key, part in parts.items() if part.default is part.empty and key not in {*said, *arguments}]
    if missing:
        raise ValueError(f"{match[0]} needs {missing[0]}: build({match[0]!r}, {missing[0]}=...).")
    return builder(**said, **arguments)


def arguments_of(name: str) -> tuple[dict[str, inspect.Parameter], dict[str, Any]] | None:
    """The arguments of a network's builder, and those that its name already gives; None where the name is unknown.

    >>> parameters, given = arguments_of("WRN-10-2")
    >>> "classes" in parameters, given
    (True, {'depth': 10, 'k': 2})
    """
    found = _find(name)
    if found is None:
        return None
    family, match = found
    return dict(inspect.signature(_builder(family)).parameters), family.arguments(match)


def _find(name: Any) -> tuple[Family, re.Match[str]] | None:
    for family in _FAMILIES:
        match = re.fullmatch(family.pattern, name) if isinstance(name, str) else None
        if match:
            return family, match
    return None


def _builder(family: Family) -> Callable[..., nn.Module]:
    builder: Callable[..., nn.Module] = getattr(importlib.import_module(f"{_PACKAGE}.{family.module}"), family.builder)
    return builder
