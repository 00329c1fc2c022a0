"""Words for numbers and names: the only text helpers."""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable

#: Categories of characters that a terminal obeys or hides: controls, directions, halves of pairs, ends of lines.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: object) -> str:
    r"""The text with control characters written out: no terminal obeys a name from a stranger's file. Lines and tabs stay.

    >>> print(printable("layer\x1b[2J\u202e.weight"), printable("größer ≥ 3"))
    layer\x1b[2J\u202e.weight größer ≥ 3
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(_written_out(c) if c not in "\n\t" and unicodedata.category(c) in _UNSEEN else c for c in text)


def _written_out(characters: str) -> str:
    return characters.encode("unicode_escape").decode()


def number(value: float, error: float | None = None) -> str:
    """A number with its error, as a sentence shows it: rounded to two digits of the error, and to four of its own at the most.

    An error that does not show at this precision is left to the tables.

    >>> number(0.123456, 0.00123), number(371.4, 184.2), number(1.5), number(float("inf"))
    ('0.1235 ± 0.0012', '370 ± 180', '1.5', 'infinite')
    >>> number(7.9123, 8.9e-7), number(-0.585374, 7e-5), number(1.234e-7, 3e-9), number(0.0, 1e-12)
    ('7.912', '-0.5854 ± 0.0001', '1.234e-07 ± 3e-09', '0 ± 1e-12')
    """
    if math.isinf(value):
        return "infinite"
    if error is None or not error > 0 or not math.isfinite(error):
        return f"{value:.4g}"
    size = max(abs(value), error)
    shown = 0.5 * 10.0 ** (math.floor(math.log10(size)) - 3)  # half of the fourth digit
    if error < shown:
        return f"{value:.4g}"
    if not 1e-3 <= size < 1e6:
        return f"{value:.4g} ± {error:.1g}"
    digits = min(1 - math.floor(math.log10(error)), 3 - math.floor(math.log10(size)))  # decimals
    if digits < 0:
        return f"{round(value, digits):.0f} ± {round(error, digits):.0f}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(0.004), duration(3.21), duration(48.2), duration(125), duration(7300)
    ('0.004 s', '3.2 s', '48 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 59.5:
        return f"{seconds:.1g} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def grouped(value: float) -> str:
    """Three digits that count, large numbers written out in groups.

    >>> grouped(41234.5), grouped(0.012345), grouped(1.6e9), grouped(-3.14159)
    ('41 200', '0.0123', '1.6e+09', '-3.14')
    """
    if 1e4 <= abs(value) < 1e8:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    return f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "layer"), plural(0, "layer"), plural(3, "excluded word")
    ('1 layer', '0 layers', '3 excluded words')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Iterable[object], most: int | None = None) -> str:
    """Names with commas between them, the first `most` of them, or the word none.

    >>> listed("abc"), listed("abc", most=2), listed([])
    ('a, b, c', 'a, b and 1 more', 'none')
    """
    words = [printable(name).replace("\n", "\\n") for name in names]
    shown = words if most is None else words[:most]
    rest = len(words) - len(shown)
    return (", ".join(shown) + (f" and {rest} more" if rest else "")) or "none"


def the_layers(names: Iterable[object], most: int = 4) -> str:
    """Layers as a sentence names them, for their names are often numbers.

    >>> the_layers(["2"]), the_layers(["conv1", "conv2"])
    ('layer 2', 'layers conv1, conv2')
    """
    found = list(names)
    return f"layer{'s' if len(found) > 1 else ''} {listed(found, most)}"


def quoted(names: Iterable[object], last: str = "") -> str:
    """Names in quotes; `last` is the word before the last one.

    >>> quoted(["a", "b", "c"]), quoted(["a", "b", "c"], "or"), quoted(["a"], "or")
    ("'a', 'b', 'c'", "'a', 'b' or 'c'", "'a'")
    """
    shown = [repr(name) for name in names]
    if not last or len(shown) < 2:
        return ", ".join(shown)
    return f"{', '.join(shown[:-1])} {last} {shown[-1]}"


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """The names of `known`, most similar to `name` first.

    >>> nearest("fc1.wieght", ["fc1.bias", "fc1.weight", "conv.weight"], count=1)
    ['fc1.weight']
    """
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())[:count]
