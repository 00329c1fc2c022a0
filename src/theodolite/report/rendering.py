"""What all pages share: the template engine, which escapes whatever a user supplied, and texts as HTML wants them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_LONG = 30  # letters from which a word may be broken after its dots
_ADDRESS = re.compile(r"https?://\w[^\s<>\"]*", re.IGNORECASE)


@cache
def environment() -> Environment:
    """Templates of this package; every value is escaped unless a template says otherwise."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("theodolite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"pieces": pieces, "breakable": breakable}
    return made


def slug(name: str) -> str:
    """A name as part of an anchor: nothing but small letters, digits and hyphens.

    >>> slug("Learning rate_2"), slug('"><script>'), slug("λ")
    ('learning-rate-2', 'script', 'part')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"


def pieces(text: str) -> list[tuple[str, str]]:
    """A text cut into (words, address) with an empty address where nothing is linked; only http and https become links.

    >>> pieces("see https://a.org/b.")
    [('see ', ''), ('https://a.org/b', 'https://a.org/b'), ('.', '')]
    >>> pieces("javascript:alert(1)")
    [('javascript:alert(1)', '')]
    """
    found: list[tuple[str, str]] = []
    end = 0
    for match in _ADDRESS.finditer(text):
        address = _without_the_stop(match.group())
        found += [(text[end : match.start()], ""), (address, address)]
        end = match.start() + len(address)
    return [piece for piece in [*found, (text[end:], "")] if piece[0]]


def breakable(text: Any) -> Markup:
    """The text escaped, long names with places where a line may end: a name cut in mid-word is hard to read.

    >>> str(breakable("<b> blocks.11.attention.query_projection"))
    '&lt;b&gt; blocks.<wbr>11.<wbr>attention.<wbr>query_<wbr>projection'
    """
    from markupsafe import Markup, escape

    words = [re.split(r"(?<=[./_\\:-])", word) if len(word) >= _LONG else [word] for word in re.split(r"(\s+)", str(text))]
    return Markup("").join(Markup("<wbr>").join(escape(part) for part in word if part) for word in words)


def _without_the_stop(address: str) -> str:
    """The address without what ends the sentence around it; a bracket stays where it was opened inside."""
    while address[-1] in ".,;:!?'" or (address[-1] == ")" and address.count(")") > address.count("(")):
        address = address[:-1]
    return address
