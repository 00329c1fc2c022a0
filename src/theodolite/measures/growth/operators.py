"""Growth operators: which layers of L are repeated to make L + k, and what the new layers start from.

Of the k consecutive layers from `start` on, k/block groups of `block` layers are made, and each group is
followed by as many new ones:

    prefix 0 .. start−1, then for each group [old × block] [new × block], then start+k .. L−1.

Layers count from 0. A new layer is a copy of its place in the group, a copy made to do less, or random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from theodolite.arguments import a_text, checked, count, each, either, fields_checked, integer, one_of, shown, whole
from theodolite.text import listed, nearest, quoted

#: What new layers start from, in the order in which ties between operators are broken.
#:
#: | init | a new layer is |
#: |---|---|
#: | `random` | drawn by the model's own initialiser |
#: | `copy` | a copy of a layer of its group |
#: | `identity` | a copy whose projections into the residual stream are zero, so that it adds nothing |
#: | `scaled` | a copy whose projections into the residual stream are halved |
INITS = ("random", "copy", "identity", "scaled")

#: How the picture writes a new layer.
_MARKS = {"random": "R", "copy": "{}", "identity": "I{}", "scaled": "S{}"}


class LayerOrigin(NamedTuple):
    """Where a layer of the grown model comes from: an old layer, or None for a random one; and whether it is new."""

    source: int | None
    is_new: bool


def _an_origin(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value, least=0, wanted="the number of a layer, or None for a random one")


@dataclass(frozen=True)
class GrowthOperator:
    """One way from L layers to L + k: the groups of `block` layers from `start` on are each followed by new ones.

    It knows how deep the model is that it is made for, so that its `layer_map()` is complete; `grow` refuses a model of another
    depth. `GrowthOperator.of(layers)` takes any list of layers instead; it then has no `start` and no `block`, and `order` is
    that list.

    Attributes:
        start: the first layer of the k that are cut into groups, from 0 to L − k.
        block: layers per group, a divisor of k.
        init: what new layers start from: "random", "copy", "identity" or "scaled", see `INITS`.
        layers: L, the layers of the model.
        added: k, at most L.
        order: of an operator made from a list, the old layer in each place, None for a random one.

    >>> operator = GrowthOperator(1, 1, layers=6, added=3)
    >>> operator.name, operator.picture()
    ('1/1/copy', '0 1 [1] 2 [2] 3 [3] 4 5')
    >>> GrowthOperator(1, 3, "random", layers=6, added=3).picture()
    '0 1 2 3 [R R R] 4 5'
    """

    start: int | None
    block: int | None
    init: str = "copy"
    layers: int = field(kw_only=True)
    added: int = field(kw_only=True)
    order: tuple[int | None, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        either("init", self.init, INITS)
        fields_checked(self, layers=count, added=count)
        if self.order is not None:
            _check_order(self.order)
            return
        if self.start is None or self.block is None:
            raise ValueError(
                "start and block must be given; an operator from a list of layers is made by GrowthOperator.of(layers)."
            )
        fields_checked(self, start=whole, block=count)
        _check_depth(self.layers, self.added)
        if self.added % self.block:
            divisors = ", ".join(map(str, _divisors(self.added)))
            raise ValueError(f"block must divide the {self.added} new layers: {divisors}. Got {self.block}.")
        if self.start > self.layers - self.added:
            raise ValueError(
                f"start must be one of 0 .. {self.layers - self.added}, so that {self.added} layers follow in a model of "
                f"{self.layers}. Got {self.start}."
            )

    @classmethod
    def of(cls, layers: Iterable[int | None], init: str = "copy") -> GrowthOperator:
        """The operator of a list that names the old layer in each place, None for a random one.

        The first time a layer is named it is the old one, after that a new one. Growing drops nothing, so each of 0 .. L − 1 is
        named, in order the first time.

        >>> GrowthOperator.of([0, 1, None, 0, 2]).picture()
        '0 1 [R 0] 2'
        """
        order = tuple(each(_an_origin)("layers", layers))
        _check_order(order)
        depth = len({layer for layer in order if layer is not None})
        return cls(None, None, init, layers=depth, added=len(order) - depth, order=order)

    @property
    def depth(self) -> int:
        """L + k, the layers of the grown model."""
        return self.layers + self.added

    @property
    def name(self) -> str:
        """`start/block/init`, or the list of layers and the init; `growth_operator` reads it.

        >>> GrowthOperator(8, 4, layers=12, added=4).name, GrowthOperator.of([0, None, 1]).name
        ('8/4/copy', '0,R,1/copy')
        """
        if self.order is None:
            return f"{self.start}/{self.block}/{self.init}"
        return f"{','.join('R' if layer is None else str(layer) for layer in self.order)}/{self.init}"

    @property
    def key(self) -> tuple[Any, ...]:
        """By what operators are put in order, and ties between them broken: init, start, block; lists come last."""
        ordered = (self.order is not None, INITS.index(self.init), self.start or 0, self.block or 0)
        return (*ordered, tuple(-1 if layer is None else layer for layer in self.order or ()))

    def layer_map(self) -> list[LayerOrigin]:
        """For each layer of the grown model the old layer it starts from (None: random), and whether it is new.

        >>> [(source, is_new) for source, is_new in GrowthOperator(0, 1, layers=2, added=2).layer_map()]
        [(0, False), (0, True), (1, False), (1, True)]
        """
        templates = self.templates()
        new = self._new_places()
        named = self.order if self.order is not None else templates
        random = self.init == "random"
        return [
            LayerOrigin(None if fresh and (random or old is None) else old, fresh) for old, fresh in zip(named, new, strict=True)
        ]

    def templates(self) -> list[int]:
        """For each layer of the grown model the old layer whose shape and settings it has: of a random one, that of its group.

        >>> GrowthOperator(0, 2, "random", layers=3, added=2).templates()
        [0, 1, 0, 1, 2]
        """
        if self.order is not None:
            found: list[int] = []
            for layer in self.order:
                found.append(layer if layer is not None else found[-1] if found else 0)
            return found
        assert self.start is not None
        assert self.block is not None
        groups = range(self.start, self.start + self.added, self.block)
        middle = [layer for first in groups for _ in range(2) for layer in range(first, first + self.block)]
        return [*range(self.start), *middle, *range(self.start + self.added, self.layers)]

    def _new_places(self) -> list[bool]:
        """Whether the layer in each place is new: all but the first of each old layer."""
        seen: set[int] = set()
        new = []
        for layer in self.order if self.order is not None else self.templates():
            new.append(layer is None or layer in seen)
            if layer is not None:
                seen.add(layer)
        return new

    @checked(first=whole)
    def picture(self, first: int = 0) -> str:
        """The layers of the grown model in a line, new ones in brackets: R random, I1 an identity from layer 1, S1 a scaled copy.

        `first` is the number of the first layer.

        >>> GrowthOperator(1, 3, layers=6, added=3).picture(first=1)
        '1 2 3 4 [2 3 4] 5 6'
        """
        words, inside = [], False
        for source, is_new in self.layer_map():
            mark = "R" if source is None else _MARKS[self.init if is_new else "copy"].format(source + first)
            starts_group = is_new and not inside
            words.append(f"[{mark}" if starts_group else mark)
            if inside and not is_new:
                words[-2] += "]"
            inside = is_new
        return " ".join(words) + ("]" if inside else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.picture()}"


@checked(layers=count, added=count)
def growth_operators(
    layers: int,
    added: int,
    *,
    starts: Iterable[int] | None = None,
    blocks: Iterable[int] | None = None,
    inits: Sequence[str] = ("copy", "random"),
) -> list[GrowthOperator]:
    """All ways to put `added` layers into a model of `layers`: (L − k + 1) · d(k) operators for each init.

    Args:
        layers: L, the layers of the model.
        added: k, the new layers, at most L.
        starts: the first layers to try; None is all of 0 .. L − k.
        blocks: the sizes of groups to try; None is all divisors of k.
        inits: what new layers start from: any of "copy", "random", "identity" and "scaled".

    Returns:
        The operators, in the order in which ties between them are broken: by init (random first), start and block.

    >>> len(growth_operators(6, 3)), len(growth_operators(12, 4, starts=range(0, 9, 2)))
    (16, 30)
    """
    _check_depth(layers, added)
    first = range(layers - added + 1) if starts is None else each(whole)("starts", starts)
    sizes = _divisors(added) if blocks is None else each(count)("blocks", blocks)
    ways = each(one_of(*INITS))("inits", [inits] if isinstance(inits, str) else inits)
    found = {
        GrowthOperator(start, block, init, layers=layers, added=added)
        for init in dict.fromkeys(ways)
        for start in first
        for block in sizes
    }  # fmt: skip
    return sorted(found, key=lambda operator: operator.key)


# Names.


def _last(layers: int, added: int) -> GrowthOperator:
    """The last k layers again, on top: "last stacking"."""
    return GrowthOperator(layers - added, added, "copy", layers=layers, added=added)


def _random_top(layers: int, added: int) -> GrowthOperator:
    """k random layers on top."""
    return GrowthOperator(layers - added, added, "random", layers=layers, added=added)


def _interleave(layers: int, added: int) -> GrowthOperator:
    """Each of the k layers in the middle twice."""
    return GrowthOperator((layers - added) // 2, 1, "copy", layers=layers, added=added)


def _double(layers: int, added: int) -> GrowthOperator:
    """The whole model twice; k is L."""
    if added != layers:
        raise ValueError(f"'double' adds as many layers as there are: {layers}, which makes {2 * layers}. Got added={added}.")
    return GrowthOperator(0, layers, "copy", layers=layers, added=added)


def _upscale(layers: int, added: int) -> GrowthOperator:
    """Two overlapping halves: the k layers in the middle again, as one group."""
    return GrowthOperator((layers - added) // 2, added, "copy", layers=layers, added=added)


def _identity(layers: int, added: int) -> GrowthOperator:
    """The layers in k groups as even as can be, each followed by a zeroed copy of its last layer."""
    ends = [-(-(group + 1) * layers // added) - 1 for group in range(added)]
    return GrowthOperator.of([layer for old in range(layers) for layer in [old] * (1 + (old in ends))], "identity")


#: Operators by name, each made for L layers and k new ones.
NAMES: dict[str, Callable[[int, int], GrowthOperator]] = {
    "last": _last,
    "random-top": _random_top,
    "interleave": _interleave,
    "double": _double,
    "upscale": _upscale,
    "identity": _identity,
}


@checked(text=a_text, layers=count, added=count)
def growth_operator(text: str, layers: int, added: int) -> GrowthOperator:
    """The operator that a text names: one of `NAMES`, `start/block/init`, or `layers/init` as in "0,1,R,2/copy".

    >>> growth_operator("last", 12, 4).name, growth_operator("8/4/random", 12, 4).picture()
    ('8/4/copy', '0 1 2 3 4 5 6 7 8 9 10 11 [R R R R]')
    >>> growth_operator("identity", 4, 2).picture()
    '0 1 [I1] 2 3 [I3]'
    >>> growth_operator("lats", 12, 4)
    Traceback (most recent call last):
    ValueError: operator must be one of 'last', 'random-top', 'interleave', 'double', 'upscale', 'identity', or start/block/init
    as in '8/4/copy', or a list of layers as in '0,1,1,2/copy'. Got 'lats'; did you mean 'last'?
    """
    _check_depth(layers, added)
    word = text.strip()
    if word in NAMES:
        return NAMES[word](layers, added)
    parts = [part.strip() for part in word.split("/")]
    if len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal():
        return GrowthOperator(int(parts[0]), int(parts[1]), parts[2], layers=layers, added=added)
    places = [place.strip() for place in parts[0].split(",")]
    if len(parts) == 2 and len(places) > 1 and all(place.isdecimal() or place == "R" for place in places):
        found = GrowthOperator.of([None if place == "R" else int(place) for place in places], parts[1])
        if (found.layers, found.added) != (layers, added):
            raise ValueError(
                f"{text!r} makes {found.depth} layers of {found.layers}; wanted are {layers + added} of {layers}: name each of "
                f"0 .. {layers - 1} once and {added} of them, or R, again."
            )
        return found
    near = f"; did you mean {nearest(word, NAMES, count=1)[0]!r}?" if word.isalpha() else "."
    raise ValueError(
        f"operator must be one of {quoted(NAMES)}, or start/block/init as in '8/4/copy', or a list of layers as in "
        f"'0,1,1,2/copy'. Got {shown(text)}{near}"
    )


def added_layers(layers: int, target: int) -> int:
    """k of a target depth L + k.

    >>> added_layers(12, 12)
    Traceback (most recent call last):
    ValueError: layers must be above the 12 that the model has: it is the depth to grow to. Got 12.
    """
    if integer("layers", target) <= layers:
        raise ValueError(f"layers must be above the {layers} that the model has: it is the depth to grow to. Got {target}.")
    _check_depth(layers, target - layers)
    return target - layers


# Checks.


def _check_depth(layers: int, added: int) -> None:
    if added > layers:
        raise ValueError(
            f"added must be at most the {layers} layers that there are, for new layers start from old ones. Got {added}: grow by "
            f"'double' to {2 * layers} first, train, and grow again."
        )


def _check_order(order: Sequence[int | None]) -> None:
    """Each old layer is there, and the old ones come in their order."""
    old = list(dict.fromkeys(layer for layer in order if layer is not None))
    depth = 1 + max(old, default=-1)
    if depth > len(old):
        missing = [layer for layer in range(len(order) + 1) if layer not in old and layer < depth]
        raise ValueError(
            f"layers must name each of 0 .. {depth - 1}, for growing drops none. {listed(missing, 5)} is missing in "
            f"{shown(list(order))}."
        )
    if not old or old != sorted(old):
        raise ValueError(
            f"layers must name the old layers in their order, the first time each is named. Got {shown(list(order))}."
        )
    if len(order) == depth:
        raise ValueError(f"layers must name at least one layer again, or None for a random one. Got {shown(list(order))}.")


def _divisors(number: int) -> list[int]:
    """All divisors in order.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
