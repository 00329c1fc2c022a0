"""The data sets and networks of the source: its tables of settings, as facts to be checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.data import load
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.settings_expected import CONVOLUTIONS, DATA_SETS, PARAMETERS, TABLES
from theodolite.models import build, count_parameters
from theodolite.problem.activations import recorded_calls
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = "002, appendix D.1 and D.2; 000, appendix C.5"


@dataclass(frozen=True)
class DataParams:
    data: tuple[str, ...]


def labelled_as(kind: str, labels: Tensor, classes: int, seed: int) -> tuple[Tensor, int]:
    """The labels of a variant and how many classes it has: as they are, drawn at random, or the first half against the rest."""
    if kind == "random":
        return torch.randint(0, classes, labels.shape, generator=torch.Generator().manual_seed(1000 + seed)), classes
    if kind == "two":
        return (labels >= classes // 2).long(), 2
    return labels, classes


def wrong_entries(columns: tuple[str, ...], wanted: Callable[[str], bool]) -> Callable[[list[Row]], float]:
    """How many entries of the source's table differ from ours, in these columns; NaN where none of its lines was read."""

    def measure(rows: list[Row]) -> float:
        lines = [row for row in rows if row["table"] in DATA_SETS and wanted(row["table"])]
        wrong = sum(row[column] != DATA_SETS[row["table"]][column] for row in lines for column in columns)
        return float(wrong) if lines else math.nan

    return measure


def chance(rows: list[Row]) -> float:
    """Largest distance of the random labels' agreement with the true ones from 1/c, in standard errors."""
    found = [row for row in rows if row["labels"] == "random"]
    return max(float(abs(row["agreement"] - 1 / row["classes"])) / _spread(row) for row in found)


def _spread(row: Row) -> float:
    share = 1 / float(row["classes"])
    return math.sqrt(share * (1 - share) / float(row["train"]))


class Table2(Experiment):
    """Data sets: how many images, of what size, with which labels.

    Every data set is loaded and described; variants with random labels (-R) and with two classes (-2: the first five
    classes against the last five) are made from it. What stands on this disk may be a part of CIFAR: the number of
    images is then not expected to agree, all else is.
    """

    id = "hessian/table-2"
    source = SOURCE
    item = ("wu-zhu-2020 Table 2", "wu-2023 Table C.1")
    sizes = {
        "tiny": DataParams(data=("digits",)),
        "laptop": DataParams(data=("digits", "mnist", "cifar10", "cifar100")),
        "paper": DataParams(data=("mnist", "cifar10", "cifar100")),
    }
    claims = (
        Claim(
            "MNIST, MNIST-2 and MNIST-R: entries of the table that differ",
            wrong_entries(("train", "test", "channels", "height", "width", "classes"), lambda name: name.startswith("MNIST")),
            rule="equal",
            expected=0,
            reported=Reported("60000 train, 10000 test, 28×28", "Table 2"),
            since="laptop",
        ),
        Claim(
            "CIFAR: sizes of images and numbers of classes that differ from the table",
            wrong_entries(("channels", "height", "width", "classes"), lambda name: name.startswith("CIFAR")),
            rule="equal",
            expected=0,
            reported=Reported("3×32×32, 10 and 100 classes", "Table 2"),
            since="laptop",
        ),
        Claim(
            "CIFAR: numbers of images that differ from the table",
            wrong_entries(("train", "test"), lambda name: name.startswith("CIFAR")),
            rule="equal",
            expected=0,
            reported=Reported("50000 train, 10000 test", "Table 2"),
            since="paper",
        ),
        Claim(
            "inputs are scaled to mean zero, channel by channel (largest mean left)",
            lambda rows: max(abs(row["mean"]) for row in rows),
            rule="at most",
            expected=1e-4,
            reported=Reported("zero mean", "appendix D.1 and F.4"),
        ),
        Claim(
            "random labels know nothing of the true ones (distance of their agreement from 1/c, in standard errors)",
            chance,
            rule="at most",
            expected=4.0,
            reported=Reported("random labels", "Table 2"),
        ),
    )

    def jobs(self, p: DataParams) -> Iterator[dict[str, Any]]:
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
            "table": TITLES.get(job["data"], job["data"]) + VARIANTS[job["labels"]],
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

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(3, size=(3.4, 3.0))
        found = [{**row, "source": "here", "pixels": _pixels(row)} for row in rows]
        known = [row["table"] for row in rows if row["table"] in DATA_SETS]
        table = [{"table": name, "source": "Table 2", "pixels": _pixels(DATA_SETS[name]), **DATA_SETS[name]} for name in known]
        for ax, column in zip(axes, ("train", "pixels", "classes"), strict=True):
            _by_name([*found, *table], column, ax)
        axes[0].set_ylabel("training images")
        axes[1].set_ylabel("numbers in an image")
        return figure


VARIANTS = {"true": "", "random": "-R", "two": "-2"}
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


def _pixels(row: Mapping[str, Any]) -> int:
    return int(row["channels"] * row["height"] * row["width"])


def _by_name(rows: list[Row], column: str, ax: Any) -> None:
    """A column by data set: ours beside the table's."""
    from theodolite import plots

    names = list(dict.fromkeys(row["table"] for row in rows))
    placed = [{**row, "place": names.index(row["table"]) + (-0.14 if row["source"] == "here" else 0.14)} for row in rows]
    plots.scatter(placed, "place", column, by="source", log="y", xlabel="data set", ylabel=column, ax=ax)
    ax.set_xticks(range(len(names)), names, rotation=40, ha="right")
    ax.set_xlim(-0.5, len(names) - 0.5)


@dataclass(frozen=True)
class NetworkParams:
    networks: tuple[str, ...]


#: What each network of the tables is fed.
INPUTS = {"F-200^2": (28, 28)}
IMAGE = (3, 32, 32)


def modules_of(network: str, seed: int) -> tuple[nn.Module, list[Row]]:
    """The network, and a row for each of its modules in the order they are called: what goes in and what comes out."""
    model = build(network, seed=seed).eval()
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    with recorded_calls(leaves) as calls, torch.no_grad():
        model(torch.zeros(1, *INPUTS.get(network, IMAGE)))
    return model, [
        {
            "name": call.name,
            "module": type(call.module).__name__,
            "place": place,
            **_sizes("in", call.input.shape[1:]),
            **_sizes("out", call.output.shape[1:]),
        }
        for place, call in enumerate(calls, 1)
    ]


def _sizes(prefix: str, shape: Any) -> dict[str, int]:
    """A shape as three columns; 0 stands for a dimension that is not there."""
    padded = [*shape, 0, 0][:3]
    return {f"{prefix}_{i}": int(size) for i, size in enumerate(padded)}


def wrong_lines(network: str) -> Callable[[list[Row]], int]:
    """How many lines of the source's table of this network differ from what the network does."""

    def measure(rows: list[Row]) -> int:
        ours = [row for row in rows if row["kind"] == "module" and row["network"] == network]
        if not ours:
            raise ValueError(f"no row of {network}")
        table = TABLES[network]
        return abs(len(ours) - len(table)) + sum(not _agrees(row, line) for row, line in zip(ours, table, strict=False))

    return measure


def _agrees(row: Row, line: tuple[str, str, tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether a module is what a line of the table says; only layers with weights have names there that bind."""
    name, module, before, after = line
    shapes = {**_sizes("in", before), **_sizes("out", after)}
    named = row["name"] == name or not name.startswith(("conv", "fc"))
    return named and row["module"] == module and all(row[key] == size for key, size in shapes.items())


def wrong_networks(column: str, expected: Mapping[str, int]) -> Callable[[list[Row]], int]:
    """How many networks have another number in this column than expected."""

    def measure(rows: list[Row]) -> int:
        known = [row for row in rows if row["kind"] == "network" and row["network"] in expected]
        if not known:
            raise ValueError("no network is known")
        return sum(row[column] != expected[row["network"]] for row in known)

    return measure


def largest(column: str) -> Callable[[list[Row]], float]:
    """The largest value of a column over the networks."""
    return lambda rows: max(row[column] for row in rows if row["kind"] == "network")


class Table3(Experiment):
    """Network structures: F-200², LeNet5 and LeNet5-BN line by line, and the parameters of all networks.

    Each network is built and run once on an empty image; hooks write down what every module takes and gives. Lines are
    compared with those of the source, parameter numbers with the sums that its layer sizes imply, the numbers of
    convolutions with the column "# conv" of its Table 7.
    """

    id = "hessian/table-3"
    source = SOURCE
    item = (
        "wu-zhu-2020 Table 3",
        "wu-zhu-2020 Table 4",
        "wu-zhu-2020 Table 5",
        "wu-2023 Table C.2",
        "wu-2023 Table C.3",
        "wu-2023 Table C.4",
    )
    sizes = {
        "tiny": NetworkParams(networks=("F-200^2", "LeNet5", "LeNet5-BN", "LeNet5-(fc1-80)", "VGG11-W32", "ResNet18-W48")),
        "laptop": NetworkParams(networks=tuple(PARAMETERS)),
        "paper": NetworkParams(networks=tuple(PARAMETERS)),
    }
    claims = (
        *(
            Claim(
                f"{network}: lines of {table} that differ",
                wrong_lines(network),
                rule="equal",
                expected=0,
                reported=Reported(f"{len(TABLES[network])} lines", table),
            )
            for network, table in (("F-200^2", "Table 3"), ("LeNet5", "Table 4"), ("LeNet5-BN", "Table 5"))
        ),
        Claim(
            "parameters: networks whose number is not the sum over the layers",
            wrong_networks("parameters", PARAMETERS),
            rule="equal",
            expected=0,
            reported=Reported("F-200² 199210, LeNet5 62006", "Tables 3 and 4", read_from="theory"),
        ),
        Claim(
            "convolutions but the first: networks whose number differs from Table 7",
            wrong_networks("convolutions", CONVOLUTIONS),
            rule="equal",
            expected=0,
            reported=Reported("LeNet5 1, VGG11 7, ResNet18 19", "Table 7"),
        ),
        Claim(
            "batch norm has neither scale nor shift (parameters in it)",
            largest("norm_parameters"),
            rule="equal",
            expected=0,
            reported=Reported("learnable parameters turned off", "appendix D.2"),
        ),
        Claim(
            "weights begin within Xavier's bound √(6/(in + out)) (largest weight over bound)",
            largest("weight_over_bound"),
            rule="between",
            expected=(0.9, 1.0),
            reported=Reported("Xavier", "appendix D.3"),
        ),
        Claim(
            "biases begin at zero (largest)",
            largest("bias"),
            rule="equal",
            expected=0,
            reported=Reported("zero", "appendix D.3"),
        ),
    )
    departs = (
        "The source calls its initialisation both PyTorch's default and Xavier with zero bias, which differ; the second "
        "statement is followed."
    )

    def jobs(self, p: NetworkParams) -> Iterator[dict[str, Any]]:
        for network in p.networks:
            yield {"network": network, "seed": 0}

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

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        modules = [{**row, "size": _volume(row)} for row in rows if row["kind"] == "module" and row["network"] in TABLES]
        networks = [
            {**row, "sum": PARAMETERS[row["network"]], "family": row["network"].split("-")[0]}
            for row in rows
            if row["kind"] == "network"
        ]
        lines = [(i, math.prod(after)) for table in TABLES.values() for i, (_, _, _, after) in enumerate(table, start=1)]
        figure, (left, right) = plots.panels(2, size=(4.6, 3.4))
        plots.curves(modules, "place", "size", by="network", log="y", labels="legend", xlabel="module", ylabel="outputs", ax=left)
        places, heights = zip(*lines, strict=True)
        left.plot(places, heights, "o", mfc="none", ms=9, color="#555555", label="source")
        left.legend(fontsize=8)
        plots.scatter(
            networks,
            "sum",
            "parameters",
            by="family",
            log="xy",
            identity=True,
            xlabel="sum over the layers",
            ylabel="parameters",
            ax=right,
        )
        return figure


def _xavier(layer: nn.Conv2d | nn.Linear) -> float:
    outputs, inputs = layer.weight.shape[:2]
    return math.sqrt(6 / ((outputs + inputs) * math.prod(layer.weight.shape[2:])))


def _volume(row: Row) -> int:
    return math.prod(int(row[f"out_{i}"]) for i in range(3) if row[f"out_{i}"])
