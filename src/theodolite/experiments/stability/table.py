"""Table 2.1: the three deep configurations as definitions that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from theodolite.experiments import Experiment, at_most, equal, relative, rows, sizes
from theodolite.experiments.claims import Measure
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import chosen, values_of
from theodolite.experiments.stability.configurations import CONFIGURATIONS, DEEP, Setting
from theodolite.experiments.stability.pairs import pair_rows
from theodolite.models import count_parameters, resnet20
from theodolite.results import Row

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
