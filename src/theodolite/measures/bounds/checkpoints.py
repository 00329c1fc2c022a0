"""What a certificate under way keeps in a folder: the network that a split has trained, and the fit after each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from theodolite.errors import ArgumentError
from theodolite.training.interruption import NAME, load_state, save_state

#: Folders within the folder.
SPLIT, FIT = "split", "fit"


def holds_fit(folder: Path) -> bool:
    """Whether something was kept in a folder."""
    return any((folder / part / NAME).exists() for part in (SPLIT, FIT))


def forget_fit(folder: Path) -> None:
    """Take away what was kept, and nothing else."""
    for part in (SPLIT, FIT):
        (folder / part / NAME).unlink(missing_ok=True)
    for place in (folder / SPLIT, folder / FIT, folder):
        with suppress(OSError):  # it is not there, or holds something of the user's
            place.rmdir()


def keep(folder: Path, part: str, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a part; `identity` is what it belongs to."""
    save_state(folder / part, {"identity": dict(identity), "state": dict(state)})


def kept(folder: Path, part: str, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a part, None where there is none; raises where it belongs to something else."""
    found = load_state(folder / part)
    if found is None:
        return None
    if found["identity"] != identity:
        raise ArgumentError(f"checkpoint: {folder} holds a {part} of other data, weights or settings. Give another folder.")
    state: dict[str, Any] = found["state"]
    return state


def fit_length(folder: Path) -> tuple[int, int] | None:
    """Epochs and passes of the fit in a folder, None where there is none."""
    found = load_state(folder / FIT)
    return None if found is None else (int(found["state"]["epochs"]), int(found["state"]["passes"]))
