"""The page of a dictionary study: findings first, then prediction, atoms, the choice of the size, and how it was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from theodolite.instruments.dictionary import SOURCE
from theodolite.instruments.dictionary_study import DictionaryStudy
from theodolite.results import Finding, Row

if TYPE_CHECKING:
    from theodolite.report import Section, SurveyPage

Found = Mapping[str, list[Finding]]


def dictionary_page(
    study: DictionaryStudy,
    findings: Sequence[Finding],
    name: str,
    facts: Mapping[str, str],
    patch_shape: Sequence[int] | None = None,
    feature_names: Sequence[str] | None = None,
) -> SurveyPage:
    """All that the page shows; every text is escaped by the template."""
    from theodolite.report import SurveyPage

    by_section: dict[str, list[Finding]] = {}
    for finding in findings:
        by_section.setdefault(finding.instrument, []).append(finding)
    sections = [
        _prediction_section(study, by_section),
        *([_choice_section(study, by_section)] if study.choice is not None else []),
        _atoms_section(study, by_section, patch_shape, feature_names),
        _usage_section(study),
        _learning_section(study, by_section),
    ]
    return SurveyPage(
        title=name,
        findings=findings,
        sections=sections,
        kind="dictionary",
        part="section",
        facts={**facts, **_facts(study)},
        provenance={key: str(value) for key, value in asdict(study.provenance).items()} | {"seed": str(study.seed)},
    )


def _facts(study: DictionaryStudy) -> dict[str, str]:
    return {
        "atoms": str(len(study.components)),
        "per signal": str(study.sparsity),
        "learned from": f"{study.samples} signals of {study.dim} numbers",
        "judged on": f"{study.held_out} held-out signals",
        "hidden at a time": f"{study.hidden} of {study.dim} coordinates",
        "objective": " and ".join(study.judged),
        **({} if study.offset is None else {"centred": f"less the mean signal, {study.mean_energy:.0%} of the energy"}),
        "time": f"{study.cost.seconds:.3g} s",
    }


def _prediction_section(study: DictionaryStudy, found: Found) -> Section:
    from theodolite.report import Section

    rows: list[Row] = []
    for objective, judged in study.judged.items():
        for where, error in (("held out", judged.held), ("training", judged.train)):
            rows.append(
                {
                    "objective": objective,
                    "signals": where,
                    "hidden error": error.value,
                    "±": error.stderr,
                    "explained": error.explained,
                    "reconstruction error": error.reconstruction,
                }
            )
    return Section(
        name="prediction",
        title="What the dictionary predicts",
        question="Does a code, read from a part of a signal, tell the rest?",
        findings=found.get("prediction", []),
        rows=rows,
        how=(
            f"{study.hidden} of {study.dim} coordinates are hidden, the code is found from the others, and what it says of the "
            "hidden ones is compared with the truth: mean squared error per hidden coordinate over "
            f"{study.judged[study.main].held.masks} random choices. Its standard error (±) is over signals; explained is the "
            "share of the hidden energy that is predicted. Reconstruction looks at all coordinates and so can also fit their "
            "noise; a lower reconstruction error with a higher hidden error is the mark of overfitting."
        ),
        source=SOURCE,
    )


def _choice_section(study: DictionaryStudy, found: Found) -> Section:
    from theodolite import plots
    from theodolite.report import Section

    assert study.choice is not None
    return Section(
        name="choice",
        title="The size",
        question="How many atoms, and how many per signal?",
        findings=found.get("choice", []),
        svg=plots.to_svg(plots.plot_dictionary_choice(study.choice.rows()), prefix="choice"),
        rows=study.choice.rows(),
        how=(
            "Every size was learned from the same signals and judged on the same held-out ones; the lowest error on hidden "
            "coordinates was taken. The error of reconstruction falls with every atom and cannot choose."
        ),
        source=SOURCE,
    )


def _atoms_section(study: DictionaryStudy, found: Found, shape: Sequence[int] | None, names: Sequence[str] | None) -> Section:
    from theodolite import plots
    from theodolite.report import Section

    usage = study.judged[study.main].usage
    order = usage.uses.argsort(descending=True, stable=True).tolist()
    title = "Atoms, those used most first"
    axes = plots.plot_atoms(study.components, shape, order=order, feature_names=names, title=title)
    rows = usage.rows()
    return Section(
        name="atoms",
        title="The atoms",
        question="What are the signals made of?",
        findings=found.get("atoms", []),
        svg=plots.to_svg(axes, prefix="atoms"),
        rows=[rows[i] for i in order],
        how=(
            "Atoms have unit length and no sign: blue and red, or up and down, may be exchanged. Uses count the training signals "
            "whose code has the atom, energy is its share of all squared code entries, the twin is the other atom most like it."
        ),
        source=SOURCE,
    )


def _usage_section(study: DictionaryStudy) -> Section:
    from theodolite import plots
    from theodolite.report import Section

    rows = [{"objective": name, **row} for name, judged in study.judged.items() for row in judged.usage.rows()]
    axes = plots.plot_atom_usage(rows, by="objective" if len(study.judged) > 1 else None, title="How often atoms are used")
    return Section(
        name="usage",
        title="The use of atoms",
        question="Do all atoms work?",
        sentence=study.judged[study.main].usage.sentence(),
        svg=plots.to_svg(axes, prefix="usage"),
        source=SOURCE,
    )


def _learning_section(study: DictionaryStudy, found: Found) -> Section:
    from theodolite import plots
    from theodolite.report import Section

    by = "objective" if len(study.judged) > 1 else None
    axes = plots.plot_learning_curve(study.learning_rows(), by=by, title="Squared error per coordinate while learning")
    return Section(
        name="learning",
        title="Learning",
        question="Had learning come to rest?",
        findings=found.get("learning", []),
        svg=plots.to_svg(axes, prefix="learning"),
        rows=[
            {"objective": name, "passes": judged.learner.state.epoch, "steps": judged.learner.state.step,
             "first loss": float(judged.learner.losses[0]), "last loss": float(judged.learner.losses[-1])}
            for name, judged in study.judged.items()
        ],
        how=(
            "Adam on the atoms with the codes held fixed, which are found anew for each batch; after each step atoms are brought "
            "back to unit length. The masked objective is charged on hidden coordinates only, reconstruction on all, so the two "
            "curves do not measure the same."
        ),
        cost=f"{study.cost.seconds:.3g} s in all",
        source=SOURCE,
    )  # fmt: skip
