"""Signals from a file: a matrix of numbers with one signal per row, from .npy, .npz, .csv or .parquet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from theodolite.cli.sources.words import listed, reason
from theodolite.data.readers import blaming, read_arrays
from theodolite.errors import nearest

if TYPE_CHECKING:
    import pandas

FILES = (".npy", ".npz", ".csv", ".parquet")
NOISE = 0.2  # standard deviation of the noise on the embedded digits, whose pixels are from 0 to 1


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
    text = str(name)
    parts = text.split(".")
    for candidate in (text, ".".join(parts[:-1])):
        try:
            float(candidate)
        except ValueError:
            continue
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
