"""`theodolite dictionary`: what a dictionary study says, as findings and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite import plots
from theodolite.analyses.dictionary_study import DictionaryStudy, Judged
from theodolite.analyses.page import Findings, labels, write_analysis
from theodolite.measures.dictionary import DictionaryChoice
from theodolite.report import Section
from theodolite.results import Finding, Row, Severity, number

SOURCE = "Hiding Data Helps: On the Benefits of Masking for Sparse Coding (ICML 2023), https://arxiv.org/abs/2302.12715"

#: Every label with the severities it comes in.
LABELS = labels(
    good="no overfitting | no idle atoms",
    note=(
        "hidden coordinates | reconstruction predicts better | fits its own signals | chosen size | size at the edge | "
        "idle atoms | twin atoms | still learning | missing values | zero signals"
    ),
    warning="predicts nothing | overfits | idle atoms | atoms fall together",
)

TWIN = 0.95  # |cosine| from which two atoms count as one
IDLE = 0.1  # share of idle atoms that deserves a warning
ERRORS = 2.0  # standard errors that a difference must exceed
COMMON = 0.5  # share of the energy that the mean signal holds, from which it may pull all atoms towards itself
OWN = 1.25  # held-out over training error from which a dictionary fits its own signals
FALLING = 0.02  # relative fall of the loss over the last tenth of the passes: not at rest

_found = Findings(SOURCE, LABELS)


def write_dictionary(
    study: DictionaryStudy,
    out: str | PathLike[str],
    *,
    name: str = "dictionary",
    facts: Mapping[str, str] | None = None,
    patch_shape: Sequence[int] | None = None,
    feature_names: Sequence[str] | None = None,
) -> tuple[Path, list[Finding]]:
    """Write a study as a self-contained page; the page's place and its findings, the weightiest first."""
    sections = [
        _prediction_section(study),
        *map(_choice_section, [study.choice] if study.choice else []),
        _atoms_section(study, patch_shape, feature_names),
        _usage_section(study),
        _learning_section(study),
    ]
    main = study.judged[study.main]
    findings = [_prediction(study, main), *_overfitting(study), *_choice(study), _idle(main)]
    findings += [*_twins(study, main), *_rest(main), *_data(study)]
    return write_analysis(study, out, name, "dictionary", sections, findings, {**(facts or {}), **_facts(study)}, SOURCE)


def _prediction(study: DictionaryStudy, main: Judged) -> Finding:
    held = main.held
    size = f"{len(study.components)} atoms, {study.sparsity} per signal,"
    measured: dict[str, Any] = {"quantity": "squared error per hidden coordinate", "value": held.value, "error": held.stderr}
    if held.value >= held.baseline:
        text = (
            f"{size} predict hidden coordinates of held-out signals no better than zero would: squared error "
            f"{number(held.value, held.stderr)}, where zero costs {held.baseline:.4g}."
        )
        advice = "The signals may have no sparse structure at this size: fewer atoms per signal, or other features."
        return _found("prediction", "predicts nothing", text, advice=advice, **measured)
    text = (
        f"{size} predict hidden coordinates of held-out signals with a squared error of {number(held.value, held.stderr)}, which "
        f"explains {held.explained:.0%} of their energy. Looking at all coordinates leaves {held.reconstruction:.4g}."
    )
    return _found("prediction", "hidden coordinates", text, headline=True, **measured)


def _overfitting(study: DictionaryStudy) -> list[Finding]:
    """The two objectives beside each other, or else held-out beside training signals."""
    masked, plain = study.judged.get("masked"), study.judged.get("reconstruction")
    if masked is None or plain is None:
        return _own_signals(study.judged[study.main])
    a, b = masked.held, plain.held
    error = math.hypot(a.stderr, b.stderr)
    numbers = f"{number(b.value, b.stderr)} with reconstruction, {number(a.value, a.stderr)} with masking"
    measured: dict[str, Any] = {"quantity": "difference of the hidden errors", "value": b.value - a.value, "error": error}
    if b.value - a.value > ERRORS * error and plain.train.reconstruction < masked.train.reconstruction:
        text = (
            f"The reconstruction objective overfits: it leaves less of its training signals "
            f"({plain.train.reconstruction:.4g} against {masked.train.reconstruction:.4g} per coordinate) and yet misses "
            f"hidden coordinates of new signals by more ({numbers})."
        )
        advice = "Take the atoms of the masked objective; --choose and --sparsities compare smaller dictionaries."
        return [_found("prediction", "overfits", text, advice=advice, **measured)]
    if a.value - b.value > ERRORS * error:
        text = f"Here the reconstruction objective predicts hidden coordinates of new signals better: {numbers}."
        advice = "With little noise or few atoms masking has nothing to repair; train longer before you decide."
        return [_found("prediction", "reconstruction predicts better", text, advice=advice, **measured)]
    text = f"No sign of overfitting: both objectives predict hidden coordinates of new signals about equally well ({numbers})."
    return [_found("prediction", "no overfitting", text, **measured)]


def _own_signals(main: Judged) -> list[Finding]:
    held, seen = main.held, main.train
    error = math.hypot(held.stderr, seen.stderr)
    if not (held.value > OWN * seen.value and held.value - seen.value > ERRORS * error):
        return []
    text = (
        f"Hidden coordinates of new signals are missed by {number(held.value, held.stderr)}, those of the signals it learned "
        f"from by {number(seen.value, seen.stderr)}: the dictionary fits its own signals better than others."
    )
    advice = "More signals, fewer atoms, or fewer atoms per signal; --choose compares sizes."
    measured = {"quantity": "held-out over training error", "value": held.value / seen.value}
    return [_found("prediction", "fits its own signals", text, advice=advice, **measured)]


def _choice(study: DictionaryStudy) -> list[Finding]:
    choice = study.choice
    if choice is None:
        return []
    found = [_found("choice", "chosen size", choice.sentence(), headline=True)]
    sizes = sorted({row["n_components"] for row in choice.table})
    if len(sizes) > 1 and choice.n_components == sizes[-1]:
        text = f"The largest size that was tried, {sizes[-1]}, is the best: the best of all may be larger."
        advice = f"Try sizes beyond it, as --choose {sizes[-1]},{2 * sizes[-1]},{4 * sizes[-1]}."
        found.append(_found("choice", "size at the edge", text, advice=advice))
    return found


def _idle(main: Judged) -> Finding:
    dead, atoms = len(main.usage.dead), len(main.usage.uses)
    if not dead:
        rarest = int(main.usage.uses.min())
        text = f"Every atom is at work: the one used least is in the codes of {rarest} of {main.usage.signals} signals."
        return _found("atoms", "no idle atoms", text)
    text = f"{dead} of {atoms} atoms {'is' if dead == 1 else 'are'} used by none of {main.usage.signals} signals."
    advice = "They can be dropped without any change; a smaller dictionary would do."
    severity = Severity.WARNING if dead > IDLE * atoms else Severity.NOTE
    return _found("atoms", "idle atoms", text, severity=severity, advice=advice, quantity="idle atoms", value=float(dead))


def _twins(study: DictionaryStudy, main: Judged) -> list[Finding]:
    pairs = main.usage.twins(TWIN)
    if not pairs:
        return []
    members, atoms = len({i for pair in pairs for i in pair[:2]}), len(main.usage.uses)
    i, j, cosine = pairs[0]
    text = f"{members} of {atoms} atoms have a twin, another atom with a cosine of {TWIN:g} or more"
    measured: dict[str, Any] = {"quantity": "atoms with a twin", "value": float(members)}
    if members > atoms / 2 and study.mean_energy > COMMON and study.offset is None:
        text += f", and the mean signal holds {study.mean_energy:.0%} of the energy: atoms share it and differ by little else."
        advice = "Learn again with --center, which takes the mean signal away first."
        return [_found("atoms", "atoms fall together", text, advice=advice, **measured)]
    text += f" to it; the nearest are {i} and {j} ({cosine:.4f})."
    advice = "Twins share the work of one atom: the data may hold fewer directions than there are atoms."
    return [_found("atoms", "twin atoms", text, advice=advice, **measured)]


def _rest(main: Judged) -> list[Finding]:
    """Whether the loss still fell at the end: the mean over the last tenth of the passes, and over the tenth before."""
    losses = main.learner.losses
    tenth = len(losses) // 10
    if tenth < 2:
        return []
    before, last = float(losses[-2 * tenth : -tenth].mean()), float(losses[-tenth:].mean())
    fall = (before - last) / before if before > 0 else 0.0
    if fall < FALLING:
        return []
    text = f"The loss was still falling when learning ended: by {fall:.0%} over the last {tenth} of {len(losses)} passes."
    advice = f"--resume --epochs {2 * len(losses)} goes on from here."
    return [_found("learning", "still learning", text, advice=advice, quantity="fall of the loss", value=fall)]


def _data(study: DictionaryStudy) -> list[Finding]:
    found = []
    if study.missing:
        text = f"{study.missing:.2%} of the entries are missing; atoms were learned from those that are there."
        found.append(_found("learning", "missing values", text, quantity="missing", value=study.missing))
    if study.zeros:
        text = f"{study.zeros} of {study.samples + study.held_out} signals are zero throughout and teach nothing."
        found.append(_found("learning", "zero signals", text, quantity="zero signals", value=float(study.zeros)))
    return found


def _facts(study: DictionaryStudy) -> dict[str, str]:
    return {
        "atoms": str(len(study.components)),
        "per signal": str(study.sparsity),
        "learned from": f"{study.samples} signals of {study.dim} numbers",
        "judged on": f"{study.held_out} held-out signals",
        "hidden at a time": f"{study.hidden} of {study.dim} coordinates",
        "objective": " and ".join(study.judged),
        **({} if study.offset is None else {"centred": f"minus the mean signal, {study.mean_energy:.0%} of the energy"}),
        "time": f"{study.cost.seconds:.3g} s",
    }


def _prediction_section(study: DictionaryStudy) -> Section:
    names = {"value": "hidden error", "stderr": "±", "explained": "explained", "reconstruction": "reconstruction error"}
    rows: list[Row] = [
        {"objective": objective, "signals": where, **{label: getattr(error, name) for name, label in names.items()}}
        for objective, judged in study.judged.items()
        for where, error in (("held out", judged.held), ("training", judged.train))
    ]
    return Section(
        name="prediction",
        title="What the dictionary predicts",
        question="Does a code, read from a part of a signal, predict the rest?",
        rows=rows,
        how=(
            f"{study.hidden} of {study.dim} coordinates are hidden, the code is found from the others, and what it says of the "
            "hidden ones is compared with the truth: mean squared error per hidden coordinate over "
            f"{study.judged[study.main].held.masks} random choices. Its standard error (±) is over signals; explained is the "
            "share of the hidden energy that is predicted. Reconstruction looks at all coordinates and so can also fit their "
            "noise; a lower reconstruction error with a higher hidden error is the mark of overfitting."
        ),
    )


def _choice_section(choice: DictionaryChoice) -> Section:
    return Section(
        name="choice",
        title="The size",
        question="How many atoms, and how many per signal?",
        svg=plots.to_svg(plots.plot_dictionary_choice(choice.rows()), prefix="choice"),
        rows=choice.rows(),
        how=(
            "Every size was learned from the same signals and judged on the same held-out ones; the lowest error on hidden "
            "coordinates was taken. The error of reconstruction falls with every atom and cannot choose."
        ),
    )


def _atoms_section(study: DictionaryStudy, shape: Sequence[int] | None, names: Sequence[str] | None) -> Section:
    usage = study.judged[study.main].usage
    order = usage.uses.argsort(descending=True, stable=True).tolist()
    title = "Atoms, those used most first"
    axes = plots.plot_atoms(study.components, shape, order=order, feature_names=names, title=title)
    rows = usage.rows()
    return Section(
        name="atoms",
        title="The atoms",
        question="What are the signals made of?",
        svg=plots.to_svg(axes, prefix="atoms"),
        rows=[rows[i] for i in order],
        how=(
            "Atoms have unit length and no sign: blue and red, or up and down, may be exchanged. Uses count the training signals "
            "whose code has the atom, energy is its share of all squared code entries, the twin is the other atom most like it."
        ),
    )


def _usage_section(study: DictionaryStudy) -> Section:
    rows = [{"objective": name, **row} for name, judged in study.judged.items() for row in judged.usage.rows()]
    axes = plots.plot_atom_usage(rows, by="objective" if len(study.judged) > 1 else None, title="How often atoms are used")
    return Section(
        name="usage",
        title="The use of atoms",
        question="Do all atoms work?",
        sentence=study.judged[study.main].usage.sentence(),
        svg=plots.to_svg(axes, prefix="usage"),
    )


def _learning_section(study: DictionaryStudy) -> Section:
    by = "objective" if len(study.judged) > 1 else None
    axes = plots.plot_learning_curve(study.learning_rows(), by=by, title="Squared error per coordinate while learning")
    return Section(
        name="learning",
        title="Learning",
        question="Had learning come to rest?",
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
    )  # fmt: skip
