"""`compare`: what several models of one architecture share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch

from theodolite import plots
from theodolite.analyses.page import Findings, labels, write_analysis
from theodolite.analyses.path import path_finding, path_section
from theodolite.arguments import checked, count, fraction, instance, seed
from theodolite.measures.hessian import LayerComparison, StructureReport, compare_layers, hessian_structure
from theodolite.measures.mode_connectivity import BatchNormPolicy, LinearPath, path_between
from theodolite.problem import Batch, Problem
from theodolite.problem.tensors import named_tensors
from theodolite.progress import Stage, stages
from theodolite.report import Section
from theodolite.results import Cost, Finding, Outcome, Result, Row, number
from theodolite.text import listed

#: Columns of the table of all spectra.
_SPECTRUM = ("sharpness", "residual", "outliers", "decoupling_error", "overlap")
_SOURCE = "Wu and others (2020), Dissecting Hessian: overlap of dominant eigenspaces between models."
_found = Findings(_SOURCE, labels(note="overlap"))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Result):
    """Structure reports by model, comparisons of every pair layer by layer, and findings; `to_html` writes the page.

    `paths[a][b]` is the straight line between the models a and b. `settings` says what was compared and how;
    `without` which layers and paths were not, and why.
    """

    models: dict[str, StructureReport]
    pairs: tuple[LayerComparison, ...]
    losses: dict[str, float]
    findings: tuple[Finding, ...]
    settings: dict[str, str]
    without: dict[str, str]
    paths: dict[str, dict[str, LinearPath]] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        return [row for pair in self.pairs for row in pair.rows()]

    def sentence(self) -> str:
        lines = [str(finding) for finding in self.findings]
        return "\n".join([*lines, *(f"{layer}: not compared, {why}." for layer, why in self.without.items())])

    def to_html(self, path: str | PathLike[str], *, facts: Mapping[str, str] | None = None) -> Path:
        """Write the comparison as one self-contained page; `facts` (where the models come from, say) go into its header."""
        sections = [self._section(layer, place) for place, layer in enumerate(_layers(self.pairs))]
        between = [path_section(path, names, f"path-{i}") for i, (names, path) in enumerate(_flat(self.paths))]
        spectra = Section(
            name="spectra",
            title="Spectra of every layer",
            question="Are the layers of the models equally sharp?",
            rows=[
                {"layer": row["layer"], "model": name, **{key: row[key] for key in _SPECTRUM}}
                for layer in _layers(self.pairs)
                for name, report in self.models.items()
                if layer in report
                for row in [report[layer].summary()]
            ],
            how=(
                "Exact eigenpairs of each layer's block, and the spectral norm of its difference from the Kronecker product of "
                "its factors (decoupling error). Overlap is that of the outliers with the product's eigenvectors; outliers are "
                "the eigenvalues before the widest gap."
            ),
        )
        everything = {
            **(facts or {}),
            **self.settings,
            **{f"loss of {name}": f"{loss:.4g}" for name, loss in self.losses.items()},
            **{f"{layer} not compared": why for layer, why in self.without.items()},
        }
        every = [*between, *sections, spectra]
        return write_analysis(self, path, listed(self.models, 4), "comparison", every, self.findings, everything, _SOURCE)[0]

    def _section(self, layer: str, place: int) -> Section:
        mine = [pair for pair in self.pairs if pair.layer == layer]
        size = self.models[mine[0].first][layer].pairs.vectors.shape[0]
        rows = []
        for pair in mine:
            rows += pair.rows()
            rows += [{"curve": "chance", "dimension": k, "overlap": k / size} for k in range(1, len(pair.overlap) + 1)]
        axes = plots.curves(
            rows,
            x="dimension",
            y="overlap",
            by="curve",
            band="range",  # pairs of the same models are no independent repeats: a standard error would be too small
            xlabel="sharpest directions taken",
            ylabel="overlap of the models",
            labels="direct",
            markers=False,
            title=f"What the sharpest directions of {layer} share",
        )
        if mine[0].outputs <= len(mine[0].overlap):
            plots.reference(axes, x=mine[0].outputs, label=f"{mine[0].outputs} outputs")
        return Section(
            name=f"layer-{layer}",
            title=layer,
            question="How much do the sharpest directions of the models share, and is it what their factors predict?",
            svg=plots.to_svg(axes, prefix=f"overlap-{place}"),
            rows=[_row(pair) for pair in mine],
            how=(
                "Overlap ‖UᵀV‖²/k of the k sharpest directions: 1 for the same subspace, k over the number of weights for two "
                "random ones. The prediction takes the eigenvectors of the Kronecker factors instead of the exact ones; "
                "permuted, it supposes hidden units in no common order. The table is for as many directions as the layer "
                "has outputs; error estimates what the residuals of the eigenvectors leave open there (residual over the gap to "
                "the next eigenvalue, in first order); same input is (v·v')² of the leading eigenvectors of the two input "
                "auto-correlations. The last layer's outputs are not permuted: they have an order."
            ),
        )


@checked(problems=instance(Mapping), k=count, tol=fraction, seed=seed)
def compare(
    problems: Mapping[str, Problem],
    layers: str | Iterable[str] | None = None,
    *,
    k: int = 60,
    tol: float = 1e-3,
    path: bool = True,
    batchnorm: BatchNormPolicy = "interpolate",
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """What models of one architecture share.

    The overlap of their sharp subspaces layer by layer, beside the predicted one, and whether the straight line between each two
    stays in one basin.

    `problems` maps a name to the problem of each model, all on the same data. `path=False` leaves the lines out, `batchnorm`
    is as for `linear_path`.
    """
    if len(problems) < 2:
        raise ValueError(f"compare needs at least two models. Got {len(problems)}.")
    _refuse_other_data(problems)
    began = time.perf_counter()
    reports: dict[str, StructureReport] = {}
    couples = list(itertools.combinations(problems, 2))
    with stages(len(problems) + path * len(couples), progress=progress) as begin:
        for name, problem in problems.items():
            begin(name)
            # One direction more than compared: the error of k directions depends on the gap behind them.
            reports[name] = hessian_structure(problem, layers, k=k + 1, tol=tol, seed=seed, progress=False)
        paths, pathless = _paths(problems, couples if path else [], batchnorm, begin)
    pairs = tuple(
        compare_layers(reports[a][layer], reports[b][layer], (a, b), k=k)
        for a, b in couples
        for layer in reports[a]
        if layer in reports[b]
    )
    if not pairs:
        raise ValueError(
            "The models have no layer in common to compare: "
            + "; ".join(f"{name} has {', '.join(report)}" for name, report in reports.items())
            + "."
        )
    problem, shared = next(iter(problems.values())), _layers(pairs)
    without = {layer: why for report in reports.values() for layer, why in report.without.items()}
    without |= {layer: f"not in every model ({name} has it)" for name, r in reports.items() for layer in r if layer not in shared}
    sizes = {layer: report[layer].pairs.vectors.shape[0] for report in reports.values() for layer in report}
    layered = [_finding([pair for pair in pairs if pair.layer == layer], sizes[layer]) for layer in shared]
    between = [path_finding(found, names, f"path-{i}") for i, (names, found) in enumerate(_flat(paths))]
    return Comparison(
        settings={
            "model": f"{type(problem.model).__name__}, {problem.size} parameters",
            "samples": str(problem.samples),
            "directions per layer": str(k),
            "tolerance": f"{tol:g}",
        },
        without=without | pathless,
        models=reports,
        pairs=pairs,
        paths=paths,
        losses={name: problem.loss() for name, problem in problems.items()},
        findings=(*layered, *between),
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began),
    )


def _paths(
    problems: Mapping[str, Problem], couples: list[tuple[str, str]], batchnorm: BatchNormPolicy, begin: Stage
) -> tuple[dict[str, dict[str, LinearPath]], dict[str, str]]:
    """The line between each two models, and why there is none between some."""
    paths: dict[str, dict[str, LinearPath]] = {}
    without: dict[str, str] = {}
    for a, b in couples:
        begin(f"path from {a} to {b}")
        try:
            found = path_between(problems[a], problems[a].model, problems[b].model, batchnorm=batchnorm, progress=False)
            paths.setdefault(a, {})[b] = found
        except ValueError as error:  # another architecture: the layers they share can still be compared
            without[f"path from {a} to {b}"] = str(error).rstrip(".")
    return paths, without


def _refuse_other_data(problems: Mapping[str, Problem]) -> None:
    """Raise where two problems are not on the same samples: their curvature would differ for that reason alone."""
    (first, one), *others = problems.items()
    for name, other in others:
        if len(one.data) != len(other.data) or not all(map(_same_batch, one.data, other.data)):
            raise ValueError(f"compare needs models on the same data. That of {name} differs from that of {first}.")


def _same_batch(a: Batch, b: Batch) -> bool:
    mine, theirs = (dict(named_tensors({**batch.inputs, "target": batch.target})) for batch in (a, b))
    return mine.keys() == theirs.keys() and all(
        t.shape == theirs[key].shape and torch.equal(t, theirs[key].to(t)) for key, t in mine.items()
    )


def _layers(pairs: Iterable[LayerComparison]) -> list[str]:
    return list(dict.fromkeys(pair.layer for pair in pairs))


def _flat(paths: Mapping[str, Mapping[str, LinearPath]]) -> list[tuple[tuple[str, str], LinearPath]]:
    return [((a, b), path) for a, others in paths.items() for b, path in others.items()]


def _taken(pair: LayerComparison) -> int:
    """How many directions numbers are given for: as many as the layer has outputs, if so many were measured."""
    return min(pair.outputs, len(pair.overlap))


def _row(pair: LayerComparison) -> Row:
    k = _taken(pair)
    return {
        "pair": f"{pair.first} and {pair.second}",
        "k": k,
        "overlap": float(pair.overlap[k - 1]),
        "error": float(pair.errors[k - 1]),
        "predicted": float(pair.predicted[k - 1]),
        "permuted": None if pair.last else float(pair.permuted[k - 1]),
        "largest at": pair.peak,
        "same input": pair.input_dot,
    }


def _finding(pairs: list[LayerComparison], size: int) -> Finding:
    """One sentence for a layer: what is shared at k = number of outputs, against prediction and chance; means over pairs."""
    layer, k = pairs[0].layer, _taken(pairs[0])
    curve = torch.stack([pair.overlap for pair in pairs]).mean(0)
    shared, error = float(curve[k - 1]), max(float(pair.errors[k - 1]) for pair in pairs)
    each = [float(pair.overlap[k - 1]) for pair in pairs]
    several = f" ({min(each):.2g} to {max(each):.2g} in {len(pairs)} pairs)" if len(pairs) > 1 else ""
    expected = sum(float(pair.predicted[k - 1]) for pair in pairs) / len(pairs)
    peak = int(curve.argmax()) + 1
    place = f"still rises at {peak}, the last measured" if peak == len(curve) else f"is largest at {peak}"
    text = (
        f"{layer}: the {k} sharpest directions of the models share {number(shared, error)}{several}; their factors predict "
        f"{expected:.2g}, chance is {k / size:.2g}. The overlap {place}; the layer has {pairs[0].outputs} outputs."
    )
    return _found(f"layer-{layer}", "overlap", text, quantity=f"overlap of {layer}", value=shared, error=error)
