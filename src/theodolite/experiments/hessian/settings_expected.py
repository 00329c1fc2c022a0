"""What the source's tables of settings say, number by number."""

from __future__ import annotations

from typing import Any

Line = tuple[str, str, tuple[int, ...], tuple[int, ...]]

_MNIST = {"train": 60000, "test": 10000, "channels": 1, "height": 28, "width": 28}
_CIFAR = {"train": 50000, "test": 10000, "channels": 3, "height": 32, "width": 32}
#: 002 Table 2 = 000 Table C.1.
DATA_SETS: dict[str, dict[str, Any]] = {
    "CIFAR10": {**_CIFAR, "classes": 10},
    "CIFAR10-R": {**_CIFAR, "classes": 10},
    "CIFAR100": {**_CIFAR, "classes": 100},
    "MNIST": {**_MNIST, "classes": 10},
    "MNIST-2": {**_MNIST, "classes": 2},
    "MNIST-R": {**_MNIST, "classes": 10},
}


def _without_norms(lines: list[Line]) -> list[Line]:
    return [line for line in lines if not line[1].startswith("BatchNorm")]


#: 002 Table 5 = 000 Table C.4; Tables 4 and C.3 are the same without the norms.
_LENET_BN: list[Line] = [
    ("conv1", "Conv2d", (3, 32, 32), (6, 28, 28)),
    ("", "ReLU", (6, 28, 28), (6, 28, 28)),
    ("", "BatchNorm2d", (6, 28, 28), (6, 28, 28)),
    ("maxpool1", "MaxPool2d", (6, 28, 28), (6, 14, 14)),
    ("conv2", "Conv2d", (6, 14, 14), (16, 10, 10)),
    ("", "ReLU", (16, 10, 10), (16, 10, 10)),
    ("", "BatchNorm2d", (16, 10, 10), (16, 10, 10)),
    ("maxpool2", "MaxPool2d", (16, 10, 10), (16, 5, 5)),
    ("", "Flatten", (16, 5, 5), (400,)),
    ("fc1", "Linear", (400,), (120,)),
    ("", "ReLU", (120,), (120,)),
    ("", "BatchNorm1d", (120,), (120,)),
    ("fc2", "Linear", (120,), (84,)),
    ("", "ReLU", (84,), (84,)),
    ("", "BatchNorm1d", (84,), (84,)),
    ("fc3", "Linear", (84,), (10,)),
]
#: Modules with the shapes they take and give, in order; 002 Tables 3, 4, 5 and 000 Tables C.2, C.3, C.4.
TABLES: dict[str, list[Line]] = {
    "F-200^2": [
        ("", "Flatten", (28, 28), (784,)),
        ("fc1", "Linear", (784,), (200,)),
        ("", "ReLU", (200,), (200,)),
        ("fc2", "Linear", (200,), (200,)),
        ("", "ReLU", (200,), (200,)),
        ("fc3", "Linear", (200,), (10,)),
    ],
    "LeNet5": _without_norms(_LENET_BN),
    "LeNet5-BN": _LENET_BN,
}


def _lenet(fc1: int = 120) -> int:
    return (3 * 25 + 1) * 6 + (6 * 25 + 1) * 16 + 401 * fc1 + (fc1 + 1) * 84 + 85 * 10


def _vgg(width: int) -> int:
    return (3 * 9 + 1) * width + 7 * (9 * width + 1) * width + (width + 1) * 10


def _resnet(width: int) -> int:
    """Convolutions without biases: the stem, sixteen 3×3, three 1×1 on the shortcuts, and the classifier."""
    return 27 * width + 16 * 9 * width**2 + 3 * width**2 + (width + 1) * 10


#: Weights and biases, from the sizes the source gives; classifiers of ten classes.
PARAMETERS: dict[str, int] = {
    "F-200^2": 785 * 200 + 201 * 200 + 201 * 10,
    "LeNet5": _lenet(),
    "LeNet5-BN": _lenet(),
    **{f"LeNet5-(fc1-{width})": _lenet(width) for width in (80, 100, 150)},
    **{f"VGG11-W{width}": _vgg(width) for width in (32, 48, 64, 80, 200)},
    **{f"ResNet18-W{width}": _resnet(width) for width in (48, 64, 80)},
}
#: The column "# conv" of 002 Table 7: convolutions but the first.
CONVOLUTIONS: dict[str, int] = {
    "LeNet5": 1,
    **{f"LeNet5-(fc1-{width})": 1 for width in (80, 100, 150)},
    **{f"VGG11-W{width}": 7 for width in (32, 48, 64, 80)},
    **{f"ResNet18-W{width}": 19 for width in (48, 64, 80)},
}
