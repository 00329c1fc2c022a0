"""The straight path between two models as a part of a page: finding, picture and table."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from theodolite import plots
from theodolite.analyses.page import write_analysis
from theodolite.measures.mode_connectivity import LinearPath
from theodolite.report import Section
from theodolite.results import Finding, Severity

SOURCE = "Karp (2024), thesis, chapter 2: linear mode connectivity of solutions from neighbouring training sets."

_STATISTICS = {
    "interpolate": "Running statistics of normalisations are interpolated like the weights.",
    "recompute": "Running statistics of normalisations are estimated anew at each point, over the training batches.",
    "batch": "Normalisations use the statistics of each evaluated batch.",
}


def path_finding(path: LinearPath, names: tuple[str, str], name: str, *, barrier: Severity = Severity.NOTE) -> Finding:
    """What a path says about averaging the two models called `names`; `barrier` is how much it matters that there is one."""
    found = path.barrier("train")
    value, error = (path.loss_barrier_train, None) if found is None else (found.value, found.error)
    good = path.connected and path.connected_test is not False
    label = ("connected" if path.conclusive else "no verdict") if path.connected else "barrier"
    return Finding(
        instrument=name,
        severity=(Severity.GOOD if path.conclusive else Severity.NOTE) if good else barrier,
        sentence=f"{names[0]} to {names[1]}: {path.sentence()}",
        label=label,
        quantity=f"barrier of train {'loss' if found is None else 'accuracy'}, {names[0]} to {names[1]}",
        value=value,
        error=error,
        source=SOURCE,
    )


def path_section(path: LinearPath, names: tuple[str, str], name: str) -> Section:
    """The profile as a section of a page, called `name`."""
    return Section(
        name=name,
        title=f"Path from {names[0]} to {names[1]}",
        question="Do the two models lie in one basin, so that their weights may be averaged?",
        svg=plots.to_svg(plots.linear_path_panels(path, ends=names), prefix=name),
        rows=path.rows(),
        how=(
            f"Weights alpha · {names[0]} + (1 − alpha) · {names[1]} at {len(path.alphas)} values of alpha. The barrier is how "
            "far accuracy falls between the ends below the weaker one; up to 2 percentage points count as connected. Its error "
            "is the standard error of the paired difference over samples, that of an accuracy is sqrt(p (1 − p) / n). "
            + _STATISTICS.get(path.batchnorm, "")
        ).rstrip(),
        cost=f"{path.forward_passes} forward passes over the data, {path.cost.seconds:.2g} s",
        source=SOURCE,
    )


def write_path(
    path: LinearPath, names: tuple[str, str], out: str | PathLike[str], *, facts: Mapping[str, str] | None = None
) -> tuple[Path, Finding]:
    """Write one path as a self-contained page; the page's place and its finding."""
    finding = path_finding(path, names, "path", barrier=Severity.WARNING)
    samples = str(path.train_samples) + (f", test {path.test_samples}" if path.test_samples else "")
    everything = {**(facts or {}), "BatchNorm": path.batchnorm, "samples": samples}
    title, sections = f"{names[0]} to {names[1]}", [path_section(path, names, "path")]
    return write_analysis(path, out, title, "linear path", sections, [finding], everything, SOURCE)[0], finding
