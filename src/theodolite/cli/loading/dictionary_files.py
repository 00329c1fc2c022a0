"""What `theodolite dictionary` reads and writes: signals from files, and the folder of a study."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.analyses.dictionary_study import DictionaryPlan, DictionaryStudy, Learner, encode
from theodolite.cli.loading.module_attribute import reason
from theodolite.cli.terminal import check_folder, plain
from theodolite.data.readers import blaming, read_arrays
from theodolite.files import write_whole
from theodolite.measures.dictionary import DictionaryChoice, LearnerState, SparseCodes
from theodolite.measures.dictionary.learning import Objective
from theodolite.results import Outcome, Row, fields_of
from theodolite.text import listed, nearest

if TYPE_CHECKING:
    import pandas

FILES = (".npy", ".npz", ".csv", ".parquet")
NOISE = 0.2  # standard deviation of the noise on the embedded digits, whose pixels are from 0 to 1

Kept = tuple[dict[Objective, Learner], DictionaryChoice | None]
FORMAT = "theodolite dictionary"
_STATE = ("components", "first", "second")
_FREE = ("epochs", "objectives")  # what a run that goes on may change


@dataclass(frozen=True)
class Signals:
    """Signals (n, d), NaN where missing; `shape` is that of one signal where the file says so, `names` those of its columns."""

    values: NDArray[Any]
    name: str
    origin: str
    shape: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None


def read_signals(path: Path, *, key: str | None = None, columns: str | None = None) -> Signals:
    """The signals of a file; `key` names an array of an .npz, `columns` (names or globs with commas) those of a table."""
    suffix = path.suffix.lower()
    if suffix not in FILES:
        raise ValueError(f"DATA must be a file that ends in {listed(FILES)}. Got {str(path)!r}.")
    if not path.is_file():
        raise FileNotFoundError(f"DATA: there is no file {path}.")
    table = suffix in (".csv", ".parquet")
    if key is not None and suffix != ".npz":
        raise ValueError(f"--key names an array of an .npz. {path.name} has none.")
    if columns is not None and not table:
        raise ValueError(f"--columns chooses among the columns of a .csv or .parquet. {path.name} has no names.")
    if table:
        frame = _read_csv(path) if suffix == ".csv" else _read_parquet(path)
        return _from_table(frame, path, columns)
    return _from_array(_read_npy(path) if suffix == ".npy" else _one_of(read_arrays(path), path, key), path)


def example_signals(seed: int = 0) -> Signals:
    """scikit-learn's handwritten digits, 8 × 8 pixels, with noise on every pixel."""
    from theodolite.data import load

    digits = load("digits").scaled().flat()
    clean = np.asarray(digits.x_train, dtype=np.float64)
    noisy = clean + NOISE * np.random.default_rng((seed, 4)).standard_normal(clean.shape)
    origin = f"scikit-learn digits, pixels from 0 to 1, Gaussian noise of {NOISE:g} added"
    return Signals(noisy, "noisy handwritten digits", origin, shape=(8, 8))


def check_signals(signals: Signals, missing: str) -> None:
    """Refuse what nothing can be learned from."""
    values, name = signals.values, signals.origin
    if values.shape[0] < 2 or values.shape[1] < 2:
        raise ValueError(
            f"{name} holds {values.shape[0]} signals of {values.shape[1]} numbers; at least 2 of 2 are needed, one per row."
        )
    if np.isinf(values).any():
        raise ValueError(f"{name} holds {int(np.isinf(values).sum())} infinite numbers; remove or replace them first.")
    lacking = np.isnan(values)
    if lacking.any() and missing == "error":
        raise ValueError(
            f"{name} lacks {int(lacking.sum())} of {values.size} numbers (NaN). --missing mask learns from those that are there."
        )
    if lacking.all():
        raise ValueError(f"{name}: every number is missing.")
    if not np.nan_to_num(values).any():
        raise ValueError(f"{name}: all signals are zero; there is nothing to learn from.")


def parse_shape(text: str, dim: int) -> tuple[int, ...]:
    """`8x8` or `8x8x3` as numbers, which must make up a signal.

    >>> parse_shape("4x16", 64)
    (4, 16)
    """
    try:
        shape = tuple(int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        shape = ()
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[2:] not in ((), (3,)) or math.prod(shape) != dim:
        raise ValueError(f"--patch-shape must read HEIGHTxWIDTH, or HEIGHTxWIDTHx3, with {dim} numbers in all. Got {text!r}.")
    return shape


def _read_npy(path: Path) -> NDArray[Any]:
    with blaming(path, "it is not a sound .npy"), path.open("rb") as file:
        return np.asarray(np.load(file, allow_pickle=False))


def _one_of(arrays: dict[str, NDArray[Any]], path: Path, key: str | None) -> NDArray[Any]:
    if key is None and len(arrays) == 1:
        return next(iter(arrays.values()))
    if key is None:
        raise ValueError(f"{path.name} holds the arrays {listed(arrays)}; choose one by --key.")
    if key not in arrays:
        raise ValueError(f"{path.name} has no array {key!r}. It holds {listed(arrays)}.")
    return arrays[key]


def _from_array(array: NDArray[Any], path: Path) -> Signals:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path.name} must hold real numbers. Got {array.dtype}.")
    if array.ndim < 2:
        raise ValueError(f"{path.name} must hold one signal per row, shape (n, d). Got shape {array.shape}.")
    shape = array.shape[1:] if array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3) else None
    flat = array.reshape(len(array), -1) if array.size else array.reshape(len(array), math.prod(array.shape[1:]))
    values = flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)
    return Signals(values, path.stem, path.name, shape=shape)


def _read_csv(path: Path) -> pandas.DataFrame:
    import pandas

    try:
        frame = pandas.read_csv(path)
        if len(frame.columns) and all(_is_number(name) for name in frame.columns):  # its first line is no header
            frame = pandas.read_csv(path, header=None)
            frame.columns = pandas.Index([f"column {i}" for i in range(frame.shape[1])])
    except (ValueError, UnicodeDecodeError) as error:  # pandas' own errors are ValueErrors
        raise ValueError(f"{path.name} cannot be read as a table: {reason(error).rstrip('.')}.") from error
    return frame


def _is_number(name: Any) -> bool:
    # pandas tells equal names apart by a suffix: 0.5 and 0.5.1
    for candidate in (str(name), str(name).rpartition(".")[0]):
        with suppress(ValueError):
            float(candidate)
            return True
    return False


def _read_parquet(path: Path) -> pandas.DataFrame:
    import pandas

    try:
        return pandas.read_parquet(path)
    except ImportError:
        raise ValueError(f"Reading {path.name} needs the package pyarrow (or fastparquet): pip install pyarrow.") from None
    except Exception as error:  # the engines raise errors of their own
        raise ValueError(f"{path.name} is no sound .parquet: {reason(error).rstrip('.')}.") from error


def _from_table(frame: pandas.DataFrame, path: Path, columns: str | None) -> Signals:
    frame.columns = frame.columns.map(str)
    chosen = list(frame.columns) if columns is None else _chosen(list(frame.columns), columns)
    frame = frame[chosen]
    wrong = [name for name, kind in frame.dtypes.items() if kind.kind not in "biuf"]
    if wrong:
        example = frame[wrong[0]].dropna()
        seen = f", as {str(example.iloc[0])[:30]!r}" if len(example) else ""
        raise ValueError(
            f"{path.name}: {listed(wrong[:5])}{' …' if len(wrong) > 5 else ''} {'hold' if len(wrong) > 1 else 'holds'} no numbers"
            f"{seen}. --columns names the columns to use."
        )
    values = frame.to_numpy(dtype=np.float64, na_value=np.nan)
    return Signals(values, path.stem, path.name, names=tuple(chosen))


def _chosen(names: list[str], columns: str) -> list[str]:
    """Columns by names and globs, in the order they are named, none twice."""
    found: list[str] = []
    for word in (part.strip() for part in columns.split(",")):
        fitting = [name for name in names if name == word] or [name for name in names if fnmatchcase(name, word)]
        if not fitting:
            raise ValueError(f"--columns: there is no column {word!r}. Nearest names: {listed(nearest(word, names, 3))}.")
        found += fitting
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Folder:
    """The folder of a run: `run.json` says what it is, `learner-OBJECTIVE.npz` where learning stands."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    def learner(self, objective: str) -> Path:
        return self.path / f"learner-{objective}.npz"

    def refuse_existing(self) -> None:
        check_folder(self.path)
        if self.manifest.exists():
            raise ValueError(
                f"{self.path} already holds a dictionary. Go on with it by --resume, do it anew by --fresh, or choose another "
                "folder."
            )

    def begin(self, plan: DictionaryPlan, data: NDArray[Any]) -> Kept:
        """Start anew: what an earlier run has kept is forgotten."""
        for old in self.path.glob("learner-*.npz"):
            old.unlink()
        self._write({"format": FORMAT, "version": 1, "data": digest(data), "plan": _plain_plan(plan), "choice": None})
        return {}, None

    def take_up(self, plan: DictionaryPlan, data: NDArray[Any]) -> Kept:
        """What a run has kept, for the same data and the same plan; only passes and objectives may differ."""
        if not self.manifest.exists():
            return self.begin(plan, data)
        kept = self._read()
        if kept["data"] != digest(data):
            raise ValueError(f"{self.path} holds a dictionary of other data. Choose another --out, or --fresh.")
        wanted = _plain_plan(plan)
        for name, value in wanted.items():
            if kept["plan"].get(name) != value:
                raise ValueError(
                    f"{self.path} was learned with {name.replace('_', ' ')} {kept['plan'].get(name)}, now it is {value}. "
                    "Give the same settings with --resume, or --fresh."
                )
        files = {objective: self.learner(objective) for objective in plan.objectives}
        learned = {objective: _read_learner(file, data.shape[1]) for objective, file in files.items() if file.is_file()}
        return learned, _choice_of(kept["choice"])

    def keep(self, objective: str, learner: Learner) -> None:
        arrays = {name: getattr(learner.state, name).numpy() for name in _STATE}
        counts = {"step": learner.state.step, "epoch": learner.state.epoch}
        write_whole(self.learner(objective), _bytes(np.savez, **arrays, **counts, losses=learner.losses.numpy()))

    def keep_choice(self, choice: DictionaryChoice) -> None:
        kept = fields_of(choice, "n_components sparsity simplest_components simplest_sparsity table seed")
        self._write(self._read() | {"choice": kept})

    def write_results(self, study: DictionaryStudy, plan: DictionaryPlan, signals: NDArray[Any], *, codes: bool) -> list[Path]:
        """Atoms, tables and, where wanted, codes; the files written."""
        written = []
        for objective, judged in study.judged.items():
            name = "components.npy" if objective == study.main else f"components-{objective}.npy"
            written.append(self._put(name, _bytes(np.save, judged.learner.components.numpy())))
        if study.offset is not None:
            written.append(self._put("offset.npy", _bytes(np.save, study.offset.numpy())))
        atoms = [{"objective": name, **row} for name, judged in study.judged.items() for row in judged.usage.rows()]
        tables: dict[str, Sequence[Row]] = {"rows.csv": study.rows(), "atoms.csv": atoms, "learning.csv": study.learning_rows()}
        if study.choice is not None:
            tables["choice.csv"] = study.choice.rows()
        written += [self._put(name, _csv(rows)) for name, rows in tables.items()]
        if codes:
            written.append(self._put("codes.npz", _sparse(encode(signals, study, plan), len(study.components))))
        return written

    def _put(self, name: str, content: bytes) -> Path:
        write_whole(self.path / name, content)
        return self.path / name

    def _read(self) -> dict[str, Any]:
        try:
            kept: dict[str, Any] = json.loads(self.manifest.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT:
                raise KeyError(kept["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.manifest} is not what a dictionary run leaves; --fresh starts anew.") from error
        return kept

    def _write(self, content: Mapping[str, Any]) -> None:
        write_whole(self.manifest, json.dumps(plain(dict(content)), indent=1).encode())


def digest(data: NDArray[Any]) -> str:
    """What tells one matrix from another."""
    return hashlib.sha256(f"{data.dtype}{data.shape}".encode() + np.ascontiguousarray(data).tobytes()).hexdigest()


def _plain_plan(plan: DictionaryPlan) -> dict[str, Any]:
    """As JSON gives it back."""
    fixed = {name: value for name, value in asdict(plan).items() if name not in _FREE}
    found: dict[str, Any] = json.loads(json.dumps(plain(fixed)))
    return found


def _choice_of(kept: Mapping[str, Any] | None) -> DictionaryChoice | None:
    if kept is None:
        return None
    return DictionaryChoice(**{**kept, "table": tuple(kept["table"])}, outcome=Outcome.ESTIMATED)


def _read_learner(path: Path, dim: int) -> Learner:
    arrays = read_arrays(path)
    wanted = {*_STATE, "step", "epoch", "losses"}
    shapes = {arrays[name].shape for name in _STATE if name in arrays}
    if set(arrays) != wanted or len(shapes) != 1 or len(shape := next(iter(shapes))) != 3 or shape[2] != dim:
        raise ValueError(f"{path} is not what a dictionary run leaves; --fresh starts anew.")
    tensors = {name: torch.from_numpy(arrays[name]) for name in _STATE}
    state = LearnerState(**tensors, step=int(arrays["step"]), epoch=int(arrays["epoch"]))
    return Learner(state, torch.from_numpy(arrays["losses"]))


def _bytes(save: Callable[..., object], *values: Any, **arrays: Any) -> bytes:
    """What a function would write to a file."""
    buffer = io.BytesIO()
    save(buffer, *values, **arrays)
    return buffer.getvalue()


def _csv(rows: Sequence[Row]) -> bytes:
    import pandas

    return pandas.DataFrame(rows).to_csv(index=False).encode()


def _sparse(codes: SparseCodes | Tensor, atoms: int) -> bytes:
    """Codes (n, atoms) as scipy's sparse matrices are kept: `scipy.sparse.load_npz` reads them."""
    from scipy import sparse

    if isinstance(codes, Tensor):
        matrix = sparse.csr_matrix(codes.numpy())
    else:
        taken = codes.support >= 0
        rows = torch.arange(len(taken))[:, None].expand_as(taken)[taken]
        entries = (codes.values[taken].numpy(), (rows.numpy(), codes.support[taken].numpy()))
        matrix = sparse.csr_matrix(entries, shape=(len(taken), atoms))
    return _bytes(sparse.save_npz, matrix)
