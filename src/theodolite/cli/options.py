"""What several commands accept in their options."""

from __future__ import annotations


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
