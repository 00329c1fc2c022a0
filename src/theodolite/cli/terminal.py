"""What several commands accept in their options and print for machines."""

from __future__ import annotations

import math
from typing import Any


def whole_numbers(option: str, text: str, *, least: int, example: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, in order, none twice.

    >>> whole_numbers("--sizes", "800,200,400", least=1, example="200,400,800")
    (200, 400, 800)
    """
    try:
        found = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} must be whole numbers with commas between them, as {example}. Got {text!r}.") from None
    if found[0] < least:
        raise ValueError(f"{option} must be at least {least}. Got {found[0]}.")
    if len(set(found)) < len(found):
        raise ValueError(f"{option} must be different numbers. Got {text!r}.")
    return found


def plain(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
