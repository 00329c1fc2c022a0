"""`load`, `weights` and `where`: find a data set on disk and read it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from theodolite.data import catalog
from theodolite.data.base import DamagedDataError, DataError, Dataset, MissingDataError
from theodolite.data.catalog import Entry, Form
from theodolite.data.text import Documents, Text
from theodolite.text import nearest

VARIABLE = "THEODOLITE_DATA"

ImageName = Literal["mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "digits", "usps", "imagenet", "celeba", "fsdd"]
TextName = Literal["wikitext2", "tinyshakespeare", "tinystories_sample"]


@dataclass(frozen=True)
class Location:
    """Where a data set was found: the paths its reader gets, none if it needs no file."""

    name: str
    paths: tuple[Path, ...]
    form: Form

    @property
    def origin(self) -> str:
        """The file, or the folder of several; empty for a set without files."""
        if not self.paths:
            return ""
        return str(self.paths[0] if len(self.paths) == 1 else self.paths[0].parent)


@dataclass(frozen=True)
class Listed:
    """One line of the listing. `size` is what would be downloaded in bytes, None where unknown or nothing is."""

    name: str
    kind: str
    title: str
    terms: str
    fetchable: bool
    size: int | None
    found: str | None


@overload
def load(name: ImageName, *, folder: str | Path | None = None, **options: Any) -> Dataset: ...
@overload
def load(name: TextName, *, folder: str | Path | None = None) -> Text: ...
@overload
def load(name: Literal["ag_news"], *, folder: str | Path | None = None) -> Documents: ...
@overload
def load(name: str, *, folder: str | Path | None = None, **options: Any) -> Any: ...
def load(name: str, *, folder: str | Path | None = None, **options: Any) -> Any:
    """The data set of that name from `folder`, `$THEODOLITE_DATA` or the user's cache folder, whichever has it first.

    The published files come first, then `NAME.npz`, then `NAME_subset.npz`; `origin` tells which it was.
    Options go to the reader: `length` of fsdd, `attribute`, `size`, `limit` of celeba, `size`, `per_class` of
    imagenet.

    >>> load("digits")
    Dataset(digits: 1438 train, 359 test, 1x8x8 uint8, 10 classes)
    """
    entry = catalog.get(name)
    if entry.kind == "weights":
        raise ValueError(f"{name!r} is a set of weights: theodolite.data.weights({name!r}).")
    content, location = _read(entry, folder, options)
    return replace(content, name=name, origin=location.origin or content.origin)


def weights(name: str, *, folder: str | Path | None = None) -> dict[str, Tensor]:
    """The weights of a trained network under their state-dict names: `resnet20_cifar10` or `stories260k`."""
    entry = catalog.get(name)
    if entry.kind != "weights":
        known = [n for n in catalog.names() if catalog.get(n).kind == "weights"]
        raise ValueError(f"{name!r} is a data set, not weights. Weights: {', '.join(nearest(name, known))}.")
    content, _ = _read(entry, folder, {})
    return {key: torch.from_numpy(array) for key, array in content.items()}


def where(name: str, *, folder: str | Path | None = None) -> Location:
    """Where `load` would read the data set from; `MissingDataError` says where it was looked for."""
    return find(catalog.get(name), folder)


def listing() -> list[Listed]:
    """One line for each known data set, those of other packages included."""
    rows = []
    for name in catalog.names():
        try:
            entry = catalog.get(name)
        except DataError as error:  # another package's entry is broken: say so, keep the rest
            rows.append(Listed(name, "?", str(error), "", False, None, None))
            continue
        sizes = [file.size for file in entry.files if file.url]
        try:
            found = find(entry).origin or "always there"
        except MissingDataError:
            found = None
        size = None if None in sizes or not sizes else sum(s for s in sizes if s is not None)
        rows.append(Listed(name, entry.kind, entry.title, entry.terms, entry.fetchable, size, found))
    return rows


def roots(folder: str | Path | None = None) -> list[Path]:
    """Where data sets are looked for, in this order; a folder that was named is the only one."""
    if folder is not None:
        return [Path(folder).expanduser()]
    variable = os.environ.get(VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "theodolite" / "data"
    return [path.expanduser() for path in (*([Path(variable)] if variable else []), cache)]


def find(entry: Entry, folder: str | Path | None = None) -> Location:
    """The best form that is whole anywhere: a part of the data in one place must not hide the whole in another."""
    partial = []
    for form in entry.forms:
        for root in roots(folder):
            # The set's own folders of `root`, then `root` itself.
            own = [root / name for name in entry.folders]
            for place in own if folder is None and form.own_folder else [*own, root]:
                found = [next((p for name in names for p in sorted(place.glob(name))), None) for names in form.needs]
                paths = tuple(path for path in found if path is not None)
                if len(paths) == len(form.needs):
                    return Location(entry.name, paths, form)
                if paths:
                    partial.append(f"{place} lacks {form.needs[found.index(None)][0]}")
    raise MissingDataError(_missing(entry, folder, partial))


def remedy(entry: Entry) -> str:
    """What the user can do to get the files."""
    if entry.fetchable:
        return f"Get it with: theodolite data fetch {entry.name}"
    if entry.bring:
        home = f"as ${VARIABLE}/{entry.folders[0]} or " if entry.folders else ""
        return f"{entry.bring}, {home}named with folder=. It cannot be fetched ({entry.terms})."
    files = ", ".join(f"{file.name} ({file.digest})" for file in entry.files)
    return f"It has no public address: put {files} into a folder and name that with ${VARIABLE} or folder=."


def _missing(entry: Entry, folder: str | Path | None, partial: list[str]) -> str:
    unset = folder is None and not os.environ.get(VARIABLE)
    places = ", ".join(map(str, roots(folder))) + (f" (${VARIABLE} is not set)" if unset else "")
    incomplete = f" Incomplete: {'; '.join(partial)}." if partial else ""
    return f"{entry.name} is not there. Looked in {places}.{incomplete} {remedy(entry)}"


def _read(entry: Entry, folder: str | Path | None, options: dict[str, Any]) -> tuple[Any, Location]:
    location = find(entry, folder)
    odd = [option for option in options if option not in location.form.options]
    if odd:
        known = ", ".join(location.form.options) or "none"
        raise ValueError(f"{entry.name} has no option {odd[0]!r}. Options: {known}.")
    try:
        return location.form.read(*location.paths, **options), location
    except DamagedDataError as error:
        again = f"Remove it and get it anew with: theodolite data fetch {entry.name}" if entry.fetchable else remedy(entry)
        raise DamagedDataError(error.path, error.problem, again) from error
