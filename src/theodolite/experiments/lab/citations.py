"""What a source reports in another place than the figure whose claim it is, written shortly."""

from __future__ import annotations

from functools import partial
from typing import Any

from theodolite.experiments.claims import ReadFrom, Reported


def cited(source: str, value: Any, place: str, read_from: ReadFrom = "text") -> dict[str, Any]:
    """Keywords of a claim: `at_most(0.1, measure, **zhu("small", "Theorem 3.3.1"))` with `zhu = partial(cited, "Zhu 2024")`.

    >>> str(cited("Zhu 2024", "small", "Theorem 3.3.1")["reported"])
    'small (Zhu 2024, Theorem 3.3.1)'
    """
    return {"reported": Reported(value, f"{source}, {place}", read_from)}


zhu = partial(cited, "Zhu 2024")
