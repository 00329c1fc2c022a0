"""L5: the science. One file, one question; pure functions on a problem, one result each."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """A room of this folder, imported when it is named: `th.measures.dynamics`."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
