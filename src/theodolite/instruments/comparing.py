"""`compare`: what several models of one architecture share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from theodolite.measures.hessian import LayerComparison, StructureReport, compare_layers, hessian_structure
from theodolite.problem import Problem
from theodolite.progress import stages
from theodolite.results import Cost, Finding, Outcome, Result, Row, Severity

if TYPE_CHECKING:
    from theodolite.report import Section

_SOURCE = "Wu and others (2020), Dissecting Hessian: overlap of dominant eigenspaces between models."


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Result):
    """Structure reports by model, comparisons of every pair layer by layer, and findings; `to_html` writes the page."""

    models: dict[str, StructureReport]
    pairs: tuple[LayerComparison, ...]
    losses: dict[str, float]
    findings: tuple[Finding, ...]

    def rows(self) -> list[Row]:
        return [row for pair in self.pairs for row in pair.rows()]

    def sentence(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the comparison as one self-contained page."""
        from theodolite.report import Section, SurveyPage, write_survey

        sections = [self._section(layer, place) for place, layer in enumerate(_layers(self.pairs))]
        spectra = Section(
            name="spectra",
            title="Spectra of every layer",
            question="Are the layers of the models equally sharp?",
            rows=[{"model": name, **row} for name, report in self.models.items() for row in report.rows()],
            how="Exact eigenpairs of each layer's block, and its Kronecker factors.",
            source=_SOURCE,
        )
        page = SurveyPage(
            title=" and ".join(self.models),
            findings=self.findings,
            sections=[*sections, spectra],
            facts={f"loss of {name}": f"{loss:.4g}" for name, loss in self.losses.items()},
            provenance={key: str(value) for key, value in asdict(self.provenance).items()} | {"seed": str(self.seed)},
        )
        return write_survey(page, path)

    def _section(self, layer: str, place: int) -> Section:
        from theodolite import plots
        from theodolite.report import Section

        mine = [pair for pair in self.pairs if pair.layer == layer]
        axes = plots.curves(
            [row for pair in mine for row in pair.rows()], x="dimension", y="overlap", by="curve", title=f"Overlap in {layer}"
        )
        if mine[0].outputs <= len(mine[0].overlap):
            plots.reference(axes, x=mine[0].outputs, label="outputs")
        return Section(
            name=f"layer-{place}",
            title=layer,
            question="How much do the sharpest directions of the models share, and is it what their factors predict?",
            findings=[finding for finding in self.findings if finding.quantity.endswith(f" of {layer}")],
            svg=plots.to_svg(axes, prefix=f"overlap-{place}"),
            rows=[_row(pair) for pair in mine],
            how="Overlap ‖UᵀV‖²/k of the top-k eigenvectors; the prediction uses the eigenvectors of the Kronecker factors.",
            source=_SOURCE,
        )


def compare(
    problems: Mapping[str, Problem],
    layers: str | Iterable[str] | None = None,
    *,
    k: int = 60,
    tol: float = 1e-3,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """What models of one architecture share: the overlap of their sharp subspaces layer by layer, beside the predicted one.

    `problems` maps a name to the problem of each model, all on the same data.
    """
    if len(problems) < 2:
        raise ValueError(f"compare needs at least two models. Got {len(problems)}.")
    began = time.perf_counter()
    reports: dict[str, StructureReport] = {}
    with stages(len(problems), progress=progress) as begin:
        for name, problem in problems.items():
            begin(name)
            reports[name] = hessian_structure(problem, layers, k=k, tol=tol, seed=seed, progress=False)
    pairs = tuple(
        compare_layers(reports[a][layer], reports[b][layer], (a, b))
        for a, b in itertools.combinations(problems, 2)
        for layer in reports[a]
        if layer in reports[b]
    )
    return Comparison(
        models=reports,
        pairs=pairs,
        losses={name: problem.loss() for name, problem in problems.items()},
        findings=tuple(
            _finding(layer, [p for p in pairs if p.layer == layer]) for layer in dict.fromkeys(p.layer for p in pairs)
        ),
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began),
    )


def _layers(pairs: Iterable[LayerComparison]) -> list[str]:
    return list(dict.fromkeys(pair.layer for pair in pairs))


def _row(pair: LayerComparison) -> Row:
    return {
        "pair": f"{pair.first} and {pair.second}",
        "overlap": float(pair.overlap[-1]),
        "peak": pair.peak,
        "leading inputs": pair.input_dot,
    }


def _finding(layer: str, pairs: list[LayerComparison]) -> Finding:
    """One sentence for a layer: what is shared at k = number of outputs, against chance and prediction."""
    k = min(pairs[0].outputs, len(pairs[0].overlap))
    shared = sum(float(pair.overlap[k - 1]) for pair in pairs) / len(pairs)
    expected = sum(float(pair.permuted[k - 1]) for pair in pairs) / len(pairs)
    error = max(pair.error for pair in pairs)
    peak = round(sum(pair.peak for pair in pairs) / len(pairs))
    text = (
        f"{layer}: the {k} sharpest directions of the models share {shared:.2g} ± {error:.1g} "
        f"(predicted {expected:.2g} from the inputs "
        f"alone); the overlap peaks at {peak}, the layer has {pairs[0].outputs} outputs."
    )
    fields = {"label": "overlap", "quantity": f"overlap of {layer}", "value": shared, "error": error, "source": _SOURCE}
    return Finding(instrument=f"layer-{layer}", severity=Severity.NOTE, sentence=text, **fields)  # type: ignore[arg-type]
