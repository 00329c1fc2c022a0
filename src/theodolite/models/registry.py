"""Networks by the names the sources give them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from theodolite import models
from theodolite.arguments import shown
from theodolite.text import nearest

if TYPE_CHECKING:
    from torch import nn

# How the named groups of a pattern are read; whole numbers where nothing stands here.
_READ: dict[str, Callable[[str], Any]] = {
    "name": str,
    "batchnorm": bool,
    "widths": lambda text: tuple(int(width) for width in text.split("-")),
}


@dataclass(frozen=True)
class Family:
    """Names of one shape: the builder, the pattern they fit with the arguments as named groups, some of them, fixed arguments."""

    builder: str
    pattern: str
    examples: tuple[str, ...]
    fixed: dict[str, Any] = field(default_factory=dict)

    def arguments(self, match: re.Match[str]) -> dict[str, Any]:
        """Those that a name stands for."""
        said = {key: value for key, value in match.groupdict().items() if value is not None}
        return {key: _READ.get(key, int)(value) for key, value in said.items()} | self.fixed


_BERT = {"vocabulary": 30522, "context": 512}
_FAMILIES = [
    Family(
        "f_network",
        r"(?P<name>F(-\d+(\^\d+)?)+(-BN)?)",
        ("F-200^2", "F-200^2-100", "F-200^2-BN", "F-200^4", "F-600", "F-600^2", "F-600^4", "F-600^8", "F-1500^3", "F-40^2"),
    ),
    Family(
        "lenet5",
        r"LeNet5(?P<batchnorm>-BN)?(-\((conv1-(?P<conv1>\d+)|conv2-(?P<conv2>\d+)|fc1-(?P<fc1>\d+)|fc2-(?P<fc2>\d+))\))?",
        ("LeNet5", "LeNet5-BN", "LeNet5-(fc1-80)", "LeNet5-(fc1-100)", "LeNet5-(fc1-150)"),
    ),
    Family("lenet_mini", r"LeNet-mini(?P<batchnorm>-BN)?", ("LeNet-mini", "LeNet-mini-BN")),
    Family(
        "vgg11",
        r"VGG11(-W(?P<width>\d+))?",
        ("VGG11", "VGG11-W32", "VGG11-W48", "VGG11-W64", "VGG11-W80", "VGG11-W200"),
    ),
    Family("resnet18", r"ResNet18(-W(?P<width>\d+))?", ("ResNet18", "ResNet18-W48", "ResNet18-W64", "ResNet18-W80")),
    Family("cifar_resnet", r"ResNet(?P<depth>\d+)", ("ResNet20", "ResNet32", "ResNet56")),
    Family("wrn", r"WRN-(?P<depth>\d+)-(?P<k>\d+)", ("WRN-10-1", "WRN-10-2", "WRN-10-10", "WRN-16-2")),
    Family("myrtle5", r"Myrtle-5", ("Myrtle-5",)),
    Family("cnn", r"CNN-(?P<widths>\d+(-\d+)*)", ("CNN-16-32", "CNN-16-32-64")),
    Family("vision_transformer", r"ViT-(?P<depth>\d+)", ("ViT-4",)),
    Family("gpt", r"GPT-small", ("GPT-small",)),
    Family("gpt", r"GPT-2", ("GPT-2",), {"vocabulary": 50257, "context": 1024, "dim": 768, "depth": 12, "heads": 12}),
    Family("bert", r"BERT-small", ("BERT-small",)),
    Family("bert", r"BERT-base", ("BERT-base",), {**_BERT, "dim": 768, "depth": 12, "heads": 12}),
    Family("bert", r"BERT-large", ("BERT-large",), {**_BERT, "dim": 1024, "depth": 24, "heads": 16}),
    Family("llama_decoder", r"stories260k", ("stories260k",)),
    Family("ntk_fcn", r"NTK-FCN-(?P<depth>\d+)", ("NTK-FCN-2", "NTK-FCN-3", "NTK-FCN-4", "NTK-FCN-5")),
    Family("ntk_cnn", r"NTK-CNN-(?P<depth>\d+)", ("NTK-CNN-2", "NTK-CNN-5")),
]


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
        raise ValueError(
            f"name: no model is called {shown(name)}. Nearest names: {near}. theodolite.models.names() lists them all."
        )
    family, match = found
    said, builder = family.arguments(match), getattr(models, family.builder)
    twice = [key for key in said if key in arguments]
    if twice:
        raise ValueError(f"{twice[0]}: the name {match[0]!r} already says {said[twice[0]]!r}.")
    parts = inspect.signature(builder).parameters
    missing = [key for key, part in parts.items() if part.default is part.empty and key not in {*said, *arguments}]
    if missing:
        raise ValueError(f"{match[0]} needs {missing[0]}: build({match[0]!r}, {missing[0]}=...).")
    model: nn.Module = builder(**said, **arguments)
    return model


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
    return dict(inspect.signature(getattr(models, family.builder)).parameters), family.arguments(match)


def _find(name: Any) -> tuple[Family, re.Match[str]] | None:
    for family in _FAMILIES:
        match = re.fullmatch(family.pattern, name) if isinstance(name, str) else None
        if match:
            return family, match
    return None
