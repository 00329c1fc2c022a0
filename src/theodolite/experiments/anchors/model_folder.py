"""The folder with language models that are not downloaded: checkpoints a user brings, and small ones trained here."""

from __future__ import annotations

import os
from pathlib import Path

from theodolite.errors import TheodoliteError

VARIABLE = "THEODOLITE_MODELS"


class MissingModelError(TheodoliteError, FileNotFoundError):
    """A language model, or what is needed to read it, is not there."""


def models_folder() -> Path | None:
    """The folder that $THEODOLITE_MODELS names, if it does."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else None


def checkpoint_folder(name: str, wanted: tuple[str, ...] = ()) -> Path:
    """The folder of a Hugging Face checkpoint inside that folder; `wanted` are all that an experiment asks for."""
    root = models_folder()
    path = None if root is None else root / name
    if path is not None and (path / "config.json").is_file():
        return path
    looked = f"${VARIABLE} is not set" if path is None else f"{path} has no config.json"
    folders = ", ".join(wanted or (name,))
    raise MissingModelError(
        f"The checkpoint {name!r} is not there: {looked}. Put Hugging Face checkpoints (config.json, weights, tokenizer) into "
        f"the folders {folders} of one directory and name that with ${VARIABLE}. Nothing is downloaded."
    )
