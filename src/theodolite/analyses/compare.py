"""`compare`: which of several models is better at what, and what they share."""

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
from theodolite.analyses.scores import Measured, contests, measured, score_rows, verdict
from theodolite.arguments import checked, count, fraction, instance, seed
from theodolite.measures.hessian import LayerComparison, StructureReport, compare_layers, hessian_structure
from theodolite.measures.mode_connectivity import BatchNormPolicy, LinearPath, path_between
from theodolite.problem import Batch, Problem
from theodolite.problem.tensors import named_tensors
from theodolite.progress import Stage, stages
from theodolite.report import Answer, Section
from theodolite.report.page import Fold
from theodolite.results import Cost, Finding, Outcome, Result, Row, number
from theodolite.text import listed

#: Columns of the table of all spectra.
_SPECTRUM = ("sharpness", "residual", "outliers", "decoupling_error", "overlap")
_SOURCE = "Wu and others (2020), Dissecting Hessian: overlap of dominant eigenspaces between models."
_found = Findings(_SOURCE, labels(note="overlap"))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Result):
    """Structure reports by model, comparisons of every pair layer by layer, and findings; `to_html` writes the page.

    `scores` has a row for each model: loss, accuracy (None where the targets name no classes), sharpness and the critical
    learning rate of plain SGD, each with its standard error over samples. `contests` has a row for each of these quantities:
    the best model, the next one, their difference with its error, and whether it is clear (more than two errors).
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
    scores: tuple[Row, ...] = ()
    contests: tuple[Row, ...] = ()

    def verdict(self) -> list[str]:
        """Sentences: which model is better, then loss, accuracy, flatness and the barrier, with numbers and errors.

        Returns:
            The sentences, the answer first.

        >>> x, y = torch.tensor([[1.0], [-1.0]] * 8), torch.tensor([0, 1] * 8)
        >>> def model(weight):
        ...     layer = torch.nn.Linear(1, 2, bias=False)
        ...     layer.weight.data = torch.tensor([[weight], [-weight]])
        ...     return Problem(layer, torch.nn.CrossEntropyLoss(), (x, y))
        >>> found = compare({"right": model(1.0), "wrong": model(-1.0)}, k=1, progress=False)
        >>> found.verdict()[0]
        'right is better on these 16 samples: lower loss and higher accuracy.'
        """
        return verdict(self.scores, self.contests, _flat(self.paths), self.settings.get("samples", ""))

    def rows(self) -> list[Row]:
        return [row for pair in self.pairs for row in pair.rows()]

    def sentence(self) -> str:
        lines = [str(finding) for finding in self.findings]
        return "\n".join([*self.verdict(), *lines, *(f"{layer}: not compared, {why}." for layer, why in self.without.items())])

    def to_html(self, path: str | PathLike[str], *, facts: Mapping[str, str] | None = None) -> Path:
        """Write the comparison as one self-contained page: the verdict, pictures, and everything else folded.

        Args:
            path: the file; folders are made.
            facts: what else to say of the models (where they come from, say), by name.

        Returns:
            The path of the page.
        """
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
            **{f"{layer} not compared": why for layer, why in self.without.items()},
        }
        every = [self._scores(), *between, *sections, spectra]
        title, answer = listed(self.models, 4), self._answer()
        return write_analysis(self, path, title, "comparison", every, self.findings, everything, _SOURCE, answer)[0]

    def _answer(self) -> Answer:
        drawn = dict(plots.model_scores(self.scores))
        if self.paths:
            along = [{**row, "pair": " to ".join(names)} for names, path in _flat(self.paths) for row in path.rows()]
            ends = next(names for names, _ in _flat(self.paths)) if len(self.models) == 2 else ("first", "second")
            _, (axes,) = plots.panels(1, size=(4.6, 3.0), letters=False)
            drawn["path"] = plots.linear_path(along, ends=ends, title="On the straight line between them", ax=axes)
        pictures = [plots.to_svg(axes, prefix=f"first-{name}") for name, axes in drawn.items()]
        clear = any(row["clear"] for row in self.contests if row["quantity"] != "sharpness")
        return Answer(sentences=self.verdict(), tone="good" if clear else "note", pictures=pictures)

    def _scores(self) -> Section:
        return Section(
            name="scores",
            title="Loss, accuracy and sharpness",
            question="Which model is better at what?",
            sentence=" ".join(self.verdict()[: len(self.contests) + 1]),
            rows=self.scores,
            more=[Fold(title="the best and the next of each quantity", rows=self.contests)],
            how=(
                "Loss and accuracy on the same samples; their errors are standard errors over samples, that of a difference is "
                "paired: a sample that is hard for both models counts for neither. Sharpness is the largest eigenvalue of the "
                "Hessian, the critical learning rate of plain SGD is 2 over it; their errors are those of the delete-a-group "
                "jackknife over samples and of the eigenvalue. A difference is clear from two of its errors on."
            ),
            source="Critical learning rate 2/λ of gradient descent; paired differences over samples.",
        )

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
    """Which of several models of one architecture is better at what, and what they share.

    Loss, accuracy and sharpness with errors; whether the straight line between each two stays in one basin; and the overlap of
    their sharp subspaces layer by layer, beside the predicted one.

    Args:
        problems: the problem of each model by its name, all on the same data.
        layers: only these layers (names or globs); None is all.
        k: sharp directions per layer.
        tol: relative tolerance of eigenpairs.
        path: whether to look along the lines.
        batchnorm: as for `linear_path`.
        seed: of the random starts.
        progress: whether to show how far it is; None is on a terminal only.

    Returns:
        A frozen `Comparison`: `print` it, take `verdict()`, `scores` and `rows()`, or write its page with `to_html`.

    >>> x, y = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 8)
    >>> model = torch.nn.Linear(3, 2)
    >>> same = compare({name: Problem(model, torch.nn.CrossEntropyLoss(), (x, y)) for name in "ab"}, k=1, progress=False)
    >>> same.verdict()[0]
    'Neither model is clearly better on these 16 samples.'
    """
    if len(problems) < 2:
        raise ValueError(f"compare needs at least two models. Got {len(problems)}.")
    _refuse_other_data(problems)
    began = time.perf_counter()
    reports: dict[str, StructureReport] = {}
    scored: dict[str, Measured] = {}
    couples = list(itertools.combinations(problems, 2))
    with stages(len(problems) + path * len(couples), progress=progress) as begin:
        for name, problem in problems.items():
            begin(name)
            scored[name] = measured(problem, tol=tol, seed=seed)
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
    scores = score_rows(scored)
    return Comparison(
        scores=tuple(scores),
        contests=tuple(contests(scored, scores)),
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
        losses={name: found.loss for name, found in scored.items()},
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
