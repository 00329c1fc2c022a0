"""Figures 5.2 to 5.4, Tables 5.1, 5.2, C.1: what the loss says right after growing, and what after a short training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from theodolite.experiments.claims import Claim, at_least, at_most, between, cited, equal, measured, within
from theodolite.experiments.figure import Figure
from theodolite.experiments.growing import karp
from theodolite.experiments.growing.runs import (
    AT_START,
    LAGS,
    LAST,
    ORACLE,
    SMALL,
    TASKS,
    TOP,
    GrownRuns,
    GrownSetup,
    Reading,
    correlation,
    gain_of_lag,
    identity_gap,
    least_first,
    of,
    rise,
    runs,
    spread_over_noise,
    where_ranked,
    windowed,
)
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, matrix, scatter
from theodolite.experiments.query import Measured, Value, rows, split
from theodolite.measures.growth import GrowthStudy
from theodolite.measures.growth.diagnostics import SPREADS
from theodolite.results import Row

printed = rows(kind="printed")
NOT_TOLD = (
    "Text, vocabulary and size are ours below the size of the paper: characters of tiny Shakespeare or the 2000 most frequent "
    "words of WikiText-2, a generated text where these are not there and at the tiny size. Masks and objectives are drawn once "
    "for each row. At the size of the paper words stand for word pieces, and the text has to be brought."
)


def chosen(*setups: str, tables: Sequence[str] = (), variants: bool = False) -> Any:
    """The jobs of these setups, and of these tables of the source."""

    def wanted(job: Mapping[str, Any]) -> bool:
        if job["part"] == "printed":
            return job["table"] in tables
        return job["name"] in setups and (variants or job["state"] == "copy")

    return staticmethod(wanted)


def gates(setup: str, *, pre_norm: bool) -> dict[str, Claim]:
    """What holds at every size."""
    found = {
        "the least initial loss is that of a random or identity operator (its distance from the best copy's)": at_most(
            0.0, of(setup, least_first), says="random on top", where="Karp 2024, Table 5.1"
        ),
        "the spread of the final losses, over their noise": measured(of(setup, spread_over_noise)),
        "rank statistics given although the spread is below three times the noise": equal(0, of(setup, given_of_noise)),
    }
    if pre_norm:
        found["the identity operator's initial loss is that of the small model (largest distance)"] = at_most(
            1e-5, of(setup, identity_gap)
        )
    return found


def given_of_noise(found: GrownSetup) -> int:
    """Rank statistics that a study gives where it must not."""
    study = found.study()
    given = (study.heatmap(), study.final_correlation(), study.recall(), study.relative_regret(), study.transition())
    return sum(one is not None for one in given) if study.spread < SPREADS * study.noise else 0


# Figure 5.2 and 5.3, BERT; 5.4, UL2


def first_and_last(found: GrownSetup, step: int) -> list[Row]:
    """Loss at a step and at the end, by operator."""
    study = found.study("random", "copy", "identity")
    look = int(np.argmin([abs(s - step) for s in study.steps]))
    table = zip(study.operators, study.curves[:, look], study.final, strict=True)
    return [{"new layers": one.init, "then": float(loss), "final": float(last)} for one, loss, last in table]


class Figure52(Figure):
    """BERT: the final loss against that right after growing, and against that after a twentieth of the training.

    Each point is an operator. The source has 30 from 12 layers to 16, one run each. The identity, which is none of them, is shown
    and takes no part in correlations.
    """

    study, item, only = GrownRuns(), "karp-2024 Figure 5.2", chosen("bert")
    claims = [
        cited(
            "",
            {
                "Pearson correlation of the initial and the final loss": within(
                    0.3, None, of("bert", correlation("pearson")), reported=-0.515
                ),
                "Spearman correlation of the initial and the final loss (H1)": at_most(
                    0.3, of("bert", correlation("spearman")), reported=-0.418
                ),
                "Pearson correlation of the loss after a twentieth of the steps and the final one": at_least(
                    0.9, of("bert", correlation("pearson", "early")), reported=0.982
                ),
                "Spearman correlation of the loss after a twentieth of the steps and the final one (H2)": at_least(
                    0.9, of("bert", correlation("spearman", "early")), reported=0.986
                ),
                "the least initial loss, above that of the small model": between(0.0, 0.01, of("bert", rise), reported=0.002),
            },
            since="paper",
        ),
        gates("bert", pre_norm=False),
    ]
    departs = NOT_TOLD

    def draw(self, rows: list[Row]) -> Any:
        found = GrownSetup(runs(setup="bert").found(rows))
        look: dict[str, Any] = {"by": "new layers", "ylabel": "final validation loss"}
        correlated: dict[str, Any] = {"correlation": "spearman"} if found.study().ranks_mean_something else {}
        early = int(found.facts["early"])
        return draw_panels(
            scatter(first_and_last(found, 0), "then", "final", xlabel="loss right after growing", **look, **correlated),
            scatter(first_and_last(found, early), "then", "final", xlabel=f"loss after {early} steps", **look, **correlated),
            size=(4.4, 3.4),
        )


def transition_of(study: GrowthStudy, facts: Row) -> float | None:
    """The step from which on the ranks agree with those at the end of the early window."""
    return study.transition(until=int(facts["window"]), smooth=int(facts["smooth"]))


def agreement_at(place: str) -> Reading:
    """The rank correlation with the final losses at the first or the last look of the early window, smoothed."""

    def read(found: GrownSetup) -> float | None:
        study, smooth, looks = windowed(found)
        h = study.final_correlation(smooth=smooth)
        return None if h is None else float(h[0 if place == "first" else looks - 1])

    return read


def found_late(found: GrownSetup) -> float | None:
    """The first look of the early window from which on the best operator leads, over the window's length; 1 for never."""
    study, smooth, looks = windowed(found)
    recall = study.recall(1, smooth=smooth)
    if recall is None:
        return None
    missed = [look for look in range(looks) if recall[look] < 1]
    first = 0 if not missed else missed[-1] + 1
    return study.steps[first] / study.steps[looks - 1] if first < looks else 1.0


def falling_recall(found: GrownSetup) -> float | None:
    """The largest fall of recall from r to r + 1: none (I2)."""
    study, smooth, _ = windowed(found)
    all_recalls = [study.recall(r, smooth=smooth, anyway=True) for r in range(1, len(study.operators) + 1)]
    return float(np.maximum(-np.diff(np.array(all_recalls), axis=0), 0.0).max())


def regret_at(place: str) -> Reading:
    """The relative regret of choosing at the first look, or after the lag, by smoothed losses."""

    def read(found: GrownSetup) -> float | None:
        study, smooth, _ = windowed(found)
        regret = study.relative_regret(smooth=smooth)
        step = 0 if place == "first" else int(found.facts["lag"])
        return None if regret is None else float(regret[int(np.argmin([abs(s - step) for s in study.steps]))])

    return read


def across(found: GrownSetup) -> float | None:
    """The mean rank correlation between looks before and after the transition of the early window."""
    study, smooth, _ = windowed(found)
    heat = study.heatmap(until=int(found.facts["window"]), smooth=smooth)
    turned = transition_of(study, found.facts)
    if heat is None or not turned:
        return None
    before = sum(step < turned for step in study.steps)
    return float(heat[:before, before:].mean())


def early_panels(setup: str, rows: list[Row], *, recall: bool) -> list[Panel]:
    """Heat map and correlation with the final losses in the early window; the losses alone where ranks are noise."""
    found = GrownSetup(runs(setup=setup).found(rows))
    study, smooth, looks = windowed(found)
    heat = study.heatmap(until=int(found.facts["window"]), smooth=smooth)
    h = study.final_correlation(smooth=smooth)
    if heat is None or h is None:
        losses = [{**row, "loss": float(row["loss"])} for row in study.rows()]
        return [curves(losses, "step", "loss", by="operator", xlabel="steps after growing", title="ranks are noise")]
    steps = study.steps[:looks]
    names = [str(step) for step in steps]
    shown: dict[str, Any] = {"row_names": names, "column_names": names, "limits": (-1.0, 1.0), "annotate": False}
    table = [{"step": step, "correlation": float(value)} for step, value in zip(steps, h, strict=False)]
    axis = {"xlabel": "steps after growing"}
    panels = [
        matrix(heat, **shown, xlabel="step", ylabel="step", title="rank correlation"),
        curves(table, "step", "correlation", ylabel="correlation with the final losses", **axis).set(ylim=(-1.05, 1.05)),
    ]
    if not recall:
        return panels
    columns = {f"recall@{r}": study.recall(r, smooth=smooth) for r in (1, 2, 3)}
    lines = [
        {"step": step, "recall": float(value) + 0.02 * place, "of": name}
        for place, (name, values) in enumerate(columns.items())
        for step, value in zip(steps, values if values is not None else (), strict=False)
    ]
    regret = study.relative_regret(smooth=smooth)
    assert regret is not None
    lost = [{"step": step, "regret": float(value)} for step, value in zip(steps, regret, strict=False)]
    return [
        *panels,
        curves(lines, "step", "recall", by="of", **axis).set(ylim=(-0.05, 1.1)),
        curves(lost, "step", "regret", ylabel="relative regret", **axis).set(ylim=(-0.05, 1.05)),
    ]


class Figure53(Figure):
    """BERT, the first steps after growing: when ranks settle, when the best operator is found, what choosing then costs."""

    study, item, only = GrownRuns(), "karp-2024 Figure 5.3", chosen("bert")
    claims = [
        cited(
            "",
            {
                "the ranks settle (step)": at_most(100.0, of("bert", where_ranked(transition_of)), reported=50),
                "correlation with the final losses right after growing": at_most(
                    -0.2, of("bert", agreement_at("first")), reported=-0.4
                ),
                "correlation with the final losses at the end of the window": at_least(
                    0.7, of("bert", agreement_at("last")), reported=0.8
                ),
                "recall@1 stays 1 from here on (share of the window)": at_most(0.5, of("bert", found_late), reported=0.25),
                "relative regret of choosing right after growing": within(
                    0.3, None, of("bert", regret_at("first")), reported=0.8
                ),
                "relative regret of choosing after the lag": at_most(0.1, of("bert", regret_at("lag")), reported=0.0),
            },
            read_from="plot",
            since="paper",
        ),
        {
            "recall@r falls with r nowhere (largest fall, I2)": at_most(0.0, of("bert", falling_recall)),
            "rank statistics given although the spread is below three times the noise": equal(0, of("bert", given_of_noise)),
        },
    ]
    departs = NOT_TOLD

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(*early_panels("bert", rows, recall=True), columns=2, size=(4.2, 3.2))


class Figure54(Figure):
    """UL2, the first steps after growing: rank correlations of looks, and with the final losses."""

    study, item, only = GrownRuns(), "karp-2024 Figure 5.4", chosen("ul2")
    claims = [
        cited(
            "",
            {
                "the ranks settle (share of the window)": between(
                    0.25, 0.75, of("ul2", lambda found: shared_transition(found)), reported=0.5
                ),
                "correlation with the final losses at the end of the window is above that right after growing by": at_least(
                    0.5, of("ul2", agreement_at("last")) - of("ul2", agreement_at("first")), says="rises"
                ),
            },
            read_from="plot",
            since="paper",
        ),
        gates("ul2", pre_norm=True),
    ]
    departs = NOT_TOLD + " The decoder reads prefixes and corrupted rows causally."

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(*early_panels("ul2", rows, recall=False), size=(4.2, 3.2))


def shared_transition(found: GrownSetup) -> float | None:
    """The step at which ranks settle, over the length of the early window."""
    turned = where_ranked(transition_of)(found)
    return None if turned is None else turned / float(found.facts["window"])


# Tables 5.1 and 5.2


def strategy(setup: str, name: str, column: str) -> Value:
    """A number of our table; "LAG" is LAG@q. Relative regrets only where the spread is three times the noise."""

    def read(found: GrownSetup) -> float | None:
        row = next(
            row
            for row in found.strategies()
            if row["strategy"].startswith(name) and (name != "LAG" or row["strategy"] != AT_START)
        )
        if column == "relative" and not found.study().ranks_mean_something:
            return None
        return float(row[column])

    return of(setup, read)


def same_as_top(found: GrownSetup) -> float | None:
    """The distance of LAG@0's final loss from that of a random block on top."""
    table = {row["strategy"]: row["loss"] for row in found.strategies()}
    return float(table[AT_START] - table[TOP]) if found.study().ranks_mean_something else None


def arithmetic(table: str, steps: int, largest: float) -> dict[str, Claim]:
    """What follows from the losses that are printed, at every size."""
    own = printed(table=table)
    return {
        "printed regrets follow from printed losses (largest distance)": at_most(
            1e-9, abs(own["regret"] - own["printed_regret"]).max(), says="equal"
        ),
        "printed relative regrets follow from the losses and the largest one (largest distance)": at_most(
            5e-4, abs(own["relative"] - own["printed_relative"]).max(), says="equal"
        ),
        "the largest final loss, which is not printed and follows": within(5e-5, largest, own["largest"].mean()),
        "printed: LAG@q's regret over that of LAG@0": at_most(
            0.1, own(strategy=f"LAG@{LAGS[table]}").only("regret") / own(strategy=AT_START).only("regret"), says="much smaller"
        ),
        "steps of the source's trials": equal(steps, own["trial_steps"].max()),
    }


def ours(setup: str) -> tuple[Any, ...]:
    """What is measured on our runs, and wanted of them at the size of the paper."""
    return (
        cited(
            "",
            {
                "relative regret of LAG@q": at_most(0.15, strategy(setup, "LAG", "relative"), says="at most 0.09"),
                "relative regret of LAG@0": at_least(0.5, strategy(setup, AT_START, "relative"), says="0.80 and 0.92"),
                "relative regret of the last block on top": at_least(
                    0.4, strategy(setup, LAST, "relative"), says="0.55 and 0.66"
                ),
                "LAG@0 is a random block on top (distance of the final losses)": within(
                    0.0, 0.0, of(setup, same_as_top), says="equal"
                ),
                "regret of LAG@0 minus that of LAG@q (H4)": at_least(0.0, of(setup, gain_of_lag), says="positive"),
            },
            since="paper",
        ),
        {
            "final loss of the best operator": measured(strategy(setup, ORACLE, "loss")),
            "regret of LAG@0": measured(strategy(setup, AT_START, "regret")),
            "regret of LAG@q": measured(strategy(setup, "LAG", "regret")),
            "the small model trained on, at equal FLOPs: its loss above that of the best operator": measured(
                of(setup, small_gap)
            ),
        },
    )


def small_gap(found: GrownSetup) -> float:
    """The final loss of the small model trained on, minus the best operator's."""
    return float(np.mean(found.loss(SMALL)) - found.study("random", "copy", "identity").final.min())


def table_panels(table: str, setup: str, found_rows: list[Row]) -> Any:
    """Final losses of the strategies: as printed, and as measured."""
    mine = GrownSetup(runs(setup=setup).found(found_rows)).strategies()
    theirs = printed(table=table).of(found_rows)
    return draw_panels(
        *(
            Panel(
                "bars",
                [{**row, "shown": 1000 * row["regret"]} for row in part],
                "strategy",
                "shown",
                xlabel="regret × 1000",
                title=title,
            )
            for part, title in ((theirs, "printed"), (mine, "measured here"))
        ),
        size=(4.4, 2.6),
    )


class Table51(Figure):
    """BERT: what each way to choose an operator costs in the end."""

    study, item, only = GrownRuns(), "karp-2024 Table 5.1", chosen("bert", tables=["5.1"])
    claims = [arithmetic("5.1", 6000, 1.79794), ours("bert"), gates("bert", pre_norm=False)]
    departs = NOT_TOLD

    def draw(self, rows: list[Row]) -> Any:
        return table_panels("5.1", "bert", rows)


class Table52(Figure):
    """UL2: what each way to choose an operator costs in the end.

    The trials of LAG@2000 take 60,000 steps, as much as three fifths of the training that they choose for; the source does not
    count them.
    """

    study, item, only = GrownRuns(), "karp-2024 Table 5.2", chosen("ul2", tables=["5.2"])
    claims = [arithmetic("5.2", 60_000, 2.14105), ours("ul2"), gates("ul2", pre_norm=True)]
    departs = Figure54.departs

    def draw(self, rows: list[Row]) -> Any:
        return table_panels("5.2", "ul2", rows)


# Table C.1


def task_margin(better: str, *others: str) -> Value:
    """How far a strategy is above the best of others in the printed table, the least of the tasks."""
    own = printed(table="C.1")

    def least(found: list[Row]) -> float:
        table = {row["strategy"]: row for row in found}
        return float(np.min([table[better][task] - max(table[name][task] for name in others) for task in TASKS]))

    return own.measure(least)


def task(name: str, column: str) -> Value:
    """What the model of a strategy gets right, the mean over seeds, in percent."""

    def measure(found: list[Row]) -> float:
        table = GrownSetup(found)
        row = next(
            row
            for row in table.strategies()
            if row["strategy"].startswith(name) and (name != "LAG" or row["strategy"] != AT_START)
        )
        return float(np.mean([end[column] for end in table.rows if end["kind"] == "end" and end["operator"] == row["operator"]]))

    return runs(setup="ul2", state="copy").measure(measure)


class TableC1(Figure):
    """UL2 on downstream tasks, shown one example: printed numbers, and two stand-ins that a small model can be asked.

    Stand-ins, in percent of tokens predicted rightly: the last token of a held-out passage (for LAMBADA), and a passage that was
    shown once just before (for answers that stand in the text).
    """

    study, item, only = GrownRuns(), "karp-2024 Table C.1", chosen("ul2", tables=["C.1"])
    claims = [
        {
            "printed: LAG@2000 is above all but the oracle in each task (least margin)": at_least(
                0.3, task_margin("LAG@2000", AT_START, LAST, TOP), says="second to the oracle only"
            ),
            "printed: the oracle is above LAG@2000 in each task (least margin)": at_least(
                0.3, task_margin(ORACLE, "LAG@2000"), says="above"
            ),
        },
        {
            f"{what}: {name if name != 'LAG' else 'LAG@q'}": measured(task(name, column))
            for column, what in (("last", "last token of a passage"), ("again", "a passage shown once"))
            for name in (ORACLE, "LAG", AT_START, LAST, TOP)
        },
    ]
    departs = (
        f"{NOT_TOLD} The source's tasks cannot be asked of models of our size: TyDi QA and Trivia QA need answers in words, "
        "and Trivia QA knowledge of the world. What is measured beside them are stand-ins, so nothing is claimed of them."
    )

    def draw(self, rows: list[Row]) -> Any:
        theirs = [{"strategy": row["strategy"], "task": name, "percent": row[name]} for row in printed.of(rows) for name in TASKS]
        names = [ORACLE, "LAG", AT_START, LAST, TOP]
        mine = [
            {"strategy": name if name != "LAG" else "LAG@q", "percent": task(name, column)(rows), "task": what}
            for column, what in (("last", "last token"), ("again", "shown once"))
            for name in names
        ]
        panels = [
            Panel("bars", part, "strategy", "percent", title=title, xlabel="percent")
            for kind, table in (("printed: ", theirs), ("here: ", mine))
            for title, part in ((kind + name, part) for name, part in split(table, "task").items())
        ]
        return draw_panels(*panels, columns=3, size=(3.6, 2.4))


# The hypotheses, on all setups


def of_all(reading: Reading, combine: Any = np.max) -> Value:
    """A reading of all setups that are there, the largest of it by default."""

    def measure(found: list[Row]) -> float:
        parts = [runs(state="copy").of(part) for part in split(runs(state="copy").found(found), "setup").values()]
        return float(combine([reading(GrownSetup(part)) for part in parts]))

    return Value(measure)


def one_of(setup: str, reading: Reading) -> Value:
    """A reading of a setup that may not be there."""

    def measure(found: list[Row]) -> Any:
        value = reading(GrownSetup(found))
        return math.nan if value is None else value

    return runs(setup=setup, state="copy").if_any(measure)


def _hypotheses(setup: str) -> dict[str, Claim]:
    """H1 to H4 as measured on a setup for which the source claims nothing."""
    return {
        f"{setup}: rank correlation of initial and final loss": measured(one_of(setup, correlation("spearman"))),
        f"{setup}: rank correlation of the loss after the lag and the final one": measured(
            one_of(setup, correlation("spearman", "lag"))
        ),
        f"{setup}: the ranks settle (step)": measured(one_of(setup, where_ranked(transition_of))),
        f"{setup}: regret of LAG@0 minus that of LAG@q": measured(one_of(setup, gain_of_lag)),
        f"{setup}: the spread of the final losses, over their noise": measured(one_of(setup, spread_over_noise)),
    }


class Hypotheses(Figure):
    """H1 to H4: early losses do not predict, a little later they do, and waiting for that costs little.

    Stated for BERT and UL2 at the source's size. Beside them stand a character GPT and stories260k, of which the source claims
    nothing. Short training favours operators that preserve the loss: below the source's size the initial loss may well predict.
    """

    study, id, only = GrownRuns(), "growing/hypotheses", chosen("bert", "ul2", "gpt", "stories")
    where = "Karp 2024, Sections 5.3 and 5.4"
    claims = [
        cited(
            "Karp 2024, Sections 5.3 and 5.4",
            {
                f"{name} {what}": rule
                for setup, name in (("bert", "BERT:"), ("ul2", "UL2:"))
                for what, rule in {
                    "H1, rank correlation of initial and final loss": at_most(
                        0.3, of(setup, correlation("spearman")), says="low"
                    ),
                    "H2, rank correlation after the lag and at the end": at_least(
                        0.7, of(setup, correlation("spearman", "lag")), says="high"
                    ),
                    "H3, mean rank correlation of looks before with looks after the transition": at_most(
                        0.6, of(setup, across), says="low"
                    ),
                    "H4, regret of LAG@0 minus that of LAG@q": at_least(0.0, of(setup, gain_of_lag), says="positive"),
                }.items()
            },
            since="paper",
        ),
        _hypotheses("gpt"),
        _hypotheses("stories"),
        {
            "the least initial loss is that of a random or identity operator (largest distance from the best copy's)": at_most(
                0.0, of_all(least_first)
            ),
            "the least initial loss is not below that of the small model by more than 0.01 (least rise)": at_least(
                -0.01, of_all(rise, np.min), **karp("higher", "Section 5.4.1")
            ),
            "rank statistics given although the spread is below three times the noise": equal(0.0, of_all(given_of_noise)),
        },
    ]
    departs = NOT_TOLD

    def draw(self, rows: list[Row]) -> Any:
        found = {name: GrownSetup(part) for name, part in split(runs(state="copy").found(rows), "setup").items()}
        look: dict[str, Any] = {"by": "new layers", "band": "range", "xlabel": "steps after growing", "ylabel": "validation loss"}
        panels = []
        for name, one in found.items():
            losses = one.study("random", "copy", "identity").rows()
            table = [{**row, "new layers": row["operator"].rpartition("/")[2]} for row in losses]
            panels.append(curves(table, "step", "loss", title=name, **look))
        return draw_panels(*panels, columns=2, size=(4.0, 3.0))


# What the source leaves open


def state_effect(state: str, operator: str = "2/2/copy") -> Value:
    """The final loss with the state of new layers treated so, minus that with copied moments, and its paired error."""

    def measure(found: list[Row]) -> Measured:
        one, other = (GrownSetup(runs(state=which).found(found)) for which in (state, "copy"))
        name = one.named("last") if operator == "2/2/copy" else operator
        gaps = one.loss(name) - other.loss(name)
        spread = float(gaps.std(ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
        return Measured(float(np.mean(gaps)), spread)

    return runs(setup="gpt").measure(measure)


def identity_behind(found: GrownSetup) -> Measured:
    """The final loss of the identity operator minus that of the best operator of the source, with its paired error."""
    name = next(name for name in found.names if found.operator(name).init == "identity")
    best = found.study().best.name
    return Measured(float(np.mean(found.loss(name) - found.loss(best))), found.error(name, best))


def noise_of_a_run(found: GrownSetup) -> float:
    """What the final losses of one operator differ by over seeds; NaN of one seed."""
    study = found.study()
    return study.noise * math.sqrt(len(study.seeds)) if len(study.seeds) > 1 else math.nan


class LeftOpen(Figure):
    """What the source does not state: seeds, the identity operator, the optimizer state of new layers, the place of norms.

    Drawn are final losses above the best, by operator and choice.
    """

    study, id, where = GrownRuns(), "growing/left-open", "Karp 2024, Sections 5.2 and 5.3, appendix C.1: not stated"
    only = chosen("bert", "bert, pre-norm", "gpt", variants=True)
    claims = [
        {
            "pre-norm: the identity operator's initial loss is that of the small model (BERT)": at_most(
                1e-5, of("bert, pre-norm", identity_gap)
            ),
            "pre-norm: the identity operator's initial loss is that of the small model (GPT)": at_most(
                1e-5, of("gpt", identity_gap)
            ),
            "post-norm: a block that adds nothing changes the loss (BERT)": at_least(1e-5, of("bert", identity_gap)),
            "post-norm: the least initial loss above the small model's (BERT)": measured(
                of("bert", rise), **karp(0.002, "Figure 5.2")
            ),
            "pre-norm: the least initial loss above the small model's (BERT)": measured(of("bert, pre-norm", rise)),
            "identity: its final loss above that of the source's best operator (GPT)": measured(of("gpt", identity_behind)),
            "identity: its final loss above that of the source's best operator (BERT)": measured(of("bert", identity_behind)),
            "state of new layers at zero: final loss of the last block on top, minus that with copied moments (GPT)": measured(
                state_effect("zero_new")
            ),
            "no state for any layer: final loss of the last block on top, minus that with copied moments (GPT)": measured(
                state_effect("reset")
            ),
            "the states differ in what they lead to (largest difference of the final losses, GPT)": at_least(
                1e-6, Value(lambda found: max(abs(state_effect(state)(found).value) for state in ("zero_new", "reset")))
            ),
            "seeds: what final losses of one operator differ by (GPT)": measured(of("gpt", noise_of_a_run)),
            "seeds: what final losses of one operator differ by (BERT)": measured(of("bert", noise_of_a_run)),
            "seeds: the spread of the final losses over their noise (GPT)": measured(of("gpt", spread_over_noise)),
        }
    ]
    departs = NOT_TOLD

    def draw(self, rows: list[Row]) -> Any:
        panels = []
        for setup, part in split(runs.found(rows), "setup").items():
            table: list[Row] = [
                {"operator": f"{name}, {state}" if state != "copy" else name, "loss": float(np.mean(one.loss(name)))}
                for state, group in split(part, "state").items()
                for one in [GrownSetup(group)]
                for name in ([SMALL] if state == "copy" else []) + one.names
            ]
            least = min(row["loss"] for row in table)
            behind = [{**row, "behind": row["loss"] - least} for row in table]
            panels.append(Panel("bars", behind, "operator", "behind", title=setup, xlabel="final loss above the least"))
        return draw_panels(*panels, columns=3, size=(3.8, 3.6))
