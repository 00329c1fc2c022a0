"""The study that the figures of this chapter look at: small models grown by all operators, each trained to the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from theodolite.data import MissingDataError
from theodolite.experiments.growing.small_models import (
    STORIES,
    Setup,
    corpus_of,
    pretrained,
    pretraining_of,
    token_loss,
)
from theodolite.experiments.query import Measured, Value, rows
from theodolite.experiments.study import Computation, Study, sizes
from theodolite.measures.growth import GrowthOperator, GrowthStudy, growth_operator
from theodolite.measures.growth.diagnostics import paired_error, pearson, relative_regret_of, spearman, trial_steps
from theodolite.measures.growth.runs import Arm, Runs, step_flops
from theodolite.measures.growth.search import prepared
from theodolite.problem.state_guard import left_as_found
from theodolite.results import Row

Array = NDArray[np.float64]

SMALL = "small"
#: The pool of the source, 12 layers to 16: starts × blocks, each copied and random.
STARTS, BLOCKS = (0, 2, 4, 6, 8), (1, 2, 4)
SOURCE_POOL = tuple(f"{start}/{block}/{init}" for init, start, block in product(("random", "copy"), STARTS, BLOCKS))
#: All ways from 4 layers to 6, and the identity, which is no operator of the source.
ALL_OF_FOUR = (*(f"{start}/{block}/{init}" for init, start, block in product(("random", "copy"), (0, 1, 2), (1, 2))), "identity")
FEW_OF_FOUR = ("0/1/random", "2/2/random", "0/2/copy", "2/2/copy", "identity")
OF_FIVE = ("3/2/random", "0/1/copy", "3/2/copy", "identity")

_BERT = Setup("bert", "masked", norm_first=False, rate=2e-3, operators=FEW_OF_FOUR)
_UL2 = Setup("ul2", "ul2", adafactor=True, rate=0.05, final_rate=0.005, smooth=1, operators=FEW_OF_FOUR)
_GPT = Setup("gpt", rate=5e-3, operators=FEW_OF_FOUR)
_STORIES = Setup(
    STORIES, text=STORIES, words=512, context=64, layers=5, grown=7, pretraining=0, batch=4, steps=20, rate=3e-4, held_out=32,
    tokens=12_000, looks=((4, 2), (20, 8)), window=12, lag=12, operators=OF_FIVE,
)  # fmt: skip

#: Character GPTs of width 64; grown ones take 500 steps.
WIDE: dict[str, Any] = {
    "text": "tinyshakespeare", "words": 65, "context": 64, "dim": 64, "hidden": 256, "pretraining": 2000, "steps": 500,
    "batch": 16, "tokens": 400_000, "held_out": 128, "warmup": 100, "looks": ((20, 2), (100, 10), (10**9, 50)), "window": 100,
    "lag": 100, "early": 20, "operators": ALL_OF_FOUR,
}  # fmt: skip
#: BERT-Base and a decoder of 1.1 billion parameters, 12 layers to 16, as the source has them.
BASE: dict[str, Any] = {
    "text": "books-and-wikipedia", "words": 30_522, "context": 512, "dim": 768, "hidden": 3072, "heads": 12, "layers": 12,
    "grown": 16, "pretraining": 500_000, "steps": 100_000, "batch": 256, "rate": 1e-4, "warmup": 10_000, "held_out": 8192,
    "looks": ((205, 1), (5000, 100), (10**9, 1000)), "window": 200, "lag": 200, "early": 5000, "smooth": 11,
    "operators": (*SOURCE_POOL, "identity"),
}  # fmt: skip
_BILLION: dict[str, Any] = {
    **BASE, "text": "c4-wikipedia-github-arxiv", "words": 32_000, "context": 1280, "dim": 2048, "hidden": 5120, "heads": 32,
    "pretraining": 300_000, "rate": 0.01, "final_rate": 0.001, "looks": ((2000, 100), (10**9, 1000)), "window": 2000, "lag": 2000,
    "smooth": 1,
}  # fmt: skip


_LAPTOP = [
    _BERT.but(**{**WIDE, "text": "wikitext2", "words": 2000, "rate": 1e-3, "grown_rate": 5e-4}),
    _UL2.but(**{**WIDE, "rate": 0.01, "final_rate": 0.001, "looks": ((100, 10), (10**9, 50))}),
    _GPT.but(**{**WIDE, "rate": 1e-3, "grown_rate": 5e-4}),
    _STORIES.but(steps=150, tokens=200_000, held_out=64, batch=8, looks=((20, 2), (150, 10)), window=50, lag=50, early=8),
]
_PAPER = [_BERT.but(**BASE), _UL2.but(**_BILLION), *_LAPTOP[2:]]


def _variants(setups: Sequence[Setup], *few: str) -> list[tuple[Setup, str]]:
    """What the source leaves open: the normalisation of BERT, and the optimizer state of a GPT's new layers."""
    bert, _, gpt, _ = setups
    other = bert.but(name="bert, pre-norm", norm_first=True, operators=(*few, "identity"))
    return [(other, "copy"), *((gpt.but(operators=few), state) for state in ("zero_new", "reset"))]


class GrownRuns(Study):
    """Validation losses of grown models along their training: a job for each setup, operator and seed.

    The operators of a seed see the same batches in the same order, and the same held-out rows. "small" is the small model trained
    on, for the floating-point operations of a grown run.
    """

    sizes = sizes(
        tiny={
            "setups": [_BERT, _UL2, _GPT, _STORIES],
            "variants": _variants([_BERT, _UL2, _GPT, _STORIES], "2/2/random", "2/2/copy"),
            "seeds": 1,
        },
        laptop={"setups": _LAPTOP, "variants": _variants(_LAPTOP, "2/2/random", "2/2/copy"), "seeds": 3},
        paper={"setups": _PAPER, "variants": _variants(_PAPER, "2/2/random", "2/2/copy"), "seeds": 1},
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for table in PRINTED:
            yield {"part": "printed", "table": table, "seed": 0}
        for setup, state in [*((setup, "copy") for setup in p.setups), *p.variants]:
            for seed in range(p.seeds):
                for operator in (SMALL, *setup.operators):
                    shared = {"setup": {**asdict(setup), "operators": ()}, "name": setup.name}
                    yield {"part": "run", **shared, "operator": operator, "state": state, "seed": seed}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        if job["part"] == "printed" or _missing(job):
            return []
        return [pretraining_of(Setup.of(job["setup"]))]

    def run(self, job: Mapping[str, Any], *small: Sequence[Row]) -> Iterator[Row]:
        if job["part"] == "printed":
            yield from printed_rows(job["table"])
        elif small:
            yield from run_of(Setup.of(job["setup"]), job, small[0][0])
        else:
            yield {"kind": "missing", "setup": job["name"], "state": job["state"], "provisional": True}


def _missing(job: Mapping[str, Any]) -> bool:
    """Whether stories260k is not there, without which the other setups are shown all the same."""
    if job["name"] != STORIES:
        return False
    try:
        Setup.of(job["setup"]).model()
    except MissingDataError:
        return True
    return False


def run_of(setup: Setup, job: Mapping[str, Any], small: Row) -> Iterator[Row]:
    """The losses of one grown model, or of the small model, at each look; what it can do at the end."""
    sample = setup.sample()
    model, optimizer = pretrained(setup, small)
    added, seed = setup.grown - setup.layers, job["seed"]
    operator = growth_operator("last" if job["operator"] == SMALL else job["operator"], setup.layers, added)
    recipe, _ = prepared(
        model, token_loss, (sample.x, sample.y), optimizer, (sample.x_held_out, sample.y_held_out), [operator], setup.grown,
        setup.steps, seed, schedule=setup.schedule, batch_size=setup.batch, shuffle=True, first=setup.pretraining,
        state=job["state"], body=None, target="labels", clip=None,
    )  # fmt: skip
    arm: Arm = "small" if job["operator"] == SMALL else operator
    runs = Runs(recipe, (arm,))
    shared = {"setup": setup.name, "operator": SMALL if arm == "small" else operator.name, "state": job["state"], "seed": seed}
    looks, flops = setup.looked_at, 0.0
    if arm == "small":
        batch = next(recipe.batches(seed))
        large = step_flops(Runs(recipe, (operator,)).open(0, seed).model, recipe, batch)
        flops = step_flops(recipe.model, recipe, batch)
        looks = [0, round(setup.steps * large / flops)]
        facts = {name: getattr(setup, name) for name in ("layers", "grown", "steps", "window", "lag", "early", "smooth")}
        shares = [float(weight) for weight in recipe.validation.weighting.weights]
        yield {
            "kind": "setup",
            **shared,
            **facts,
            "origin": sample.origin,
            "flops": large,
            "small_flops": flops,
            "shares": shares,
        }
    found = runs({"arm": 0, "seed": seed, "looks": looks, "rests": True})
    weights = np.array(recipe.validation.weighting.weights)
    for row in found:
        yield {"kind": "loss", **shared, "step": row["step"], "loss": float(np.array(row["parts"]) @ weights / weights.sum())}
    end: Row = {"kind": "end", **shared, "parts": [float(part) for part in found[-1]["parts"]], "stream": found[-1]["stream"]}
    if setup.objective == "ul2":
        end |= one_shot(setup, runs.held[0, seed].model)
    yield end


def one_shot(setup: Setup, model: nn.Module) -> dict[str, float]:
    """What stands in for the source's tasks: the last token of a passage, and a passage that was shown once just before.

    Both in percent of the tokens that are right, predicted greedily with the right ones before them.
    """
    text = corpus_of(setup).held_out
    count = min(setup.held_out, len(text) // setup.context)
    passages = text[: count * setup.context].view(count, setup.context)
    half = setup.context // 2
    twice = passages[:, :half].repeat(1, 2)
    with left_as_found(model, "eval"), torch.no_grad():
        last = model(passages[:, :-1])[:, -1].argmax(-1) == passages[:, -1]
        again = model(twice[:, :-1])[:, half:].argmax(-1) == twice[:, half + 1 :]
    return {"last": 100 * float(last.double().mean()), "again": 100 * float(again.double().mean())}


# What is printed in the source

ORACLE, AT_START, LAST, TOP = "oracle", "LAG@0", "last block on top", "random block on top"
#: Table -> strategy -> final validation loss, regret, relative regret.
PRINTED_LOSSES = {
    "5.1": {
        ORACLE: (1.7461, 0.0, 0.0),
        "LAG@200": (1.7461, 0.0, 0.0),
        AT_START: (1.7875, 0.0414, 0.7986),
        LAST: (1.7747, 0.0286, 0.5517),
        TOP: (1.7875, 0.0414, 0.7986),
    },
    "5.2": {
        ORACLE: (2.1254, 0.0, 0.0),
        "LAG@2000": (2.1268, 0.0014, 0.0895),
        AT_START: (2.1398, 0.0144, 0.9202),
        LAST: (2.1357, 0.0103, 0.6582),
        TOP: (2.1398, 0.0144, 0.9202),
    },
}
#: Strategy -> TyDi QA, Trivia QA, LAMBADA, in percent.
PRINTED_TASKS = {
    ORACLE: (28.18, 13.84, 8.32),
    "LAG@2000": (25.23, 13.44, 7.60),
    AT_START: (21.82, 12.19, 6.89),
    LAST: (21.59, 12.39, 6.90),
    TOP: (21.82, 12.19, 6.89),
}
PRINTED = (*PRINTED_LOSSES, "C.1")
#: Steps of each trial of the source.
LAGS = {"5.1": 200, "5.2": 2000}


def printed_rows(table: str) -> Iterator[Row]:
    """The rows of a table, with regrets computed from its losses; the largest loss follows from LAG@0's relative regret."""
    if table == "C.1":
        for strategy, tasks in PRINTED_TASKS.items():
            yield {"kind": "printed", "table": table, "strategy": strategy, **dict(zip(TASKS, tasks, strict=True))}
        return
    losses = PRINTED_LOSSES[table]
    least, (first, _, share) = losses[ORACLE][0], losses[AT_START]
    largest = least + (first - least) / share
    for strategy, (loss, regret, relative) in losses.items():
        yield {
            **{"kind": "printed", "table": table, "strategy": strategy, "loss": loss, "largest": largest},
            **{"printed_regret": regret, "regret": loss - least, "printed_relative": relative},
            **{"relative": relative_regret_of(loss, least, largest), "trial_steps": trial_steps(len(SOURCE_POOL), LAGS[table])},
        }


TASKS = ("TyDi QA", "Trivia QA", "LAMBADA")


# What is read off the rows


@dataclass(frozen=True)
class GrownSetup:
    """All runs of one setup and one way to treat the optimizer state."""

    rows: list[Row]

    @cached_property
    def facts(self) -> Row:
        return next(row for row in self.rows if row["kind"] == "setup")

    @cached_property
    def table(self) -> dict[str, dict[int, dict[int, float]]]:
        """Operator -> seed -> step -> loss."""
        found: dict[str, dict[int, dict[int, float]]] = {}
        for row in self.rows:
            if row["kind"] == "loss":
                found.setdefault(row["operator"], {}).setdefault(int(row["seed"]), {})[int(row["step"])] = float(row["loss"])
        return found

    @property
    def names(self) -> list[str]:
        return [name for name in self.table if name != SMALL]

    def operator(self, name: str) -> GrowthOperator:
        """An operator of this depth by its name."""
        layers, grown = int(self.facts["layers"]), int(self.facts["grown"])
        return growth_operator(name, layers, grown - layers)

    def first(self, *inits: str) -> dict[str, float]:
        """Losses right after growing, the mean over seeds, of operators of these kinds."""
        chosen = {name: self.operator(name).init for name in self.names}
        return {name: float(np.mean([self.loss(name, 0)])) for name, init in chosen.items() if init in inits}

    def loss(self, name: str, step: int | None = None) -> Array:
        """(seeds,), by default at the last step."""
        return np.array([curve[max(curve) if step is None else step] for _, curve in sorted(self.table[name].items())])

    def study(self, *inits: str) -> GrowthStudy:
        """The runs as a `GrowthStudy`, of operators of some kinds alone: by default those of the source."""
        wanted = inits or ("random", "copy")
        chosen = sorted((self.operator(name) for name in self.names), key=lambda one: one.key)
        chosen = [one for one in chosen if one.init in wanted]
        curves = [self.table[one.name] for one in chosen]
        seeds = sorted(curves[0])
        steps = sorted(curves[0][seeds[0]])
        losses = torch.tensor([[[c[seed][step] for step in steps] for c in curves] for seed in seeds], dtype=torch.float64)
        best = int(losses[:, :, -1].mean(0).argmin())
        errors = [self.error(one.name, chosen[best].name) if i != best else 0.0 for i, one in enumerate(chosen)]
        return GrowthStudy(
            operators=tuple(chosen),
            steps=tuple(steps),
            losses=losses.nan_to_num(math.inf) if math.isfinite(float(losses.min())) else losses,
            seeds=tuple(seeds),
            sampling_error=torch.tensor(errors, dtype=torch.float64),
            step_flops=float(self.facts["flops"]),
            small_step_flops=float(self.facts["small_flops"]),
            baselines=(),
        )

    def error(self, name: str, other: str) -> float:
        """The paired error of two final losses, from the parts of the held-out rows."""
        ends = {row["operator"]: row["parts"] for row in self.rows if row["kind"] == "end"}  # of the last seed
        return paired_error(np.subtract(ends[name], ends[other]).tolist(), self.facts["shares"])

    def named(self, name: str) -> str:
        """`last` or `random-top` as an operator of this setup."""
        layers, grown = int(self.facts["layers"]), int(self.facts["grown"])
        return growth_operator(name, layers, grown - layers).name

    def strategies(self) -> list[Row]:
        """The table of the source from these runs: loss, regret and relative regret by strategy."""
        study, lag = self.study(), int(self.facts["lag"])
        chosen = {
            ORACLE: study.best.name,
            f"LAG@{lag}": study.chosen(lag).name,
            AT_START: study.chosen(0).name,
            LAST: self.named("last"),
            TOP: self.named("random-top"),
        }
        finals = dict(zip(study.names, study.final, strict=True))
        least, largest = float(study.final.min()), float(study.final[np.isfinite(study.final)].max())
        return [
            {
                **{"strategy": strategy, "operator": name, "loss": float(finals[name]), "regret": float(finals[name]) - least},
                "relative": relative_regret_of(float(finals[name]), least, max(largest, float(finals[name]))),
            }
            for strategy, name in chosen.items()
        ]


runs = rows(kind=["setup", "loss", "end"])
#: A function of the runs of a setup.
Reading = Callable[[GrownSetup], Any]


def of(setup: str, reading: Reading, state: str = "copy") -> Value:
    """What a function reads off the runs of a setup; NaN where a size does not have it, or the ranks are noise."""

    def measure(found: list[Row]) -> Any:
        value = reading(GrownSetup(found))
        return math.nan if value is None else value

    return runs(setup=setup, state=state).measure(measure)


def where_ranked(reading: Callable[[GrowthStudy, Row], Any]) -> Reading:
    """A rank statistic: nothing where the spread of the final losses is below three times the noise."""

    def measure(found: GrownSetup) -> Any:
        study = found.study()
        return reading(study, found.facts) if study.ranks_mean_something else None

    return measure


def spread_over_noise(found: GrownSetup) -> float:
    """The spread of the final losses over what they differ by without reason."""
    study = found.study()
    return study.spread / study.noise if study.noise > 0 else math.nan


def least_first(found: GrownSetup) -> float:
    """The least initial loss of random and identity operators, minus that of copies: not above zero."""
    return float(np.min([*found.first("random", "identity").values()]) - np.min([*found.first("copy", "scaled").values()]))


def identity_gap(found: GrownSetup) -> float:
    """The largest distance of an identity operator's initial loss from the loss of the small model."""
    names = [name for name in found.names if found.operator(name).init == "identity"]
    return float(np.max([np.abs(found.loss(name, 0) - found.loss(SMALL, 0)) for name in names]))


def rise(found: GrownSetup) -> float:
    """The least initial loss of all operators above the loss of the small model."""
    return float(np.min([*found.first("random", "copy", "identity").values()]) - found.loss(SMALL, 0).mean())


def correlation(kind: str, when: str | int = 0) -> Reading:
    """Of the losses at a step with the final ones, over the operators of the source; `when` is a step or the name of one."""

    def read(study: GrowthStudy, facts: Row) -> float:
        step = when if isinstance(when, int) else int(facts[when])
        column = study.curves[:, int(np.argmin([abs(s - step) for s in study.steps]))]
        return (spearman if kind == "spearman" else pearson)(column, study.final)

    return where_ranked(read)


def gain_of_lag(found: GrownSetup) -> Measured | None:
    """Regret of LAG@0 minus that of LAG@q: at least zero if the trial helps; the error is that of the two final losses."""
    study, lag = found.study(), int(found.facts["lag"])
    if not study.ranks_mean_something:
        return None
    first, later = study.chosen(0).name, study.chosen(lag).name
    error = found.error(first, later) if first != later else 0.0
    return Measured(float(np.mean(found.loss(first) - found.loss(later))), error)


def windowed(found: GrownSetup) -> tuple[GrowthStudy, int, int]:
    """The study, its smoothing, and how many looks the early window has."""
    study = found.study()
    return study, int(found.facts["smooth"]), sum(step <= int(found.facts["window"]) for step in study.steps)
