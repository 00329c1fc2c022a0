"""Figure 5.1, synthetic loss curves, and what holds of operators and statistics exactly: no training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from theodolite.experiments.claims import at_least, at_most, equal
from theodolite.experiments.figure import Figure
from theodolite.experiments.growing import karp
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, matrix, scatter, split
from theodolite.experiments.query import Value, rows
from theodolite.experiments.study import InParts, sizes
from theodolite.measures.growth import GrowthOperator, bert_large_stages, grow, growth_operators
from theodolite.measures.growth.diagnostics import heat_map, recall, regret, relative_regret, transition
from theodolite.models import bert, gpt
from theodolite.problem.state_guard import left_as_found
from theodolite.results import Row

# Figure 5.1: which layers go where

#: Block size and init -> the layers of the source's picture, counted from 1; new ones are (layer, True), 0 is random.
PICTURED: dict[tuple[int, str], list[tuple[int, bool]]] = {
    (1, "copy"): [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True), (5, False), (6, False)],
    (3, "copy"): [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True), (4, True), (5, False), (6, False)],
    (1, "random"): [(1, False), (2, False), (0, True), (3, False), (0, True), (4, False), (0, True), (5, False), (6, False)],
    (3, "random"): [(1, False), (2, False), (3, False), (4, False), (0, True), (0, True), (0, True), (5, False), (6, False)],
}


def pictures(job: Mapping[str, Any]) -> Iterator[Row]:
    """Each layer of the four examples, as it is and as it is pictured; then how many operators there are."""
    for (block, init), wanted in PICTURED.items():
        operator = GrowthOperator(1, block, init, layers=6, added=3)
        for place, (origin, (layer, is_new)) in enumerate(zip(operator.layer_map(), wanted, strict=True)):
            source = 0 if origin.source is None else origin.source + 1
            shared = {"kind": "layer", "block": block, "init": init, "picture": operator.picture(first=1), "place": place + 1}
            yield {**shared, "source": source, "new": int(origin.is_new), "pictured": layer, "pictured_new": int(is_new)}
    depths = [stage.layers for stage in bert_large_stages()]
    stages = [len(stage.operators(depth)) for depth, stage in zip(depths, bert_large_stages()[1:], strict=False)]
    yield {
        **{"kind": "count", "whole": len(growth_operators(6, 3))},
        **{"source": len(growth_operators(12, 4, starts=range(0, 9, 2), blocks=(1, 2, 4)))},
        **{f"stage_{i + 2}": found for i, found in enumerate(stages)},
    }


class Operators(InParts):
    """The four examples of the source, layer by layer, and the sizes of its pools."""

    parts = {"pictures": pictures}
    sizes = sizes(tiny={}, laptop={}, paper={})

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield {"part": "pictures", "seed": 0}


layers, counts = rows(kind="layer"), rows(kind="count")


class Figure51(Figure):
    """Growth operators from six layers to nine: copies or random layers, one by one or as a block.

    Three layers from the second on are followed by new ones: each by one, or all three by three. Numbers are those of the layers
    that are copied, counted from 1.
    """

    study, item = Operators(), "karp-2024 Figure 5.1"
    claims = {
        "each layer of the four examples is the pictured one (largest distance of the numbers)": at_most(
            0, abs(layers["source"] - layers["pictured"]).max(), says="equal"
        ),
        "each is new where the picture has it new (largest distance of 0 and 1)": at_most(
            0, abs(layers["new"] - layers["pictured_new"]).max(), says="equal"
        ),
        "operators from 12 layers to 16 with the source's starts and blocks": equal(
            30, counts.max("source"), **karp(30, "Section 5.3.1")
        ),
        "operators from 6 layers to 9, all of them": equal(16, counts.max("whole")),
        **{
            f"operators of stage {stage} of BERT-Large": equal(
                wanted, counts.max(f"stage_{stage}"), **karp(wanted, "Appendix C.1.3")
            )
            for stage, wanted in ((2, 3), (3, 15), (4, 27), (5, 21), (6, 27))
        },
    }

    def draw(self, rows: list[Row]) -> Any:
        groups = split(layers.of(rows), "block", "init")
        names = [f"{init}, {'one by one' if block == 1 else 'as a block'}" for block, init in groups]

        def words(ax: Any) -> None:
            """Numbers of the layers, new ones in brackets."""
            ax.images[0].colorbar.remove()
            for line, group in enumerate(groups.values()):
                for place, row in enumerate(group):
                    text = "R" if row["source"] == 0 else str(row["source"])
                    ax.text(place, line, f"[{text}]" if row["new"] else text, ha="center", va="center", fontsize=11)

        shade = [[1.5 if row["new"] else 2.0 for row in group] for group in groups.values()]
        places = [str(row["place"]) for row in next(iter(groups.values()))]
        look: dict[str, Any] = {"annotate": False, "limits": (0.0, 2.0), "xlabel": "layer of the grown model", "ylabel": ""}
        return draw_panels(matrix(shade, row_names=names, column_names=places, **look).then(words), size=(6.4, 2.6))


# S-DIAG: synthetic curves with known answers


def synthetic(job: Mapping[str, Any]) -> Iterator[Row]:
    """`ℓ_t = u + A e^(−t/τ) + noise` with `A = −c u`: the ranks are those of −u before `t = τ log c`, and those of u after it."""
    generator = np.random.default_rng(job["seed"])
    tau, factor, every = job["tau"], job["factor"], job["every"]
    u = np.sort(generator.uniform(0.0, 1.0, job["operators"]))
    steps = np.arange(0.0, 6 * tau, every)
    noise = job["noise"] * generator.standard_normal((len(u), len(steps)))
    losses = 3.0 + u[:, None] * (1 - factor * np.exp(-steps / tau)) + noise
    turned = tau * math.log(factor)
    late = steps > turned
    clear = np.abs(steps - turned) > 1.5 * every  # at the turn itself all losses are equal
    sign = np.where(late, 1.0, -1.0)
    heat = heat_map(losses)[np.ix_(clear, clear)]
    found = transition(steps.tolist(), losses)
    shared = {name: job[name] for name in ("tau", "factor", "noise", "every")}
    yield {
        **{"kind": "curves", **shared, "wanted": turned, "found": math.nan if found is None else found},
        **{"heat": float(np.abs(heat - np.outer(sign, sign)[np.ix_(clear, clear)]).max())},
        **{"recall": float(np.abs(recall(losses) - late)[clear].max())},
        **{"relative": float(np.abs(relative_regret(losses, 3.0 + u) - ~late)[clear].max())},
        **{"regret": float(np.abs(regret(losses, 3.0 + u) - ~late * (u[-1] - u[0]))[clear].max())},
    }
    if job["shown"]:
        for name, curve in enumerate(losses):
            for step, loss in zip(steps.tolist(), curve.tolist(), strict=True):
                yield {"kind": "curve", **shared, "candidate": name, "step": step, "loss": loss}


def tables(job: Mapping[str, Any]) -> Iterator[Row]:
    """I1 to I3 on random tables of losses, some with ties and runs that diverged."""
    generator = np.random.default_rng(job["seed"])
    for _ in range(job["tables"]):
        candidates, steps = generator.integers(2, 12), generator.integers(2, 20)
        losses = np.round(generator.standard_normal((candidates, steps)), int(generator.integers(0, 3)))
        if candidates > 2 and generator.random() < 0.2:
            losses[0, -1] = math.inf
        heat, share, final = heat_map(losses), relative_regret(losses), losses[:, -1]
        finite = final[np.isfinite(final)]
        chosen = final[np.argmin(losses, axis=0)]
        recalls = np.array([recall(losses, r) for r in range(1, int(candidates) + 1)])
        distinct = finite.max() > finite.min()
        yield {
            **{"kind": "table", "low": float(share.min()), "high": float(share.max())},
            **{"zero": int(((share == 0) != (chosen == finite.min())).sum()) if distinct else 0},
            **{"one": int(((share == 1) != (chosen >= finite.max())).sum()) if distinct else 0},
            **{"falls": float(np.maximum(-np.diff(recalls, axis=0), 0.0).max()), "all": float(recalls[-1].min())},
            **{
                "asymmetry": float(np.nan_to_num(np.abs(heat - heat.T)).max()),
                "diagonal": float(np.abs(np.diag(heat) - 1).max()),
            },
        }


# I4: what leaves the function as it is


def preserved(job: Mapping[str, Any]) -> Iterator[Row]:
    """The largest change of a logit by each operator: random blocks with zeroed projections, and copies.

    Gains of norms are drawn around one, as after training: a norm with gain one is nearly its own square.
    """
    for norm_first in (True, False):
        model = _network(norm_first, job["seed"])
        ids = torch.randint(job["words"], (4, 16), generator=torch.Generator().manual_seed(job["seed"]))
        with left_as_found(model, "eval"), torch.no_grad():
            before = model(ids)
        for operator in growth_operators(job["layers"], job["added"]):
            grown = grow(model, operator, seed=job["seed"]).model
            assert grown is not None
            if operator.init == "random":
                _silence(grown, operator)
            with left_as_found(grown, "eval"), torch.no_grad():
                change = float((grown(ids) - before).abs().max())
            kind = "zeroed" if operator.init == "random" else "copy"
            yield {"kind": "change", "norm": "pre-norm" if norm_first else "post-norm", "new": kind, "operator": operator.name,
                   "change": change, "size": float(before.abs().max())}  # fmt: skip


def _network(norm_first: bool, seed: int) -> nn.Module:
    model: nn.Module = gpt(24, 16, 32, 4, 4, seed=seed) if norm_first else bert(24, 16, 32, 4, 4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.mul_(1 + 0.1 * torch.randn(module.weight.shape, generator=generator))
            elif isinstance(module, nn.Linear):
                module.weight.mul_(4.0)  # so that blocks do something
    return model


def _silence(grown: nn.Module, operator: GrowthOperator) -> None:
    """Zero what new blocks write into the residual stream with."""
    with torch.no_grad():
        for block, origin in zip(grown.layers, operator.layer_map(), strict=True):  # type: ignore[arg-type]
            if origin.is_new:
                for part in (block.attention.out, block.mlp.down):
                    part.weight.zero_()
                    part.bias.zero_()


class Synthetic(InParts):
    """Curves with known transitions, random tables, and operators on small models."""

    parts = {"curves": synthetic, "tables": tables, "preserved": preserved}
    sizes = sizes(
        {"tables": (100, 2000, 2000), "cases": (2, 40, 40)},
        taus=(20.0, 50.0),
        factors=(2.0, 5.0),
        noises=(0.0, 2e-4, 2e-3),
        layers=4,
        added=2,
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for seed in range(p.cases):
            for tau in p.taus:
                for factor in p.factors:
                    for noise in p.noises:
                        shared = {"part": "curves", "tau": tau, "factor": factor, "noise": noise, "every": tau / 10, "seed": seed}
                        yield {**shared, "operators": 12, "shown": seed == 0 and tau == p.taus[0] and factor == p.factors[-1]}
        yield {"part": "tables", "tables": p.tables, "seed": 0}
        yield {"part": "preserved", "layers": p.layers, "added": p.added, "words": 24, "seed": 0}


made, table, change = rows(kind="curves"), rows(kind="table"), rows(kind="change")
exact = made(noise=0.0)


def late(**where: Any) -> Value:
    """The largest distance of the transition that is found from the true one, in looks."""
    these = made(**where)
    return (abs(these["found"] - these["wanted"]) / these["every"]).max()


class Diagnostics(Figure):
    """Synthetic curves whose ranks turn at a known step: what the diagnostics find (S-DIAG).

    Each curve falls from its own height to its own level; those that begin low end high. All curves cross at `τ log c`.
    """

    study, id, where = Synthetic(), "growing/diagnostics", "Karp 2024, Section 5.3.3: how its plots are made"
    only = {"part": "curves"}
    claims = {
        "the transition is found within a look of the true one (largest distance, in looks)": at_most(
            1.0, late(noise=[0.0, 2e-4]), **karp("found by eye", "Section 5.3.3")
        ),
        "within two where the noise is 0.002 of the spread (largest distance, in looks)": at_most(2.0, late(noise=2e-3)),
        "rank correlations of looks, clear of the turn: distance from 1 on one side, −1 across (no noise)": at_most(
            1e-9, exact.max("heat")
        ),
        "recall@1 is 0 before and 1 after (largest distance, no noise)": at_most(0.0, exact.max("recall")),
        "the relative regret is 1 before and 0 after (largest distance, no noise)": at_most(1e-9, exact.max("relative")),
        "the regret is the spread before and 0 after (largest distance, no noise)": at_most(1e-9, exact.max("regret")),
        "with noise of 0.002 of the spread: rank correlations, largest distance": at_most(0.3, made(noise=2e-3).max("heat")),
    }

    def draw(self, rows: list[Row]) -> Any:
        shown = [row for row in rows if row["kind"] == "curve" and row["noise"] == 2e-3]
        turned = next(row["wanted"] for row in rows if row["kind"] == "curves" and row["tau"] == shown[0]["tau"]
                      and row["factor"] == shown[0]["factor"])  # fmt: skip
        points = [{"true": row["wanted"], "found": row["found"]} for row in made.of(rows)]
        return draw_panels(
            curves(shown, "step", "loss", by="candidate", labels="none", markers=False).line(x=turned, label="τ log c"),
            scatter(points, "true", "found", identity=True, xlabel="true transition", ylabel="transition found"),
            size=(4.4, 3.4),
        )


class Identities(Figure):
    """I1 to I4: what holds of regret, recall and heat maps always, and which blocks leave a model as it is.

    Zero projections into the residual stream make a block of a pre-norm network the identity. A post-norm network normalises
    behind its sums, so that a block which adds nothing still changes it.
    """

    study, id, where = Synthetic(), "growing/identities", "Karp 2024, Sections 5.2 and 5.3.3"
    only = staticmethod(lambda job: job["part"] != "curves")
    claims = {
        "I1: relative regret is at least 0 (least)": at_least(0.0, table.min("low")),
        "I1: relative regret is at most 1 (largest)": at_most(1.0, table.max("high")),
        "I1: it is 0 just where the best is chosen (looks where not)": equal(0, table["zero"].sum()),
        "I1: it is 1 just where the worst is chosen (looks where not)": equal(0, table["one"].sum()),
        "I2: recall@r falls with r nowhere (largest fall)": at_most(0.0, table.max("falls")),
        "I2: recall of all operators is 1 (least)": at_least(1.0, table.min("all")),
        "I3: heat maps are symmetric (largest distance)": at_most(0.0, table.max("asymmetry")),
        "I3: their diagonal is 1 (largest distance)": at_most(1e-12, table.max("diagonal")),
        "I4: pre-norm, zeroed random blocks change no logit (largest change, all starts and blocks)": at_most(
            1e-5, change(norm="pre-norm", new="zeroed").max("change")
        ),
        "I4: pre-norm, copies do (least of the largest changes)": at_least(
            1e-2, change(norm="pre-norm", new="copy").min("change")
        ),
        "I4: post-norm, zeroed random blocks change logits (least of the largest changes)": at_least(
            1e-4, change(norm="post-norm", new="zeroed").min("change")
        ),
        "I4: post-norm, they change less than copies (ratio of the means)": at_most(
            0.9, change(norm="post-norm", new="zeroed").mean("change") / change(norm="post-norm", new="copy").mean("change")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        panels = [
            Panel(
                "bars", [{**row, "change": max(row["change"], 1e-8)} for row in group], "operator", "change", log=True,
                title=norm, xlabel="largest change of a logit, at least 1e-8",
            )
            for norm, group in split(change.of(rows), "norm").items()
        ]  # fmt: skip
        return draw_panels(*panels, size=(4.4, 3.4))
