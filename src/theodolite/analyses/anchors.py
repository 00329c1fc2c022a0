"""The page of an anchor probe: the verdict first, then errors, partition functions, atoms and what a certificate needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path

from theodolite import plots
from theodolite.analyses.page import write_analysis
from theodolite.instruments.language.anchors import SOURCE, Anchors, anchor_findings, certificate_needs
from theodolite.measures.anchors import AnchorProbe, AtomGeometry
from theodolite.report import Section
from theodolite.results import Finding, Row

#: The section that a finding stands in, by its label; all others are about the anchor itself.
SECTIONS = {"bulk mass": "partition", "several anchors": "clusters", "atoms": "atoms", "certificate": "certificate"}


def write_anchors(
    probe: AnchorProbe, out: str | PathLike[str], *, name: str = "a language model", facts: Mapping[str, str] | None = None
) -> tuple[Path, list[Finding]]:
    """Write a probe as a self-contained page; the page's place and its findings, the weightiest first."""
    sections = [_errors(probe), _partitions(probe)]
    sections += [_clusters(probe)] if probe.clusters else []
    sections += [_atoms(probe.geometry)] if probe.geometry is not None else []
    sections.append(_certificate(probe))
    found = [*anchor_findings(probe), certificate_needs(probe)]
    placed = [replace(finding, instrument=SECTIONS.get(finding.label, "anchor")) for finding in found]
    return write_analysis(probe, out, name, "anchor probe", sections, placed, {**(facts or {}), **_facts(probe)}, SOURCE)


def _facts(probe: AnchorProbe) -> dict[str, str]:
    found = {
        "positions": str(probe.positions),
        "held out": f"{probe.held_out_positions} positions, {probe.split}",
        "hidden state": f"{probe.hidden} dimensions" + (" and a bias" if probe.biased else ""),
        "vocabulary": f"{probe.vocabulary} words" + (f", {probe.excluded} excluded" if probe.excluded else ""),
        "perplexity": "not known" if probe.perplexity is None else f"{probe.perplexity:.4g}",
        "time": f"{probe.cost.seconds:.3g} s",
    }
    return found | ({"remarks": "; ".join(probe.notes)} if probe.notes else {})


def _errors(probe: AnchorProbe) -> Section:
    return Section(
        name="anchor",
        title="Anchor vector",
        question=Anchors.question,
        svg=plots.to_svg(plots.plot_anchor_errors(probe.rows()), prefix="errors"),
        rows=Anchors().rows(probe),
        how=(
            "h is what enters the output layer, caught at every position. For each context and each number k the logarithm of "
            "the sum of exp(logits) over all words but the k most probable is fitted by ⟨h, v₀⟩, by least squares in float64 "
            "without an intercept. In sample: all positions; held out: fitted to the first part, measured on the rest. "
            "Yardsticks are the mean, whose error is the variance, and the logarithm of the number of bulk words. R² is "
            "1 − error/variance."
        ),
        cost=f"{probe.cost.seconds:.3g} s, {probe.cost.route}",
    )


def _partitions(probe: AnchorProbe) -> Section:
    names = {"mean": "mean", "variance": "variance", "low": "smallest", "high": "largest", "mass_mean": "bulk mass"}
    names |= {"mass_1": "bulk mass, 1 % below", "mass_min": "smallest bulk mass"}
    rows: list[Row] = [{"words removed": r["top"], **{label: r[key] for key, label in names.items()}} for r in probe.rows()]
    return Section(
        name="partition",
        title="Partition functions",
        question="How much do the logarithms of the partition functions vary, and how much probability does the bulk hold?",
        svg=plots.to_svg(plots.plot_log_partitions(probe), prefix="partition"),
        rows=rows,
        how=(
            "An anchor is only worth something if what it predicts varies. Bulk mass is the probability of all words that were "
            f"not removed. The picture shows {'all' if probe.exact else 'a uniform sample of the'} positions."
        ),
    )


def _clusters(probe: AnchorProbe) -> Section:
    return Section(
        name="clusters",
        title="Several anchors",
        question="Do positions fall into clusters, each with an anchor of its own?",
        rows=[row for found in probe.clusters for row in found.rows()],
        how=(
            "k-means on the log bulk partition function of the sampled positions, then least squares in each cluster. The last "
            "columns say what one anchor for all gives, and which share of a cluster stands first in its window."
        ),
    )


def _atoms(geometry: AtomGeometry) -> Section:
    return Section(
        name="atoms",
        title="The atoms",
        question="How do the rows of the output layer lie: do they fill their space, or a cone?",
        svg=plots.to_svg(plots.plot_atom_geometry(geometry), prefix="atoms"),
        rows=geometry.rows(),
        how=(
            "Singular values of the output weight by its Gram matrix, norms of its rows, cosines of random pairs of them. Were "
            "the rows uniform on a sphere, log Z would be nearly constant, and a constant would be the anchor."
        ),
    )


def _certificate(probe: AnchorProbe) -> Section:
    i = probe.spoken
    table = [
        ("ε_b, largest error of the anchor", probe.max_error[i], "Γ > 4 ε_b; theorem: 8 ε_b < Γ < 6"),
        ("the same for 99 % of the contexts", probe.error_99[i], "no guarantee"),
        ("p_b, smallest bulk mass", probe.mass_min[i], "the bound goes like 1/p_b²"),
        ("ε_KL, divergence of the student", None, "teacher and student on the same contexts"),
        ("Γ, normalised margin", None, "label words, coefficients, thresholds"),
        ("μ, density ratio", None, "known for finite sets of contexts, else given"),
    ]
    return Section(
        name="certificate",
        title="Transfer certificate",
        question="What would a guarantee for downstream tasks need?",
        rows=[{"quantity": quantity, "here": here, "needed": needed} for quantity, here, needed in table],
        how="Where there is a student, theodolite.measures.anchors.transfer_certificate measures all of these and the bounds.",
    )
