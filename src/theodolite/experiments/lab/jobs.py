"""The jobs of a study as a grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def grid(p: Mapping[str, Any], *names: str, **lists: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """A job for each combination of the values in `lists`, the last changing fastest, with those parameters that are named.

    >>> list(grid({"steps": 9, "width": 5}, "steps", rate=(0.1, 0.2), seed=range(1)))
    [{'steps': 9, 'rate': 0.1, 'seed': 0}, {'steps': 9, 'rate': 0.2, 'seed': 0}]
    """
    shared = {name: p[name] for name in names}
    for values in itertools.product(*lists.values()):
        yield {**shared, **dict(zip(lists, values, strict=True))}
