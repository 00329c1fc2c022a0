"""`theodolite dictionary`: atoms of the user's own signals, judged by what they predict of hidden coordinates."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.cli.ctrl_c import exit_when_interrupted
from theodolite.cli.terminal import Seed, check_counts, show, whole_numbers

if TYPE_CHECKING:
    from theodolite.analyses.dictionary_study import DictionaryPlan, DictionaryStudy
    from theodolite.cli.loading.dictionary_files import Folder, Signals

#: The example: noisy digits with more atoms, and more of them per signal, than hidden coordinates would choose.
EXAMPLE: dict[str, Any] = {
    "n_components": 200,
    "sparsity": 5,
    "objectives": ("masked", "reconstruction"),
    "epochs": 100,
    "center": True,
}


Aim = StrEnum("Aim", {"MASKED": "masked", "RECONSTRUCTION": "reconstruction", "BOTH": "both"})
Init = StrEnum("Init", {"SAMPLES": "samples", "RANDOM": "random"})
Decoding = StrEnum("Decoding", {"OMP": "omp", "LASSO": "lasso"})
Missing = StrEnum("Missing", {"ERROR": "error", "MASK": "mask"})


def dictionary(
    data: Annotated[
        Path | None, typer.Argument(help="Signals, one per row: .npy, .npz, .csv or .parquet. Default: an example.")
    ] = None,
    components: Annotated[int | None, typer.Option(help="Atoms to learn. Default: as many as a signal has numbers.")] = None,
    sparsity: Annotated[int | None, typer.Option(help="Atoms per signal. Default: a tenth of its numbers.")] = None,
    objective: Annotated[
        Aim | None, typer.Option(help="What to learn by; both shows whether reconstruction overfits. Default: masked.")
    ] = None,
    hidden_fraction: Annotated[float, typer.Option(help="Share of the coordinates hidden at a time.")] = 0.1,
    epochs: Annotated[int | None, typer.Option(help="Passes over the signals. Default: enough for 2500 steps.")] = None,
    init: Annotated[Init, typer.Option(help="Where atoms start.")] = Init.SAMPLES,
    decoder: Annotated[Decoding, typer.Option(help="Matching pursuit, or the Lasso with --penalty.")] = Decoding.OMP,
    penalty: Annotated[float, typer.Option(help="Of the Lasso.")] = 0.1,
    missing: Annotated[Missing, typer.Option(help="NaN: refuse it, or learn from what is there.")] = Missing.ERROR,
    center: Annotated[
        bool | None, typer.Option(help="Take the mean signal away first. Default: no, but for the example.")
    ] = None,
    choose: Annotated[str | None, typer.Option(help="Numbers of atoms to compare, as 50,100,200; the best is taken.")] = None,
    sparsities: Annotated[str | None, typer.Option(help="Atoms per signal to compare, as 3,5,8.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the signals that only judge.")] = 0.2,
    batch_size: Annotated[int, typer.Option(help="Signals in a step.")] = 200,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    patch_shape: Annotated[str | None, typer.Option(help="Draw atoms as images, as 8x8 or 8x8x3.")] = None,
    key: Annotated[str | None, typer.Option(help="The array of an .npz.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of a table: names or globs, as 'age,pixel_*'.")] = None,
    codes: Annotated[bool, typer.Option("--codes", help="Also write the codes of all signals, a sparse matrix.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for atoms, tables and the page.")] = Path("dictionary"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder; more --epochs go further.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do a run that is there anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and rows as JSON on the standard output.")] = False,
    seed: Seed = 0,
) -> None:
    """Learn a dictionary: atoms of which a few, added up, make a signal; and say how far to trust it.

    Atoms are learned by predicting coordinates that were hidden, so they do not fit noise. Without arguments they are learned
    from noisy handwritten digits.
    """
    from theodolite.analyses.dictionary_study import DictionaryPlan
    from theodolite.cli.loading.dictionary_files import Folder, check_signals, example_signals, parse_shape, read_signals

    check_counts(0, seed=seed)
    folder = Folder(out)
    if not (resume or fresh):
        folder.refuse_existing()
    given: dict[str, Any] = {"n_components": components, "sparsity": sparsity, "epochs": epochs, "center": center}
    if objective is not None:
        given["objectives"] = EXAMPLE["objectives"] if objective is Aim.BOTH else (objective.value,)
    plan = DictionaryPlan(
        **{**(EXAMPLE if data is None else {}), **{name: value for name, value in given.items() if value is not None}},
        hidden_fraction=hidden_fraction,
        init=init.value,
        decoder=decoder.value,
        penalty=penalty,
        missing=missing.value,
        sizes=() if choose is None else whole_numbers("--choose", choose, least=1, example="50,100,200"),
        sparsities=() if sparsities is None else whole_numbers("--sparsities", sparsities, least=1, example="2,5,10"),
        held_out=held_out,
        batch_size=batch_size,
        learning_rate=lr,
        seed=seed,
    )
    signals = example_signals(seed) if data is None else read_signals(data, key=key, columns=columns)
    check_signals(signals, missing.value)
    shape = parse_shape(patch_shape, signals.values.shape[1]) if patch_shape else signals.shape
    with exit_when_interrupted("Interrupted. What was learned is kept; the same command with --resume goes on."):
        study = _study(signals, plan, folder, resume=resume)
    _report(study, signals, plan, folder, shape, codes=codes, as_json=as_json)


def _study(signals: Signals, plan: DictionaryPlan, folder: Folder, *, resume: bool) -> DictionaryStudy:
    """Everything is checked before the folder is touched."""
    from theodolite.analyses.dictionary_study import study_dictionary
    from theodolite.measures.dictionary.estimator import split_signals

    values = signals.values
    if not 0 < plan.held_out < 1:
        raise ValueError(f"held_out (--held-out) must be a share above 0 and below 1. Got {plan.held_out:g}.")
    plan.check(len(split_signals(values, plan.held_out, plan.seed)[0]), values.shape[1])
    learned, choice = folder.take_up(plan, values) if resume else folder.begin(plan, values)
    return study_dictionary(
        values, plan, learned=learned, choice=choice, keep=folder.keep, on_choice=folder.keep_choice, progress=None
    )


def _report(
    study: DictionaryStudy,
    signals: Signals,
    plan: DictionaryPlan,
    folder: Folder,
    shape: tuple[int, ...] | None,
    *,
    codes: bool,
    as_json: bool,
) -> None:
    """Write the files and the page, and say what was found."""
    from theodolite.analyses.dictionary import write_dictionary

    written = folder.write_results(study, plan, signals.values, codes=codes)
    page, findings = write_dictionary(
        study,
        folder.path / "index.html",
        name=signals.name,
        facts={"data": signals.origin},
        patch_shape=shape,
        feature_names=signals.names,
    )
    everything = {
        "findings": [finding.row() for finding in findings],
        "rows": study.rows(),
        "choice": None if study.choice is None else study.choice.rows(),
        "files": [str(path) for path in written],
        "page": str(page),
    }
    show(as_json, everything, *findings, f"The atoms are {written[0]}", f"The page is {page}")
