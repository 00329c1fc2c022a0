"""What the table of data sets is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["images", "text", "documents", "audio", "weights"]


@dataclass(frozen=True)
class File:
    """One file as published: its name on disk, its checksum `sha256:...` or `md5:...`, its address if public."""

    name: str
    digest: str
    url: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Form:
    """One way in which a data set lies in a folder.

    `needs` has an item for each file or folder that must be there: the names (or patterns) it may have.
    `read` gets the paths found, in that order, and those of its keyword arguments that `options` lists.
    Names that say nothing of the data set (`train.bin`) count only in a folder of its own.
    """

    needs: tuple[tuple[str, ...], ...]
    read: Callable[..., Any]
    own_folder: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One data set: forms in the order in which they are looked for, files, terms.

    `folders` are the names its own folder may have. `bring` tells how to provide what cannot be fetched.
    """

    name: str
    kind: Kind
    title: str
    terms: str
    forms: tuple[Form, ...]
    files: tuple[File, ...] = ()
    folders: tuple[str, ...] = ()
    bring: str = ""

    @property
    def fetchable(self) -> bool:
        return any(file.url for file in self.files)
