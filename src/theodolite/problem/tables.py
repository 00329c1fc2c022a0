"""Tables and arrays of other libraries as tensors: pandas frames with the names of their columns and classes, NumPy arrays.

pandas is never imported here: whoever has a frame has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.errors import NonFiniteError
from theodolite.text import listed

#: How columns of each kind become numbers; {0} is a list of the columns, {1} the first of them.
_CLASSES = (
    "pd.get_dummies(frame, columns={0}) makes columns of 0 and 1, "
    "frame[{1}].astype('category').cat.codes makes numbers for an nn.Embedding"
)
_LABELS = "y.astype('category') numbers the classes and keeps their names"
_REMEDIES = {
    "text": _CLASSES,
    "category": _CLASSES,
    "date": "(frame[{1}] - frame[{1}].min()).dt.total_seconds() makes a number of a date",
    "duration": "frame[{1}].dt.total_seconds() makes a number of a duration",
}


def is_frame(value: Any) -> bool:
    """Whether this is a pandas DataFrame."""
    pandas: Any = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _is_series(value: Any) -> bool:
    pandas: Any = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series)


def is_array(value: Any) -> bool:
    """Whether this is a NumPy array, a table, or something else that wants to be an array."""
    return hasattr(value, "__array__") and not isinstance(value, Tensor)


def as_tensors(inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets as tensors in torch's default precision; tensors as they are."""
    dtype = torch.get_default_dtype()
    return (
        inputs if isinstance(inputs, Tensor) else input_tensor(inputs, dtype, check=False),
        targets if isinstance(targets, Tensor) else target_tensor(targets, dtype, real=False, check=False)[0],
    )


def column_names(frame: Any) -> tuple[str, ...]:
    """The names of a frame's columns."""
    return tuple(map(str, frame.columns))


def input_tensor(value: Any, dtype: torch.dtype, *, whole: bool = False, check: bool = True) -> Tensor:
    """Inputs as numbers: real ones in `dtype`; the whole numbers of a table too, unless they are to stay `whole` (tokens).

    `check` refuses missing values, with the names of their columns.
    """
    if is_frame(value) or _is_series(value):
        return _table_tensor(value, dtype, real=not whole, check=check, what="inputs")
    return _array_tensor(value, dtype, real=False, what="inputs")


def target_tensor(
    value: Any, dtype: torch.dtype, *, real: bool, known: tuple[str, ...] | None = None, check: bool = True
) -> tuple[Tensor, tuple[str, ...] | None]:
    """Targets as numbers, and the names of their classes where they are categories; `real`: the loss compares real numbers.

    Categories are numbered as in `known`, where an earlier table has set the order.
    """
    if is_frame(value) and value.shape[1] == 1 and _kind(value.dtypes.iloc[0]) == "category":
        value = value.iloc[:, 0]
    if _is_series(value) and _kind(value.dtype) == "category":
        codes, names = _codes(value, known)
        return codes.to(dtype) if real else codes, names
    if is_frame(value) or _is_series(value):
        return _table_tensor(value, dtype, real=real, check=check, what="targets"), None
    return _array_tensor(value, dtype, real=real, what="targets"), None


def _array_tensor(value: Any, dtype: torch.dtype, *, real: bool, what: str) -> Tensor:
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"data: the {what} are an array of {array.dtype}, which is no number. Turn it into numbers first: "
            "np.unique(array, return_inverse=True)[1] numbers the values of a text, array.astype(float) reads digits."
        )
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    if not array.flags.writeable or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))  # a copy: torch shares memory, and warns of what it must not write to
    t = torch.as_tensor(array)
    return t.to(dtype) if t.is_floating_point() or real else t


def _table_tensor(table: Any, dtype: torch.dtype, *, real: bool, check: bool, what: str) -> Tensor:
    """A frame (n, columns) or a series (n,) of numbers."""
    frame = table.to_frame("y" if table.name is None else table.name) if _is_series(table) else table
    kinds = [_kind(column) for column in frame.dtypes]
    _refuse_other_kinds(frame, kinds, what)
    whole = not real and "real" not in kinds
    missing = frame.isna().to_numpy().sum(0)
    if check and missing.any():
        raise NonFiniteError(f"data: the {what} {_missing(frame, missing)}")
    values = frame.to_numpy(dtype="int64" if whole and not missing.any() else "float64", na_value=np.nan, copy=True)
    t = torch.from_numpy(np.ascontiguousarray(values))
    t = t if not t.is_floating_point() else t.to(dtype)
    if check and t.is_floating_point() and not bool(torch.isfinite(t).all()):
        bad = [name for name, fine in zip(column_names(frame), torch.isfinite(t).all(0).tolist(), strict=True) if not fine]
        raise NonFiniteError(f"data: the {what} hold infinite values in {_quoted(bad)}; remove or replace them.")
    return t[:, 0] if _is_series(table) else t


def _kind(dtype: Any) -> str:
    """real, whole, text, category, date or duration."""
    kind, name = getattr(dtype, "kind", "O"), str(dtype)
    if name.startswith("category"):
        return "category"
    if name.startswith("period"):
        return "date"
    return {"b": "whole", "i": "whole", "u": "whole", "f": "real", "M": "date", "m": "duration"}.get(kind, "text")


def _refuse_other_kinds(frame: Any, kinds: list[str], what: str) -> None:
    """One error for all columns that are no numbers, with what to do about each kind."""
    odd = {name: kind for name, kind in zip(column_names(frame), kinds, strict=True) if kind not in ("real", "whole")}
    if not odd:
        return
    found = listed((f"{name!r} ({kind})" for name, kind in odd.items()), 8)
    by_remedy: dict[str, list[str]] = {}
    for name, kind in odd.items():
        remedy = _LABELS if what == "targets" and _REMEDIES[kind] == _CLASSES else _REMEDIES[kind]
        by_remedy.setdefault(remedy, []).append(name)
    remedies = "; ".join(remedy.format(names, repr(names[0])) for remedy, names in by_remedy.items())
    missing = frame.isna().to_numpy().sum(0)
    also = f" They also {_missing(frame, missing)}" if missing.any() else ""
    raise ValueError(f"data: the {what} must be numbers, which {found} are not: {remedies}.{also}")


def _missing(frame: Any, missing: Any) -> str:
    where = [f"{name!r} ({count} of {len(frame)})" for name, count in zip(column_names(frame), missing, strict=True) if count]
    return (
        f"hold missing values in {listed(where, 8)}. Fill them, frame.fillna(frame.median(numeric_only=True)), or leave the rows "
        "out, frame.dropna()."
    )


def _quoted(names: list[str]) -> str:
    return listed(map(repr, names), 8)


def _codes(series: Any, known: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
    """The numbers of the categories of a series, in the order of `known` names where there is one."""
    names = tuple(map(str, series.cat.categories))
    codes = torch.from_numpy(np.array(series.cat.codes, dtype=np.int64))
    if bool((codes < 0).any()):
        raise NonFiniteError(f"data: {int((codes < 0).sum())} of {len(codes)} targets are missing. Leave these rows out.")
    if known is None or known == names:
        return codes, names
    unknown = [names[i] for i in codes.unique().tolist() if names[i] not in known]
    if unknown:
        raise ValueError(f"data: the classes {_quoted(unknown)} are not among those of the first data, {_quoted([*known])}.")
    place = {name: i for i, name in enumerate(known)}
    return torch.tensor([place.get(name, -1) for name in names])[codes], known
