"""The data sets and networks of the source: its tables of settings, as facts to be checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.data import load
from theodolite.experiments import Experiment, at_most, between, equal, rows, sizes
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.networks import NAMES, random_labels
from theodolite.experiments.lab.panels import curves, draw_panels, scatter
from theodolite.experiments.query import Value, select, values_of
from theodolite.experiments.study import grid
from theodolite.models import build, count_parameters
from theodolite.problem.activations import recorded_calls
from theodolite.results import Row

# What the tables say, number by number


Line = tuple[str, str, tuple[int, ...], tuple[int, ...]]

_MNIST = {"train": 60000, "test": 10000, "channels": 1, "height": 28, "width": 28}
_CIFAR = {"train": 50000, "test": 10000, "channels": 3, "height": 32, "width": 32}
#: Wu, Zhu et al. 2020, Table 2 (Wu 2023, Table C.1).
DATA_SETS: dict[str, dict[str, Any]] = {
    "CIFAR10": {**_CIFAR, "classes": 10},
    "CIFAR10-R": {**_CIFAR, "classes": 10},
    "CIFAR100": {**_CIFAR, "classes": 100},
    "MNIST": {**_MNIST, "classes": 10},
    "MNIST-2": {**_MNIST, "classes": 2},
    "MNIST-R": {**_MNIST, "classes": 10},
}


#: Wu, Zhu et al. 2020, Table 5 (Wu 2023, Table C.4); Tables 4 and C.3 are the same without the norms.
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
#: Modules with the shapes they take and give, in order; Tables 3 to 5 (C.2 to C.4).
TABLES: dict[str, list[Line]] = {
    "F-200^2": [
        ("", "Flatten", (28, 28), (784,)),
        ("fc1", "Linear", (784,), (200,)),
        ("", "ReLU", (200,), (200,)),
        ("fc2", "Linear", (200,), (200,)),
        ("", "ReLU", (200,), (200,)),
        ("fc3", "Linear", (200,), (10,)),
    ],
    "LeNet5": [line for line in _LENET_BN if not line[1].startswith("BatchNorm")],
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
#: The column "# conv" of Table 7: convolutions but the first.
CONVOLUTIONS: dict[str, int] = {
    "LeNet5": 1,
    **{f"LeNet5-(fc1-{width})": 1 for width in (80, 100, 150)},
    **{f"VGG11-W{width}": 7 for width in (32, 48, 64, 80)},
    **{f"ResNet18-W{width}": 19 for width in (48, 64, 80)},
}


# Data sets


VARIANTS = {"true": "", "random": "-R", "two": "-2"}


def labelled_as(kind: str, labels: Tensor, classes: int, seed: int) -> tuple[Tensor, int]:
    """The labels of a variant and how many classes it has: as they are, drawn at random, or the first half against the rest."""
    if kind == "random":
        return random_labels(labels, classes, seed), classes
    if kind == "two":
        return (labels >= classes // 2).long(), 2
    return labels, classes


def wrong_entries(data: str, *columns: str) -> Value:
    """How many entries of the source's table differ from ours, in these columns; NaN where none of its lines was read."""
    lines = rows(table=[name for name in DATA_SETS if name.startswith(data)])
    wrong = lines.column(lambda row: float(sum(row[column] != DATA_SETS[row["table"]][column] for column in columns)))
    return lines.if_any(wrong.sum())


def from_chance(row: Row) -> float:
    """Distance of the random labels' agreement with the true ones from 1/c, in standard errors."""
    share = 1 / float(row["classes"])
    return float(abs(row["agreement"] - share)) / math.sqrt(share * (1 - share) / float(row["train"]))


class Table2(Experiment):
    """Data sets: how many images, of what size, with which labels.

    Every data set is loaded and described; variants with random labels (-R) and with two classes (-2: the first five
    classes against the last five) are made from it. What stands on this disk may be a part of CIFAR: the number of
    images is then not expected to agree, all else is.
    """

    item, where = ("wu-zhu-2020 Table 2", "wu-2023 Table C.1"), "Wu, Zhu et al. 2020, appendix D.1; Wu 2023, appendix C.5"
    sizes = sizes({"data": (("digits",), ("digits", "mnist", "cifar10", "cifar100"), ("mnist", "cifar10", "cifar100"))})
    claims = {
        "MNIST, MNIST-2 and MNIST-R: entries of the table that differ": equal(
            0,
            wrong_entries("MNIST", "train", "test", "channels", "height", "width", "classes"),
            says="60000 train, 10000 test, 28×28",
            since="laptop",
        ),
        "CIFAR: sizes of images and numbers of classes that differ from the table": equal(
            0,
            wrong_entries("CIFAR", "channels", "height", "width", "classes"),
            says="3×32×32, 10 and 100 classes",
            since="laptop",
        ),
        "CIFAR: numbers of images that differ from the table": equal(
            0, wrong_entries("CIFAR", "train", "test"), says="50000 train, 10000 test", since="paper"
        ),
        "inputs are scaled to mean zero, channel by channel (largest mean left)": at_most(
            1e-4, abs(rows["mean"]).max(), **paper("zero mean", "appendix D.1 and F.4")
        ),
        "random labels know nothing of the true ones (distance of their agreement from 1/c, in standard errors)": at_most(
            4.0, rows(labels="random").column(from_chance).max(), says="random labels"
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for data in p.data:
            for labels in ("true", "random") if data == "cifar10" else ("true",) if data == "cifar100" else VARIANTS:
                yield {"data": data, "labels": labels, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Row:
        data = load(job["data"])
        mean, std = data.statistics()
        scaled = data.scaled(mean.tolist(), std.tolist()).x_train
        y, classes = labelled_as(job["labels"], data.y_train, len(data.classes), job["seed"])
        channels, height, width = data.x_train.shape[1:]
        return {
            "table": NAMES[job["data"]] + VARIANTS[job["labels"]],
            "labels": job["labels"],
            "train": len(data.y_train),
            "test": len(data.y_test),
            "channels": channels,
            "height": height,
            "width": width,
            "classes": classes,
            "classes_seen": len(y.unique()),
            "agreement": float((y == data.y_train).double().mean()),
            "mean": float(scaled.double().mean((0, 2, 3)).abs().max()),
        }

    def draw(self, rows: list[Row]) -> Any:
        names = values_of(rows, "table")
        printed = [{"table": name, **DATA_SETS[name]} for name in names if name in DATA_SETS]
        placed = [
            {
                **row,
                "source": source,
                "pixels": math.prod(row[side] for side in ("channels", "height", "width")),
                "place": names.index(row["table"]) + shift,
            }
            for found, source, shift in ((rows, "here", -0.14), (printed, "Table 2", 0.14))
            for row in found
        ]
        columns = {"train": "training images", "pixels": "numbers in an image", "classes": "classes"}
        panels = [
            scatter(placed, "place", column, ylabel=ylabel)
            .then(lambda ax: ax.set_xticks(range(len(names)), names, rotation=40, ha="right"))
            .set(xlim=(-0.5, len(names) - 0.5))
            for column, ylabel in columns.items()
        ]
        return draw_panels(*panels, size=(3.4, 3.0), by="source", log="y", xlabel="data set")


# Networks


networks = rows(kind="network")


def modules_of(network: str, seed: int) -> tuple[nn.Module, list[Row]]:
    """The network, and a row for each of its modules in the order they are called: what goes in and what comes out."""
    model = build(network, seed=seed).eval()
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    with recorded_calls(leaves) as calls, torch.no_grad():
        model(torch.zeros(1, *((28, 28) if network == "F-200^2" else (3, 32, 32))))  # as the tables feed them
    lines = [(call.name, type(call.module).__name__, call.input.shape[1:], call.output.shape[1:]) for call in calls]
    return model, [_module(place, *line) for place, line in enumerate(lines, start=1)]


def _module(place: int, name: str, module: str, before: Sequence[int], after: Sequence[int]) -> Row:
    """A line of a table as a row, each shape in three columns; 0 stands for a dimension that is not there."""
    shapes = {f"in_{i}": size for i, size in enumerate([*before, 0, 0][:3])}
    shapes |= {f"out_{i}": size for i, size in enumerate([*after, 0, 0][:3])}
    return {"name": name, "module": module, "place": place, **shapes}


def wrong_lines(network: str) -> Value:
    """How many lines of the source's table of this network differ from what it does; names bind only layers with weights."""
    table = [_module(place, *line) for place, line in enumerate(TABLES[network], start=1)]

    def agrees(row: Row, line: Row) -> bool:
        named = line["name"].startswith(("conv", "fc"))
        return all(row[key] == value for key, value in line.items() if named or key != "name")

    def wrong(rows: list[Row]) -> int:
        return abs(len(rows) - len(table)) + sum(not agrees(*pair) for pair in zip(rows, table, strict=False))

    return rows(kind="module", network=network).measure(wrong)


def wrong_networks(column: str, expected: Mapping[str, int]) -> Value:
    """How many networks have another number in this column than expected."""
    return networks(network=list(expected)).column(lambda row: row[column] != expected[row["network"]]).sum()


class Table3(Experiment):
    """Network structures: F-200², LeNet5 and LeNet5-BN line by line, and the parameters of all networks.

    Each network is built and run once on an empty image; hooks write down what every module takes and gives. Lines are
    compared with those of the source, parameter numbers with the sums that its layer sizes imply, the numbers of
    convolutions with the column "# conv" of its Table 7.
    """

    item = (
        *("wu-zhu-2020 Table 3", "wu-zhu-2020 Table 4", "wu-zhu-2020 Table 5"),
        *("wu-2023 Table C.2", "wu-2023 Table C.3", "wu-2023 Table C.4"),
    )
    where = "Wu, Zhu et al. 2020, appendix D.2; Wu 2023, appendix C.5"
    sizes = sizes(
        networks=tuple(PARAMETERS),
        tiny={"networks": ("F-200^2", "LeNet5", "LeNet5-BN", "LeNet5-(fc1-80)", "VGG11-W32", "ResNet18-W48")},
    )
    claims = {
        **{
            f"{network}: lines of {table} that differ": equal(
                0, wrong_lines(network), **paper(f"{len(TABLES[network])} lines", table)
            )
            for network, table in (("F-200^2", "Table 3"), ("LeNet5", "Table 4"), ("LeNet5-BN", "Table 5"))
        },
        "parameters: networks whose number is not the sum over the layers": equal(
            0, wrong_networks("parameters", PARAMETERS), **paper("F-200² 199210, LeNet5 62006", "Tables 3 and 4", "theory")
        ),
        "convolutions but the first: networks whose number differs from Table 7": equal(
            0, wrong_networks("convolutions", CONVOLUTIONS), **paper("LeNet5 1, VGG11 7, ResNet18 19", "Table 7")
        ),
        "batch norm has neither scale nor shift (parameters in it)": equal(
            0, networks.max("norm_parameters"), **paper("learnable parameters turned off", "appendix D.2")
        ),
        "weights begin within Xavier's bound √(6/(in + out)) (largest weight over bound)": between(
            0.9, 1.0, networks.max("weight_over_bound"), **paper("Xavier", "appendix D.3")
        ),
        "biases begin at zero (largest)": equal(0, networks.max("bias"), **paper("zero", "appendix D.3")),
    }
    departs = (
        "The source calls its initialisation both PyTorch's default and Xavier with zero bias, which differ; the second "
        "statement is followed."
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return grid(p, network=p.networks, seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        model, modules = modules_of(job["network"], job["seed"])
        for row in modules:
            yield {"kind": "module", "network": job["network"], **row}
        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        yield {
            "kind": "network",
            "network": job["network"],
            "parameters": count_parameters(model),
            "convolutions": sum(isinstance(m, nn.Conv2d) for m in layers) - 1,
            "norms": len(norms),
            "norm_parameters": sum(p.numel() for m in norms for p in m.parameters()),
            "weight_over_bound": max(float(m.weight.detach().abs().max()) / _xavier(m) for m in layers),
            "bias": max(float(m.bias.detach().abs().max()) for m in layers if m.bias is not None),
        }

    def draw(self, rows: list[Row]) -> Any:
        modules = [
            {**row, "size": math.prod(row[f"out_{i}"] or 1 for i in range(3))}
            for row in select(rows, kind="module", network=list(TABLES))
        ]
        sums = [
            {**row, "sum": PARAMETERS[row["network"]], "family": row["network"].split("-")[0]}
            for row in select(rows, kind="network")
        ]
        lines = [(i, math.prod(after)) for table in TABLES.values() for i, (_, _, _, after) in enumerate(table, start=1)]
        outputs = curves(modules, "place", "size", by="network", log="y", labels="legend", xlabel="module", ylabel="outputs")
        outputs.then(lambda ax: ax.plot(*zip(*lines, strict=True), "o", mfc="none", ms=9, color="#555555", label="source"))
        parameters = scatter(sums, "sum", "parameters", by="family", log="xy", identity=True, xlabel="sum over the layers")
        return draw_panels(outputs.legend(fontsize=8), parameters, size=(4.6, 3.4))


def _xavier(layer: nn.Conv2d | nn.Linear) -> float:
    outputs, inputs = layer.weight.shape[:2]
    return math.sqrt(6 / ((outputs + inputs) * math.prod(layer.weight.shape[2:])))
