"""Pairs of models trained on sets that differ in one example: the algorithms, their data, and the runs that figures look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.data.generators import gaussian_classes, gaussian_mixture
from theodolite.experiments import Experiment, Params, Study, at_most, equal, relative, rows, sizes
from theodolite.experiments.claims import Measure
from theodolite.experiments.lab.datasets import Source, load_or
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import chosen, values_of
from theodolite.experiments.study import Computation
from theodolite.measures.stability import convex_bounds, largest_norm, largest_smoothness
from theodolite.measures.stability.study import STOPPING, Measured, StabilityConfig, make_bench, measure_size, with_length
from theodolite.measures.stability.training_pairs import Bench, Recipe, draw_swaps
from theodolite.models import count_parameters, fcn, resnet20
from theodolite.results import Row
from theodolite.training.schedules import epoch_order

# The source's own settings, and those that stand for them on a small machine

LOGISTIC = "logistic regression"
DEEP = ("1a", "2a", "2b")
#: Test examples of every experiment of the source.
TESTED = 10_000
#: Examples of a generated training pool, as many as MNIST has.
GENERATED = 60_000
#: Classes below this are one label of the binary task, the others the other.
SPLIT = 5
#: Photographs that are not there are replaced by digits of scikit-learn, everything else by Gaussian classes.
PHOTOGRAPHS = ("svhn", "cifar10")


@dataclass(frozen=True)
class Setting:
    """An algorithm on a data set, in plain values, so that it can be part of a job.

    `data` is a name of `theodolite.data`, or "two classes" and "ten classes" of Gaussian points; `network` is "linear" (one
    output, zeros at the start), "mlp" (two hidden layers of `width`) or "resnet20". From each of the updates in `drops` on
    the rate is a tenth. `steps` is T, the update at which figures look; runs go on to 3T/2 if figures look `beyond` T.
    """

    name: str
    data: str
    network: str
    width: int
    rate: float
    batch: int
    momentum: float = 0.0
    drops: tuple[int, ...] = ()
    steps: int = 100_000
    source: Source = "files"
    tested: int = TESTED
    beyond: bool = True

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Setting:
        """From the values of a job."""
        return cls(**{**plain, "drops": tuple(plain["drops"])})

    @property
    def checkpoints(self) -> dict[int, str]:
        """Updates at which all is measured, by name, the end last."""
        T = self.steps
        both = {T // 2: "T/2", T: "T"}
        return {**both, 3 * T // 2: "3T/2"} if self.beyond else {T // 4: "T/4", **both}

    @property
    def binary(self) -> bool:
        return self.network == "linear"

    def rate_at(self, step: int) -> float:
        """The learning rate of an update.

        >>> CONFIGURATIONS["2a"].rate_at(32_000)
        0.01
        """
        return self.rate / 10.0 ** sum(step >= drop for drop in self.drops)


#: Table 2.1 of the source.
CONFIGURATIONS = {
    "1a": Setting("1a", "svhn", "resnet20", 16, rate=0.01, batch=32),
    "2a": Setting("2a", "cifar10", "resnet20", 16, rate=0.1, batch=128, drops=(32_000, 48_000)),
    "2b": Setting("2b", "cifar10", "resnet20", 16, rate=0.1, batch=128, momentum=0.9, drops=(32_000, 48_000)),
}
PAPER = tuple(CONFIGURATIONS.values())


def scaled(data: str, width: int, steps: int, batches: tuple[int, int], source: Source) -> tuple[Setting, ...]:
    """Fully connected networks that stand for 1a, 2a and 2b: a small rate and batch, then a larger one with two drops."""
    small, large = batches
    drops = (steps // 2, 3 * steps // 4)
    first = Setting("1a", data, "mlp", width, rate=0.05, batch=small, steps=steps, source=source)
    second = replace(first, name="2a", rate=0.1, batch=large, drops=drops)
    return first, second, replace(second, name="2b", momentum=0.9)


LAPTOP = scaled("fashion_mnist", 256, 3000, (32, 128), "either")
TINY = scaled("digits", 32, 160, (16, 32), "either")

#: Logistic regression of Figure 2.1.
MNIST = Setting(LOGISTIC, "mnist", "linear", 0, rate=0.1, batch=128, beyond=False)
LOGISTIC_SIZES = {
    "tiny": replace(MNIST, data="two classes", steps=400, tested=2000),
    "laptop": replace(MNIST, steps=10_000, source="either"),
    "paper": MNIST,
}


# Data


@dataclass(frozen=True, eq=False)
class Task:
    """The pools, and where their examples come from."""

    bench: Bench
    origin: str


def task_of(setting: Setting) -> Task:
    """Pixels over 255 and nothing else; the test pool is a choice of `tested` examples made once.

    Others stand in for images that are not there, if `source` allows it.
    """
    tested = setting.tested
    train, test, origin = _examples(setting.data, setting.source, tested, setting.binary)
    if len(test[0]) > tested:
        rows = torch.randperm(len(test[0]), generator=torch.Generator().manual_seed(0))[:tested].sort().values
        test = test[0][rows], test[1][rows]
    return Task(make_bench(train, test, tested), origin)


Pool = tuple[Tensor, Tensor]


def _examples(name: str, source: Source, tested: int, binary: bool) -> tuple[Pool, Pool, str]:
    if name in ("two classes", "ten classes"):
        return _generated(tested, binary)

    def from_files() -> tuple[Pool, Pool, str]:
        found = data.load(name).scaled()
        train, test = ((x, labels(y, binary)) for x, y in ((found.x_train, found.y_train), (found.x_test, found.y_test)))
        return train, test, "digits of scikit-learn" if name == "digits" else name

    def stand_in() -> tuple[Pool, Pool, str]:
        return _examples("digits", source, tested, binary) if name in PHOTOGRAPHS else _generated(tested, binary)

    return load_or(from_files, stand_in, source)


def _generated(tested: int, binary: bool) -> tuple[Pool, Pool, str]:
    count = GENERATED + tested
    if binary:
        two = gaussian_classes(count)
        x, y, origin = two.x, (two.y[:, None] + 1) / 2, "two Gaussian classes"
    else:
        ten = gaussian_mixture(count)
        x, y, origin = ten.x, ten.y, "ten Gaussian classes"
    return (x[:GENERATED], y[:GENERATED]), (x[GENERATED:], y[GENERATED:]), origin


def labels(y: Tensor, binary: bool) -> Tensor:
    """Class numbers, or as 0 and 1 (n, 1) whether they are below 5 or not.

    >>> labels(torch.tensor([4, 5]), True).tolist()
    [[0.0], [1.0]]
    """
    return (y >= SPLIT).float()[:, None] if binary else y


# Algorithms


def recipe_of(setting: Setting, task: Task) -> Recipe:
    """The algorithm as the measures take it, up to T."""
    return Recipe(
        partial(_network, setting.network, setting.width, tuple(task.bench.train.inputs.shape[1:])),
        "sgd",
        nn.BCEWithLogitsLoss() if setting.binary else nn.CrossEntropyLoss(),
        setting.steps,
        setting.batch,
        schedule=lambda step: setting.rate_at(step) / setting.rate,
        settings={"rate": setting.rate, "momentum": setting.momentum},
    )


def _network(kind: str, width: int, shape: tuple[int, ...], seed: int) -> nn.Module:
    inputs = torch.Size(shape).numel()
    if kind == "linear":
        model = fcn(inputs, [], 1, seed=seed)
        for p in model.parameters():
            nn.init.zeros_(p)
        return model
    if kind == "mlp":
        return fcn(inputs, [width, width], 10, init="kaiming_normal", seed=seed)
    return resnet20(10, shape[0], width=width, seed=seed)


# Runs

#: Seed-trials; the main text shows the first.
TRIALS = (0, 1, 2)
#: Updates of the null swap that precedes every measurement.
CHECK_STEPS = 20
#: Columns that figures and claims use.
COLUMNS = (
    *("trial", "m", "pair", "step", "steps_taken", "visits", "stab", "stab_excl_z", "gap_loss", "gap_01", "dist", "norm_S"),
    *("norm_S2", "ndist", "train_loss", "test_loss", "train_accuracy", "test_accuracy", "diverged"),
)
#: Batches of each pair whose smoothness is computed, from the first on.
BATCHES = 500

#: Algorithms, sizes m, and pairs at each; seed-trials after the first have `further` pairs. Figures that compare seed-trials take
#: that many of all, for a maximum grows with their number.
DEEP_SIZES = {
    "tiny": Params(settings=TINY, ms=(100, 200, 400, 800), pairs=4, further=4, trials=TRIALS),
    "laptop": Params(settings=LAPTOP, ms=(500, 1000, 2000, 4000, 8000), pairs=8, further=4, trials=TRIALS),
    "paper": Params(settings=PAPER, ms=tuple(range(15_000, 50_001, 5_000)), pairs=40, further=40, trials=TRIALS),
}
REGRESSION_SIZES = {
    size: Params(settings=(LOGISTIC_SIZES[size],), ms=ms, pairs=pairs, further=pairs, trials=(0,))
    for size, ms, pairs in (
        ("tiny", (200, 400, 800, 1600, 3200), 12),
        ("laptop", (800, 1600, 3200, 6400, 12_800), 12),
        ("paper", (800, 1600, 3200, 6400, 12_800), 90),
    )
}


class Pairs(Study):
    """All pairs of one algorithm, seed-trial and size, measured at all its checkpoints, from one run to 3T/2.

    `compared` marks the pairs that figures of several seed-trials take.
    """

    sizes = DEEP_SIZES

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for part in p.get("parts", (p,)):
            for setting, trial, m in product(part.settings, part.trials, part.ms):
                yield pair_job(setting, trial, m, part)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting.of(job["setting"])
        checkpoints = setting.checkpoints
        for row in pair_rows(setting, job["trial"], job["m"], job["pairs"], tuple(checkpoints)):
            yield {**row, "time": checkpoints[row["step"]], "compared": row["pair"] < job["compared"]}


def pair_job(setting: Setting, trial: int, m: int, p: Params) -> dict[str, Any]:
    pairs = p.further if trial else p.pairs
    shared = {"configuration": setting.name, "setting": asdict(setting), "trial": trial, "m": m}
    return {**shared, "pairs": pairs, "compared": p.further, "seed": trial}


def pair_rows(setting: Setting, trial: int, m: int, pairs: int, checkpoints: tuple[int, ...]) -> list[Row]:
    """All pairs of one size and seed-trial at some updates, from one run."""
    length = partial(replace, steps=checkpoints[-1])
    return _kept(*_measured(setting, m, trial, length, pairs=pairs, checkpoints=checkpoints))


def _measured(
    setting: Setting, m: int, trial: int, length: Callable[[Recipe], Recipe] = lambda recipe: recipe, **asked: Any
) -> tuple[Row, Measured]:
    """What a row says of the algorithm, and what its pairs of one size and seed-trial give; `length` says how long it runs."""
    task = task_of(setting)
    config = StabilityConfig(sizes=(m,), check_steps=CHECK_STEPS, **asked)
    found = measure_size(length(recipe_of(setting, task)), task.bench, config, m, trial, progress=False)
    return {"configuration": setting.name, "data": task.origin}, found


def _kept(mark: Row, found: Measured) -> list[Row]:
    return [{**mark, **{name: row[name] for name in COLUMNS}} for row in found.rows]


class Paths(Study):
    """Accuracies on the lines through both models of the first pairs at T updates; pairs are drawn at random, so any are."""

    sizes = {size: p.but(joined=joined) for (size, p), joined in zip(DEEP_SIZES.items(), (2, 4, 10), strict=True)}

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for setting, trial, (end, pick) in product(p.settings, p.trials, (("smallest", min), ("largest", max))):
            shared = {"configuration": setting.name, "setting": asdict(setting), "trial": trial, "m": pick(p.ms), "size": end}
            yield {**shared, "pairs": p.joined, "seed": trial}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        m, trial, count = job["m"], job["trial"], job["pairs"]
        mark, found = _measured(Setting.of(job["setting"]), m, trial, pairs=count, paths=count)
        for name, path in sorted(found.paths.items()):
            summary = {key: path.summary()[key] for key in ("barrier_train", "barrier_test", "connected", "conclusive")}
            shared = {**mark, "trial": trial, "m": m, "size": job["size"], "pair": int(name.rpartition(" ")[2])}
            yield from ({**shared, **row, **summary} for row in path.rows())


class Stopped(Study):
    """Configuration 1a by each stopping rule: after T updates, after a number of epochs, or at a training loss.

    Runs that a loss stops end after 5T updates at the latest.
    """

    sizes = {
        size: DEEP_SIZES[size].but(epochs=epochs, loss_target=target)
        for size, epochs, target in (("tiny", 10, 0.5), ("laptop", 48, 0.1), ("paper", 100, 0.01))
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for rule, m in product(STOPPING, p.ms):
            yield {**pair_job(p.settings[0], 0, m, p), "rule": rule, "epochs": p.epochs, "loss_target": p.loss_target}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        own = ("rule", "epochs", "loss_target")
        return [Pairs().job(**{k: v for k, v in job.items() if k not in own})] if job["rule"] == "updates" else []

    def run(self, job: Mapping[str, Any], *trained: list[Row]) -> Iterator[Row]:
        if trained:
            found = [row for row in trained[0] if row["time"] == "T" and row["compared"]]
        else:
            setting = Setting.of(job["setting"])

            def length(recipe: Recipe) -> Recipe:
                aimed = replace(recipe, loss_target=job["loss_target"])
                return with_length(aimed, job["m"], job["rule"], 5 * setting.steps, job["epochs"])

            found = _kept(*_measured(setting, job["m"], 0, length, pairs=job["compared"]))
        yield from ({**row, "rule": job["rule"]} for row in found)


# The convex case


class ConvexPairs(Study):
    """Pairs of logistic regressions, with distance and stability as shares of their bounds and the rate as a share of 2/β_s.

    The bounds are `D ≤ (2ηL/B) h` with the visits h so far, and `stability ≤ L_test D` with the measured D; where nothing has
    moved yet the shares are 0.
    """

    sizes = REGRESSION_SIZES

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return Pairs().jobs(p)

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [Pairs().job(**job)]

    def run(self, job: Mapping[str, Any], trained: list[Row]) -> Iterator[Row]:
        setting = Setting.of(job["setting"])
        constants, tested = batch_constants(setting, job["m"], job["pairs"])
        for row in trained:
            largest, smoothness = constants[row["pair"]]
            bounds = convex_bounds(
                largest_input=largest,
                largest_test_input=tested,
                rate=setting.rate,
                batch=min(setting.batch, job["m"]),
                visits=row["visits"],
                smoothness=smoothness,
            )
            shares = {
                "distance_share": share(row["dist"], float(bounds.distance_bound)),
                "stability_share": share(row["stab"], tested * row["dist"]),
                "rate_share": setting.rate / bounds.largest_rate,
            }
            yield {**row, **shares}


def batch_constants(setting: Setting, m: int, pairs: int) -> tuple[list[tuple[float, float]], float]:
    """L and the largest β_s of each pair, and L of the test examples."""
    bench = task_of(setting).bench
    inputs = bench.joined[0]
    places = batch_places(m, setting.batch, min(BATCHES, setting.steps))
    found = []
    for swap in draw_swaps(len(bench.train), len(bench.test), m, pairs, 0):
        both = swap.rows(len(bench.train))
        batches = both[:, places].flatten(0, 1).unique(dim=0)  # those of S and S' are mostly the same
        smoothness = largest_smoothness(inputs, batches, enough=2.0 / setting.rate)
        found.append((largest_norm(inputs[both.unique()]), smoothness))
    return found, largest_norm(bench.evaluation[0])


def batch_places(m: int, batch: int, count: int, *, order_seed: int = 0) -> Tensor:
    """Places (count, B) of the training set in the first batches of the common order, incomplete ones left out.

    >>> batch_places(5, 2, 3).shape
    torch.Size([3, 2])
    """
    width = min(batch, m)
    each = m // width
    epochs = [epoch_order(order_seed, epoch, m)[: each * width].reshape(each, width) for epoch in range(-(-count // each))]
    return torch.cat(epochs)[:count]


def share(value: float, bound: float) -> float:
    """A value over its bound; nothing is no share of anything."""
    return value / bound if bound else 0.0 if value == 0 else float("inf")


# Table 2.1: the three deep configurations as definitions that run

#: The source's table: data, batch, momentum, and the rate from some updates on.
TABLE: dict[str, dict[str, Any]] = {
    "1a": {"data": "svhn", "batch": 32, "momentum": 0.0, "rates": {0: 0.01}},
    "2a": {"data": "cifar10", "batch": 128, "momentum": 0.0, "rates": {0: 0.1, 32_000: 0.01, 48_000: 0.001}},
    "2b": {"data": "cifar10", "batch": 128, "momentum": 0.9, "rates": {0: 0.1, 32_000: 0.01, 48_000: 0.001}},
}
#: The updates of a run of the source, and of its longest one.
UPDATES, LONGEST = 100_000, 150_000


def differing(name: str) -> Measure:
    """Entries of the table that differ from the definition: data, batch, momentum, and the rates of all updates."""

    def measure(rows: list[Row]) -> int:
        definition, table = chosen(rows, kind="definition", configuration=name)[0], TABLE[name]
        wrong = sum(definition[entry] != table[entry] for entry in ("data", "batch", "momentum"))
        found = {row["update"]: row["rate"] for row in chosen(rows, kind="rate", configuration=name)}
        firsts = [*sorted(table["rates"]), LONGEST + 1]
        for first, after in pairwise(firsts):
            wrong += sum(abs(rate / table["rates"][first] - 1) > 1e-9 for at, rate in found.items() if first <= at < after)
        return wrong if len(found) > 2 else -1

    return measure


#: Mean train loss by update in the short runs; at the end over that before, the largest of the configurations.
losses = rows.by("step").each(rows.mean("train_loss"))
fallen = rows(kind="run").by("configuration").each(losses.last() / losses.first()).max()


class Table21(Experiment):
    """The three deep configurations: ResNet-20 on SVHN and CIFAR-10, and that they train.

    Their rates by update, and short runs of pairs. The longest runs of the source have 150,000 updates.
    """

    item, where = "karp-2024 Table 2.1", "section 2.2"
    #: A short run of each configuration: `steps` updates of the network with `width` channels, on `m` examples.
    sizes = sizes(
        source="either",
        tiny={"width": 4, "steps": 16, "m": 64, "pairs": 1, "batch": 16, "tested": 64, "data": "digits"},
        laptop={"width": 16, "steps": 20, "m": 512, "pairs": 1, "tested": 500},
        paper={"width": 16, "steps": UPDATES, "m": 15_000, "pairs": 2, "tested": 10_000, "source": "files"},
    )
    departs = (
        "Convolutions start from N(0, 2/fan-out), norms at scale 1 and shift 0, and there is no weight decay; the source states "
        "none of these. Below paper size runs are short; at tiny size they are of a narrow network on digits of scikit-learn, in "
        "batches of 16."
    )
    claims = {
        **{
            f"{name}: entries of the table that differ from the definition": equal(
                0, differing(name), says=", ".join(f"{entry} {value}" for entry, value in TABLE[name].items())
            )
            for name in DEEP
        },
        "ResNet-20 has about 0.27 million parameters": relative(
            0.01,
            0.27e6,
            rows(kind="definition")["parameters"].first(),
            reported=0.27e6,
            where="He et al. 2016, named by Karp 2024, section 2.2",
        ),
        "all three train (mean train loss after the run over that before, largest)": at_most(1.0, fallen, says="trained models"),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for name in DEEP:
            own = {key: value for key, value in p.items() if key not in ("m", "pairs")}
            short = replace(CONFIGURATIONS[name], **own)
            yield {"setting": asdict(short), "m": p.m, "pairs": p.pairs, "trial": 0, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        short = Setting.of(job["setting"])
        own = CONFIGURATIONS[short.name]
        mark = {"configuration": own.name}
        size = count_parameters(resnet20(10, 3, width=own.width, seed=0))
        definition = {"data": own.data, "batch": own.batch, "momentum": own.momentum, "updates": own.steps, "parameters": size}
        yield {"kind": "definition", **mark, **definition}
        for update in range(0, LONGEST + 1, 1000):
            yield {"kind": "rate", **mark, "update": update, "rate": own.rate_at(update)}
        checkpoints = (0, short.steps // 2, short.steps)
        for row in pair_rows(short, job["trial"], job["m"], job["pairs"], checkpoints):
            yield {"kind": "run", **row}

    def draw(self, rows: list[Row]) -> Any:
        rates = [{**row, "thousands": row["update"] / 1000} for row in chosen(rows, kind="rate")]
        runs = chosen(rows, kind="run")
        title = f"short runs ({', '.join(values_of(runs, 'data'))})"
        scale: dict[str, Any] = {"log": "y", "markers": False, "xlabel": "thousand updates", "ylabel": "learning rate"}
        return draw_panels(
            curves(rates, "thousands", "rate", **scale),
            curves(runs, "step", "train_loss", xlabel="updates", ylabel="train loss", title=title),
            size=(4.6, 3.2),
            by="configuration",
            labels="legend",
        )
