"""Tables in files: .csv, with a header or without, and .parquet."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.cli.loading.module_attribute import reason

if TYPE_CHECKING:
    import pandas

TABLES = (".csv", ".parquet")


def read_table(path: Path) -> pandas.DataFrame:
    """A table with named columns."""
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)


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
