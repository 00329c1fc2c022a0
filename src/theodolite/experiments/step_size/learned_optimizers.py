"""Figures 5 to 10 of the paper: learned optimizers that were scored on training data (TbT) or on validation data (TbV)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from theodolite.data import load
from theodolite.data.generators import noisy_labels
from theodolite.experiments.claims import at_least, at_most, between, cited, measured
from theodolite.experiments.figure import Figure
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, split
from theodolite.experiments.query import Column, Measured, Value, rows
from theodolite.experiments.study import Study, sizes
from theodolite.measures.stepsize import OptimizerNetwork, meta_train
from theodolite.models import fcn
from theodolite.results import Row
from theodolite.training import Fleet

#: Standard deviation of all weights before training, times the root of the first axis of their tensor in the source's layout.
SPREAD = 1.2
#: Step sizes that plain SGD is tuned over, and trainings of each.
RATES = tuple(10 ** (-3 + 0.32 * i) for i in range(12))
TRAININGS = 3
#: A run is stopped where its loss is so many times the first: what an optimizer does before is shown.
BLOW_UP = 1e30
#: Share of labels drawn anew.
NOISE = 0.2
#: Seeds of test runs and of SGD's tuning lie apart from those of meta-training.
TESTS, TUNING = 1_000_000, 2_000_000


class Samples(NamedTuple):
    """Pixels as vectors; labels as they are trained and tested on, and the test labels without noise."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    clean: Tensor


def samples_of(job: Mapping[str, Any]) -> Samples:
    """The data set of a job; the noise is drawn once, before any subset, for training and test labels alike."""
    found = load(job["data"]).scaled()
    x, x_test = (
        (part if job["side"] >= part.shape[-1] else F.adaptive_avg_pool2d(part, job["side"])).flatten(1)
        for part in (found.x_train, found.x_test)
    )
    y, y_test = (
        noisy_labels(labels, 10, job["noise"], seed=2 * job["seed"] + i) for i, labels in enumerate((found.y_train, found.y_test))
    )
    return Samples(x, y, x_test, y_test, found.y_test)


def network(seed: int, *, inputs: int, widths: Sequence[int]) -> nn.Module:
    """A ReLU network whose weights are all from N(0, 1.2² / inputs of the layer), its biases from N(0, 1.2² / outputs)."""
    model = fcn(inputs, list(widths), 10)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) * SPREAD / math.sqrt(p.shape[-1])
    return model


# The study: one optimizer, meta-trained or tuned, on one data set, and its test runs


def _case(n: int, valid: int, steps: int, *, twice: bool = False) -> dict[str, Any]:
    """Trainings on n samples; `twice` adds an optimizer that was meta-trained on twice as many."""
    roles = {"SGD": (n, 0), "TbT": (n, 0), "TbV": (n - valid if not twice else n, valid)}
    return {"n": n, "roles": {**roles, "TbT2": (2 * n, 0)} if twice else roles, "steps": steps}


#: How long a meta-training is. The source's own: 100 problems, three trajectories each, one at a time. At laptop size some 800
#: meta-updates: after 300 an optimizer that was scored on validation data may still lose late in a run what it has learned.
PAPER = {"problems": 100, "trajectories": 3, "together": 1, "segments": (10, 30), "length": (50, 100)}
LAPTOP = {"problems": 320, "trajectories": 1, "together": 8, "segments": (8, 12), "length": (20, 10)}
TINY = {"problems": 12, "trajectories": 1, "together": 4, "segments": (4, 0), "length": (4, 0)}
_DIGITS = {"data": "digits", "side": 8, "widths": (20,)}


class LearnedOptimizers(Study):
    """Accuracy along test runs of each optimizer: rows of all test runs' mean, at some of the steps."""

    sizes = sizes(
        noise=(0.0, NOISE),
        tiny={
            **{**_DIGITS, "meta": TINY, "seeds": 1, "runs": 2, "points": 4},
            "cases": {"small": _case(60, 60, 40, twice=True), "medium": _case(120, 40, 40), "all": _case(240, 80, 40)},
        },
        laptop={
            **{**_DIGITS, "meta": LAPTOP, "seeds": 3, "runs": 5, "points": 25},
            "cases": {"small": _case(150, 150, 500, twice=True), "medium": _case(600, 200, 500), "all": _case(1200, 400, 500)},
        },
        paper={
            **{"data": "mnist", "side": 28, "widths": (100, 20), "meta": PAPER, "seeds": 3, "runs": 5, "points": 40},
            "cases": {
                "small": _case(1000, 1000, 4000, twice=True),
                "medium": _case(12_000, 4000, 4000),
                "all": _case(60_000, 10_000, 40_000),
            },
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        shared = {name: p[name] for name in ("data", "side", "widths", "meta", "runs")}
        for case, setting in p.cases.items():
            for noise in p.noise:
                for role, (samples, valid) in setting["roles"].items():
                    for seed in range(p.seeds):
                        own = {"case": case, "role": role, "n": setting["n"], "samples": samples, "valid": valid}
                        length = {"steps": setting["steps"], "every": setting["steps"] // p.points}
                        yield {**shared, **own, **length, "noise": noise, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        samples = samples_of(job)
        make = partial(network, inputs=samples.x.shape[1], widths=job["widths"])
        if job["role"] == "SGD":
            name, rate = "SGD", tuned_rate(samples, job, make)
            optimizer: Any = "sgd"
            found = {"rate": rate}
        else:
            optimizer, found = _meta_trained(samples, job, make)
            name, rate = job["role"][:3] + str(job["samples"]) + (f"+{job['valid']}" if job["valid"] else ""), 1.0
        shared = {"case": job["case"], "role": job["role"], "optimizer": name, "noise": job["noise"], "seed": job["seed"]}
        changed = float((samples.y_test != samples.clean).double().mean())
        yield {"kind": "optimizer", **shared, "changed": changed, **found}
        for row in test_runs(samples, job, make, optimizer, rate):
            yield {"kind": "curve", **shared, **row}


def _meta_trained(
    samples: Samples, job: Mapping[str, Any], make: Callable[[int], nn.Module]
) -> tuple[OptimizerNetwork, dict[str, float]]:
    """The optimizer of a job, and the mean loss along its first and its last trajectory."""
    found = meta_train(
        make,
        (samples.x, samples.y),
        loss=nn.CrossEntropyLoss(),
        split="valid" if job["valid"] else "train",
        samples=job["samples"],
        valid_samples=job["valid"] or None,
        seed=job["seed"],
        progress=False,
        **job["meta"],
    )
    first, last = found.objectives
    facts = {"updates": len(found.trace), "skipped": found.skipped, "inner_steps": found.inner_steps}
    return found.network, {**facts, "first": first, "last": last}


def tuned_rate(samples: Samples, job: Mapping[str, Any], make: Callable[[int], nn.Module]) -> float:
    """The step size of SGD whose mean loss on validation samples, after all steps, is least."""
    held = min(job["n"], max(len(samples.x) - job["n"], len(samples.x) // 6))
    start = TUNING + job["seed"] * TRAININGS
    orders = torch.stack([_order(start + i, len(samples.x)) for i in range(TRAININGS)])
    index = orders.repeat(len(RATES), 1)
    trained, valid = index[:, held : held + job["n"]], index[:, :held]
    seeds = [start + i for i in range(TRAININGS)] * len(RATES)
    rates = [rate for rate in RATES for _ in range(TRAININGS)]
    fleet = Fleet(make, seeds, loss=nn.CrossEntropyLoss(), optimizer="sgd", rate=rates)
    fleet.train((samples.x, samples.y), index=trained, steps=job["steps"], batch_size=32, drop_last=True, progress=False)
    outputs = fleet.outputs((samples.x, samples.y), index=valid)
    losses = F.cross_entropy(outputs.transpose(1, 2), samples.y[valid], reduction="none").mean(1)
    means = losses.nan_to_num(math.inf).reshape(len(RATES), TRAININGS).mean(1)
    return RATES[int(means.argmin())]


def test_runs(
    samples: Samples, job: Mapping[str, Any], make: Callable[[int], nn.Module], optimizer: Any, rate: float
) -> Iterator[Row]:
    """Trainings of fresh networks on fresh samples: mean accuracies at some steps, and the range of the clean one."""
    seeds = [TESTS + job["seed"] * job["runs"] + i for i in range(job["runs"])]
    index = torch.stack([_order(seed, len(samples.x))[: job["n"]] for seed in seeds])

    def record(step: int, fleet: Any) -> dict[str, Tensor]:
        mine = fleet.outputs((samples.x, samples.y), index=index).argmax(-1)
        new = fleet.outputs((samples.x_test, samples.y_test)).argmax(-1)
        right = {"train": mine == samples.y[index], "test": new == samples.y_test, "clean": new == samples.clean}
        return {name: each.double().mean(1) for name, each in right.items()}

    fleet = Fleet(make, seeds, loss=nn.CrossEntropyLoss(), optimizer=optimizer, rate=rate)
    how: dict[str, Any] = {"steps": job["steps"], "batch_size": 32, "drop_last": True, "every": job["every"]}
    trace = fleet.train((samples.x, samples.y), index=index, record=record, blow_up=BLOW_UP, **how, progress=False)
    for i, step in enumerate(trace.measured_at):
        found = {name: trace.measured[name][:, i] for name in ("train", "test", "clean")}
        span = float(found["clean"].max() - found["clean"].min())
        means = {name: float(values.mean()) for name, values in found.items()}
        yield {"step": step, **means, "span": span, "end": i == len(trace.measured_at) - 1}


def _order(seed: int, size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


# What is read off the rows: accuracies after the last step, means over the seeds of meta-training

ends = rows(kind="curve", end=True)
made = rows(kind="optimizer")
learned = made.where(lambda row: row["role"] != "SGD")


def accuracy(role: str, case: str, noise: float, column: str = "clean") -> Value:
    """The mean over seeds, with half the range as its error."""
    return ends(role=role, case=case, noise=noise)[column].mean_and_range()


def advantage(case: str, noise: float, column: str = "clean", *, over: str = "TbT") -> Value:
    """How much more accurate TbV is: the mean over seeds, with half the range as its error.

    NaN where one of the two has learned nothing in some seed: then there is nothing to compare.
    """

    def difference(found: list[Row]) -> Measured:
        table = {(row["role"], row["seed"]): row for row in found}
        pairs = [(row, table[over, seed]) for (role, seed), row in table.items() if role == "TbV"]
        if min(row["clean"] for pair in pairs for row in pair) < LEARNED:
            return Measured(math.nan)
        gaps = [ours[column] - theirs[column] for ours, theirs in pairs]
        return Measured(sum(gaps) / len(gaps), 0.5 * (max(gaps) - min(gaps)))

    return ends(case=case, noise=noise).measure(difference)


def fitted(case: str, noise: float, *roles: str) -> Value:
    """The least training accuracy of some optimizers."""
    return Column.of(*(ends(case=case, noise=noise, role=role).mean("train") for role in roles)).min()


def better(case: str, noise: float) -> Value:
    """The accuracy on true test labels of TbT or TbV, whichever is better; NaN where neither has learned anything."""
    best = ends(case=case, noise=noise, role=["TbT", "TbV"]).by("role").each(rows.mean("clean")).max()
    return best.then(lambda value: value if value >= LEARNED else math.nan)


def _shrinks(noise: float) -> dict[str, Any]:
    """The gap from few samples to many."""
    few, some, many = (advantage(case, noise) for case in CASES)
    return {
        "TbV minus TbT on true test labels, fewest samples minus a middling number": at_least(0.0, few - some, says="decreases"),
        "a middling number minus all": at_least(-0.01, some - many, says="decreases"),
    }


def _sound(level: float, **where: Any) -> dict[str, Any]:
    """What can be told at any size, of the rows of one level of noise."""
    learns, own = ends(role="SGD", **where)["train"].min(), made(**where)
    said = {
        "SGD, tuned on validation samples, learns (least training accuracy)": at_least(0.3, learns, says="close to 1"),
        "meta-updates whose gradient was not finite (share)": at_most(0.05, learned.measure(_skipped_share)),
        "meta-training lowers the mean loss along a run (least fall)": at_least(
            0.05, (learned["first"] - learned["last"]).min(), says="trains an optimizer", where="Wang et al. 2021, appendix F"
        ),
    }
    changed = "share of test labels that noise has changed"
    bounds = (0.14, 0.22) if level else (0.0, 0.0)
    return {**said, changed: between(*bounds, own["changed"].mean(), reported=0.9 * level, read_from="theory")}


def _skipped_share(found: list[Row]) -> float:
    return float(sum(row["skipped"] for row in found) / sum(row["updates"] for row in found))


#: Accuracy on true test labels from which on an optimizer has learned something; chance is 0.1.
LEARNED = 0.2
#: As the panels call the numbers of samples.
CASES = {"small": "few samples", "medium": "some samples", "all": "all samples"}
DEPARTS = (
    "Below the paper size: 8 x 8 digits, a network 64-20-10, some 800 meta-updates instead of 12,000, eight problems in "
    "lockstep, 150, 600 and 1200 samples instead of 1000, 12,000 and 60,000, and 500 steps. All optimizers are tested on "
    "trainings on as many samples. SGD's step size is that of the least validation loss after the last step. Test labels are "
    "shown without noise; the rows have accuracies on noisy ones too."
)
_LATER: dict[str, Any] = {"since": "laptop"}


class Accuracies(Figure):
    """Two panels, as the paper has them: training accuracy, and accuracy on new samples."""

    case: str
    noise: float
    departs = DEPARTS

    def draw(self, rows: list[Row]) -> Any:
        mine = [row for row in curve_rows(rows) if row["case"] == self.case and row["noise"] == self.noise]
        return draw_panels(
            panel(mine, "train", "training accuracy"), panel(mine, "clean", "test accuracy, true labels"), size=SIZE
        )


SIZE = (4.2, 3.0)


def curve_rows(found: list[Row]) -> list[Row]:
    """Curves as means over the seeds of meta-training; named after the optimizer."""
    groups = split(rows(kind="curve").of(found), "case", "noise", "optimizer", "step").values()
    columns = ("train", "test", "clean")
    return [{**group[0], **{name: sum(row[name] for row in group) / len(group) for name in columns}} for group in groups]


def panel(found: list[Row], column: str, label: str, title: str = "") -> Panel:
    return curves(found, "step", column, by="optimizer", markers=False, ylabel=label, title=title)


class Figure5(Accuracies):
    """Few samples, no noise: all optimizers fit them; the one scored on validation data is best on new ones."""

    study, item, case, noise = LearnedOptimizers(), "step-size-2021 Figure 5", "small", 0.0
    only = {"case": "small", "noise": 0.0}
    claims = [
        _sound(0.0),
        cited(
            "",
            {
                "TbT, TbT on twice the samples and TbV fit the samples (least training accuracy)": at_least(
                    0.95, fitted("small", 0.0, "TbT", "TbT2", "TbV"), says="close to 1"
                ),
                "TbV minus TbT on true test labels": at_least(
                    0.01, advantage("small", 0.0), says="TbT overfits, TbV performs well"
                ),
                "TbV minus TbT on twice the samples": at_least(
                    0.0, advantage("small", 0.0, over="TbT2"), says="TbT2000 overfits too"
                ),
            },
            **_LATER,
        ),
    ]


class Figure6(Accuracies):
    """Few samples, a fifth of the labels drawn anew: scored on training data, optimizers fit the noise."""

    study, item, case, noise = LearnedOptimizers(), "step-size-2021 Figure 6", "small", NOISE
    only = {"case": "small", "noise": NOISE}
    claims = [
        _sound(NOISE),
        cited(
            "",
            {
                "TbT and TbT on twice the samples fit the noisy labels (least training accuracy)": at_least(
                    0.95, fitted("small", NOISE, "TbT", "TbT2"), says="close to 1"
                ),
                "TbV fits them less (training accuracy, TbV minus TbT)": at_most(
                    -0.02, advantage("small", NOISE, "train"), says="does not fit the noisy labels", where="Wu 2023, Figure 5.5"
                ),
                "TbV minus TbT on true test labels": at_least(0.05, advantage("small", NOISE), says="much better"),
                "TbV minus TbT on test labels with noise": at_least(0.03, advantage("small", NOISE, "test"), says="much better"),
                "TbV minus TbT on twice the samples": at_least(0.02, advantage("small", NOISE, over="TbT2"), says="much better"),
                "SGD fits the noise too (training accuracy)": measured(
                    accuracy("SGD", "small", NOISE, "train"), says="close to 1"
                ),
            },
            **_LATER,
        ),
    ]


class Figure7(Accuracies):
    """All samples, no noise: what an optimizer was scored on no longer matters."""

    study, item, case, noise = LearnedOptimizers(), "step-size-2021 Figure 7", "all", 0.0
    only = {"case": "all", "noise": 0.0}
    claims = [
        _sound(0.0),
        cited(
            "",
            {
                "TbV and TbT are alike on true test labels (difference)": at_most(
                    0.02, abs(advantage("all", 0.0)), says="performs similarly"
                ),
                "tuned SGD is as good as the better of them (difference)": at_least(
                    -0.005, accuracy("SGD", "all", 0.0) - better("all", 0.0), says="slightly weaker than SGD"
                ),
            },
            **_LATER,
        ),
    ]


class Figure8(Accuracies):
    """All samples, a fifth of the labels drawn anew: scored on training data, the optimizer is slightly worse."""

    study, item, case, noise = LearnedOptimizers(), "step-size-2021 Figure 8", "all", NOISE
    only = {"case": ["small", "all"], "noise": NOISE}
    claims = [
        _sound(NOISE),
        cited(
            "",
            {
                "TbV minus TbT on true test labels": at_least(0.0, advantage("all", NOISE), says="slightly worse"),
                "and less than with few samples": at_least(
                    0.0, advantage("small", NOISE) - advantage("all", NOISE), says="performs well with a large data set"
                ),
            },
            **_LATER,
        ),
    ]


class Figure9(Accuracies):
    """A middling number of samples, no noise: the gap shrinks as the samples grow."""

    study, item, case, noise = LearnedOptimizers(), "step-size-2021 Figure 9", "medium", 0.0
    only = {"noise": 0.0}
    claims = [_sound(0.0), cited("", _shrinks(0.0), **_LATER)]


class Figure10(Accuracies):
    """A middling number of samples, a fifth of the labels drawn anew: noise widens the gap."""

    study, item, case, noise = LearnedOptimizers(), "step-size-2021 Figure 10", "medium", NOISE
    only = {}
    claims = [
        _sound(NOISE, noise=NOISE),
        cited(
            "",
            {
                **_shrinks(NOISE),
                **{
                    f"{title}: TbV's advantage grows with noise (difference of the advantages)": at_least(
                        0.0, advantage(case, NOISE) - advantage(case, 0.0), says="much worse with noise"
                    )
                    for case, title in CASES.items()
                },
            },
            **_LATER,
        ),
    ]


class Figure54(Figure):
    """Test accuracy: few samples without and with noise, and all samples without.

    (a) against (b): the advantage of scoring on validation data grows with noise; (a) against (c): with many samples it is gone.
    """

    study, item, departs = LearnedOptimizers(), "wu-2023 Figure 5.4", DEPARTS
    shown = (("small", 0.0), ("small", NOISE), ("all", 0.0))
    only = staticmethod(lambda job: (job["case"], job["noise"]) in Figure54.shown)
    claims = [
        _sound(0.0, noise=0.0),
        cited(
            "",
            {
                "(b) TbV minus TbT on true test labels": at_least(
                    0.05, advantage("small", NOISE), says="significantly outperforms"
                ),
                "(b) minus (a): the advantage of TbV grows with noise": at_least(
                    0.02, advantage("small", NOISE) - advantage("small", 0.0), says="increases"
                ),
                "(c) TbV and TbT are alike (difference)": at_most(
                    0.02, abs(advantage("all", 0.0)), says="no significant difference"
                ),
                "(b) minus (c): few noisy samples against many without noise": at_least(
                    0.03, advantage("small", NOISE) - advantage("all", 0.0), says="TbT gets comparable with many samples"
                ),
            },
            **_LATER,
        ),
    ]

    def draw(self, rows: list[Row]) -> Any:
        panels = []
        for case, noise in self.shown:
            mine = [row for row in curve_rows(rows) if row["case"] == case and row["noise"] == noise]
            title = f"{CASES[case]}, {100 * noise:.0f} % noise"
            panels.append(panel(mine, "clean", "test accuracy, true labels", title))
        return draw_panels(*panels, columns=3, size=SIZE)


class Figure55(Figure):
    """Training accuracy with few samples and noise: scored on validation data, the optimizer leaves noisy labels unfitted."""

    study, item, departs = LearnedOptimizers(), "wu-2023 Figure 5.5", DEPARTS
    only = {"case": "small", "noise": NOISE}
    claims = [
        _sound(NOISE),
        cited(
            "",
            {
                "TbT fits the noisy labels (training accuracy)": at_least(0.95, fitted("small", NOISE, "TbT"), says="close to 1"),
                "TbV minus TbT, training accuracy": at_most(
                    -0.02, advantage("small", NOISE, "train"), says="avoids overfitting to noisy labels"
                ),
            },
            **_LATER,
        ),
    ]

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(panel(curve_rows(rows), "train", "training accuracy"), size=SIZE)
