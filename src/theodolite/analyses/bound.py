"""`theodolite bound`: what a certificate says, as findings and as a page, and how much of one a budget pays for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite import plots
from theodolite.analyses.page import write_analysis
from theodolite.instruments.data.certificate import SOURCE, certificate_findings, fit_work, percent
from theodolite.instruments.timings import quickest
from theodolite.measures.bounds import RiskCertificate
from theodolite.measures.bounds.priors import RECIPE_BATCH, recipe_steps
from theodolite.problem import Problem
from theodolite.report import Answer, Section
from theodolite.results import Finding, Severity

#: Samples on which a gradient is timed.
TIMED = 1000
#: What a fit takes at least: fewer epochs or passes are not worth their time.
FEWEST_EPOCHS, FEWEST_PASSES = 2, 1

_PRIORS = {
    "start": "an isotropic Gaussian around the weights before training",
    "held-out": "an isotropic Gaussian around the trained weights, which did not see these samples",
    "split": "an isotropic Gaussian around weights that were trained on a part of the samples; the rest is certified",
    "given": "given by its numbers",
}


def seconds_of_gradient(problem: Problem) -> float:
    """Seconds of a gradient over all samples, timed on some."""
    few = problem.few(TIMED)
    part = problem.with_batches([few])
    part.gradient()
    return quickest(part.gradient) * problem.samples / few.size


def scaled_to(budget: float, samples: int, gradient: float, *, epochs: int, passes: int) -> tuple[int, int]:
    """As many epochs and passes, in the proportion that is given, as a budget in seconds pays for; never more.

    >>> scaled_to(1e9, 1000, 0.01, epochs=20, passes=10), scaled_to(1.2, 1000, 0.01, epochs=20, passes=10)
    ((20, 10), (8, 4))
    """

    def seconds(epochs: int, passes: int) -> float:
        work = fit_work(samples, epochs, passes)
        return work.seconds + gradient * work.gradients

    fixed, whole = seconds(0, 0), seconds(epochs, passes)
    share = min(1.0, max(0.0, budget - fixed) / (whole - fixed))
    fewest = min(FEWEST_EPOCHS, epochs), min(FEWEST_PASSES, passes)
    return max(fewest[0], int(share * epochs)), max(fewest[1], int(share * passes))


def within(budget: float | None, problem: Problem, *, split: float | None, epochs: int, passes: int) -> tuple[int, int, str]:
    """Epochs and passes within a budget, and what to say where they are fewer than asked; `split` trains on its share first."""
    if budget is None:
        return epochs, passes, ""
    began = time.perf_counter()
    gradient = seconds_of_gradient(problem)
    certified = 1.0 if split is None else 1 - split
    trained = round((split or 0.0) * problem.samples)
    training = recipe_steps(trained) * RECIPE_BATCH / problem.samples * gradient if trained else 0.0
    left = budget - training - (time.perf_counter() - began)
    fewer = scaled_to(left, round(certified * problem.samples), certified * gradient, epochs=epochs, passes=passes)
    if fewer == (epochs, passes):
        return epochs, passes, ""
    return *fewer, _said(f"The budget of {budget:g} s pays for", fewer, epochs, passes)


def going_on(length: tuple[int, int], *, epochs: int, passes: int) -> tuple[int, int, str]:
    """The same of a fit that goes on: it is as long as it was meant to be.

    >>> going_on((20, 10), epochs=20, passes=10)
    (20, 10, '')
    """
    return *length, "" if length == (epochs, passes) else _said("The fit that was broken off is for", length, epochs, passes)


def _said(who: str, fewer: tuple[int, int], epochs: int, passes: int) -> str:
    said = f"{who} {fewer[0]} of {epochs} epochs and {fewer[1]} of {passes} passes of draws"
    return f"{said}: the bound holds all the same, and is looser than it could be."


def bound_findings(found: RiskCertificate) -> list[Finding]:
    """The findings of a certificate; the first is what was asked."""
    first, *rest = certificate_findings(found, _finding)
    return [replace(first, headline=True), *rest]


def _finding(severity: Severity, sentence: str, label: str, **fields: Any) -> Finding:
    return Finding(instrument="bound", severity=severity, sentence=sentence, label=label, source=SOURCE, **fields)


def write_bound(
    found: RiskCertificate,
    out: str | PathLike[str],
    *,
    name: str = "certificate",
    facts: Mapping[str, str] | None = None,
) -> tuple[Path, list[Finding]]:
    """Write a certificate as a self-contained page; its place and its findings, the weightiest first."""
    findings, everything = bound_findings(found), {**(facts or {}), **_facts(found)}
    answer = Answer(
        sentences=[found.sentence(), *(finding.sentence for finding in findings if finding.label == "prior unknown")],
        tone=findings[0].severity.value,
        pictures=[_picture(plots.plot_certificate(found, title="Error rates and their bounds"), "rates"), *_fit_picture(found)],
    )
    sections = [_bound_section(found), *_fit_sections(found), *_posterior_sections(found)]
    return write_analysis(found, out, name, "certificate", sections, findings, everything, SOURCE, answer)


def _picture(axes: Any, prefix: str) -> str:
    return plots.to_svg(axes, prefix=prefix)


def _fit_picture(found: RiskCertificate) -> list[str]:
    if not found.trace:
        return []
    return [_picture(plots.plot_bound_fit(found.trace, bound=found.value, title="The fit of the posterior"), "fit")]


def _facts(found: RiskCertificate) -> dict[str, str]:
    epochs = f"{len(found.trace)} epochs, " if found.trace else ""
    return {
        "prior": _PRIORS.get(found.prior, found.prior),
        "samples certified": str(found.n),
        "confidence": f"{100 * found.confidence:.4g} %",
        "fit": f"{epochs}{found.draws} draws",
        **({"centre of the prior (SHA-256)": found.start_hash[:16]} if found.start_hash else {}),
    }


def _bound_section(found: RiskCertificate) -> Section:
    rows = [{"form": row["form"], "error rate at most": row["bound"]} for row in found.rows()]
    rows.append({"form": "maurer, of the prior itself", "error rate at most": found.prior_value})
    if found.fitted is not None:
        rows.append({"form": "maurer, of the fitted posterior", "error rate at most": found.fitted.value})
    if found.held_out is not None:
        rows.append({"form": "binomial, without noise, held out", "error rate at most": found.held_out})
    return Section(
        name="bound",
        title="Every form of the bound",
        question="What does each form say of the same numbers?",
        sentence=(
            f"{percent(found.empirical)} of {found.draws} draws were wrong, at most {percent(found.empirical_upper)} would be of "
            f"many more; {found.kl:.4g} nats lie between posterior and prior, and the choice of the prior's variances costs "
            f"{sum(found.penalty.values()):.3g} more. The certificate is the form called maurer."
        ),
        rows=rows,
        how=(
            "Each sample meets networks of its own, drawn anew in each pass. The bound of the drawn error rate (Hoeffding) goes "
            "into kl(ê‖e) ≤ (KL + penalty + log(2√n/δ)) / n, which is solved for e. The other forms are weaker statements."
        ),
        cost=f"{found.cost.seconds:.3g} s; {found.cost.route}",
    )


def _fit_sections(found: RiskCertificate) -> list[Section]:
    if not found.trace:
        return []
    first, last = found.trace[0], found.trace[-1]
    return [
        Section(
            name="fit",
            title="The fit",
            question="Would a longer fit give a better bound?",
            sentence=(
                f"After {len(found.trace)} epochs the bound that was fitted came to {last['objective']:.3g}, from "
                f"{first['objective']:.3g} after the first one.{_beaten(found)}"
            ),
            rows=[dict(row) for row in found.trace],
            how=(
                "Descent on the bound itself, with a smooth error rate (a running mean over batches) and the exact divergence. "
                "What is certified is higher: it pays for the choice of the prior's variances and the number of draws as well."
            ),
        )
    ]


def _beaten(found: RiskCertificate) -> str:
    """What came of a fit that the prior beats."""
    if found.fitted is None:
        return ""
    return (
        f" Its certificate is {percent(found.fitted.value)} ({percent(found.fitted.empirical)} of the draws were wrong, "
        f"{found.fitted.kl:.4g} nats from the prior): more than the prior's own, which is what is certified."
    )


def _posterior_sections(found: RiskCertificate) -> list[Section]:
    posterior = found.posterior
    if posterior is None:
        return []
    try:
        svg = _picture(plots.plot_posterior(posterior), "posterior")
    except ValueError:  # no layer whose curvature is known
        svg = ""
    columns = {"parameter": "parameter", "size": "size", "prior_variance": "variance of the prior", "variance": "mean variance"}
    columns |= {"distance": "distance from the prior", "kl": "KL in nats"}
    return [
        Section(
            name="posterior",
            title="Where the weights may vary",
            question="Which directions does the certificate leave wide?",
            sentence=posterior.sentence(),
            svg=svg,
            rows=[{title: row[column] for column, title in columns.items()} for row in posterior.rows()],
            how="Coordinates are those of each layer's Kronecker factors; where curvature is small the prior's variance stays.",
        )
    ]
