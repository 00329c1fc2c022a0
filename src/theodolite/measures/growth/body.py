"""The body of a model: the list of blocks of one type that growing makes longer."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from theodolite.arguments import a_text, checked
from theodolite.measures.growth.operators import GrowthOperator
from theodolite.problem.arguments import a_module
from theodolite.text import listed, nearest, plural, quoted

#: The shapes of a block's parameters by name: blocks that can stand in each other's place agree in it.
Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Body:
    """Where the blocks of a model are.

    Attributes:
        path: the name of the list in the model, such as "transformer.h"; "" where the model is the list itself.
        names: the blocks' names in the list, in order.
        fixed: places of blocks of another shape than most. Where these are the first ones, as in T5, they stay and are never
            copied; elsewhere the kinds of layers alternate.
        children: the names of all that is in the list, with what stands before and behind the blocks of an `nn.Sequential`.
    """

    path: str
    names: tuple[str, ...]
    fixed: tuple[int, ...]
    children: tuple[str, ...]

    @property
    def layers(self) -> int:
        """L, the number of blocks, those of another shape among them."""
        return len(self.names)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of this model, or of a copy of it."""
        inside: dict[str, Any] = dict(model.get_submodule(self.path)._modules)  # a block that stands there twice is there twice
        return [inside[name] for name in self.names]

    def prefix(self, name: str) -> str:
        """The beginning of the names of all that is in a child of the list.

        >>> Body("transformer.h", ("0", "1"), (), ("0", "1")).prefix("1")
        'transformer.h.1.'
        """
        return f"{self.path}.{name}." if self.path else f"{name}."


@dataclass(frozen=True)
class Layout:
    """The list of blocks as a growth operator makes it: which old block stands behind each place, and what it is called."""

    body: Body
    operator: GrowthOperator

    @cached_property
    def templates(self) -> list[int]:
        """For each new place the old block whose shape and settings it has; of a random one the nearest of usual shape."""
        free = [layer for layer in range(self.body.layers) if layer not in self.body.fixed]
        pairs = zip(self.operator.templates(), self.operator.layer_map(), strict=True)
        return [min(free, key=lambda layer: abs(layer - old)) if origin.source is None else old for old, origin in pairs]

    @cached_property
    def names(self) -> list[str]:
        """The blocks' names in the grown list: counted on where the old ones count, marked as copies where they do not."""
        stem, first = _counted(self.body.names)
        if first is not None:
            return [f"{stem}{first + place}" for place in range(len(self.templates))]
        times: Counter[int] = Counter()
        found = []
        for old in self.templates:
            mark = f"_copy{times[old]}" if times[old] else ""
            found.append(self.body.names[old] + mark)
            times[old] += 1
        return found

    @cached_property
    def children(self) -> list[tuple[str, str, int | None]]:
        """(new name, old name, place among the new blocks or None) of all that is in the grown list."""
        children, names = self.body.children, self.body.names
        first = children.index(names[0])
        before, behind = children[:first], children[first + len(names) :]
        blocks = [(new, names[old], place) for place, (new, old) in enumerate(zip(self.names, self.templates, strict=True))]
        added = self.operator.added
        counts = _counted(names) == ("", first)  # an nn.Sequential counts all it holds
        rest = [(str(int(name) + added) if counts and name.isdecimal() else name, name, None) for name in behind]
        return [*((name, name, None) for name in before), *blocks, *rest]

    def origin(self, name: str) -> tuple[str, int | None]:
        """The old name of a module, parameter or buffer of the grown model, and the place of the block it is in, else None."""
        start = f"{self.body.path}." if self.body.path else ""
        if not name.startswith(start):
            return name, None
        child, dot, rest = name.removeprefix(start).partition(".")
        old, place = self._by_child.get(child, (child, None))
        return f"{start}{old}{dot}{rest}", place

    @cached_property
    def _by_child(self) -> dict[str, tuple[str, int | None]]:
        return {new: (old, place) for new, old, place in self.children}


@checked(model=a_module, body=a_text)
def find_body(model: nn.Module, body: str | None = None) -> Body:
    """The list of blocks of one type in a model: the only one there is outside of other blocks, or the one called `body`.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    >>> find_body(model).names
    ('2', '3')
    """
    found = {each.path: each for each in _bodies(model)}
    refuse_shared(model, found)
    if body is not None:
        return _named(model, found, body)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one type to grow: its layers must be in an nn.ModuleList or an "
            "nn.Sequential, two or more with parameters of equal shapes. Growing puts new blocks into that list."
        )
    if len(found) > 1:
        kinds = [f"{path or 'the model itself'} ({_kind(model, each)})" for path, each in found.items()]
        raise ValueError(
            f"{type(model).__name__} has {len(found)} lists of blocks: {listed(kinds, 8)}. Name the one to grow, as in "
            f"body={next(iter(found))!r}, and grow again for another."
        )
    return next(iter(found.values()))


def check_operator(body: Body, operator: GrowthOperator) -> None:
    """Raise where an operator is for another depth, or copies a first block that is special."""
    if operator.layers != body.layers:
        raise ValueError(
            f"operator is for a model of {plural(operator.layers, 'layer')}; {body.path or 'the model'} has {body.layers}. Make "
            f"it with th.growth_operators({body.layers}, {operator.added})."
        )
    copied = {origin.source for origin in operator.layer_map() if origin.is_new and origin.source is not None}
    first = body.fixed == tuple(range(len(body.fixed)))  # else the kinds of layers alternate
    if first and (bad := sorted(copied & set(body.fixed))):
        free = [layer for layer in range(body.layers) if layer not in body.fixed]
        raise ValueError(
            f"operator repeats layer {bad[0]} of {body.path}, whose parameters have other shapes than those of most layers; such "
            f"a layer stays and is not repeated. Take one that repeats others: {listed(free, 12)}."
        )


def _kind(model: nn.Module, body: Body) -> str:
    blocks = body.blocks(model)
    return f"{len(blocks)} × {type(blocks[-1]).__name__}"


def _named(model: nn.Module, found: Mapping[str, Body], body: str) -> Body:
    """The list that the user named, also one inside of blocks or beside others."""
    if body in found:
        return found[body]
    inside = dict(model.named_modules())
    if body in inside and (one := _body_of(body, inside[body])) is not None:
        return one
    near = nearest(body, [*found, *inside], count=3)
    raise ValueError(
        f"body must be the name of a list of blocks in the model: {quoted(found) or 'there is none'}. Got {body!r}; the nearest "
        f"names are {quoted(near)}."
    )


def refuse_shared(model: nn.Module, found: Mapping[str, Body]) -> None:
    """Raise for layers that are one and the same: there is nothing to copy."""
    for path, body in found.items():
        blocks = body.blocks(model)
        held = [{id(p) for p in block.parameters()} for block in blocks]
        if len(blocks) > 1 and held[0] and set.intersection(*held) == held[0]:
            raise ValueError(
                f"{path or type(model).__name__}: its {len(blocks)} layers share one body, so a copy would be the same layer "
                "again. Run the body more often instead, or build a model whose layers have weights of their own."
            )
    config = getattr(model, "config", None)
    depth, groups = (getattr(config, name, None) for name in ("num_hidden_layers", "num_hidden_groups"))
    if isinstance(depth, int) and isinstance(groups, int) and groups < depth:
        raise ValueError(
            f"{type(model).__name__}: its {depth} layers share {plural(groups, 'body')}, as ALBERT's do, so there is no layer to "
            "copy. Raise num_hidden_layers of its configuration instead, or grow a model whose layers have weights of their own."
        )


# Finding.


def _bodies(module: nn.Module, path: str = "") -> Iterator[Body]:
    """The lists of blocks outside of other blocks, in the order of the model. One block alone counts in an nn.ModuleList."""
    body = _body_of(path, module)
    inside = set(body.names) if body else set()
    if body:
        yield body
    for name, child in module.named_children():
        if name not in inside:
            yield from _bodies(child, f"{path}.{name}" if path else name)


def _body_of(path: str, module: nn.Module) -> Body | None:
    """The longest run of blocks of one type in a list whose parameters agree in shape, but for some that a block has or lacks."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return None
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    runs = [_alike(list(run)) for _, run in itertools.groupby(children, key=lambda child: type(child[1]))]
    longest: list[tuple[str, nn.Module]] = max(runs, key=len, default=[])
    alone = isinstance(module, nn.ModuleList) and len(children) == 1
    if not longest or (len(longest) < 2 and not alone):
        return None
    usual = _usual(longest)
    fixed = tuple(i for i, (_, block) in enumerate(longest) if signature(block) != usual)
    return Body(path, tuple(name for name, _ in longest), fixed, tuple(name for name, _ in children))


def _alike(run: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Of blocks of one type those around the usual one that agree with it in all shapes that both have."""
    usual = dict(_usual(run))
    fits = [all(usual.get(name, shape) == shape for name, shape in signature(block)) for _, block in run]
    stretches = [list(part) for same, part in itertools.groupby(zip(fits, run, strict=True), key=lambda pair: pair[0]) if same]
    longest = max(stretches, key=len, default=[])
    return [child for _, child in longest] if usual else []


def _usual(run: list[tuple[str, nn.Module]]) -> Signature:
    """The most frequent shapes; of several the last, for it is the first block that may be special."""
    return Counter(signature(block) for _, block in reversed(run)).most_common(1)[0][0]


def signature(block: nn.Module) -> Signature:
    """The shapes of the parameters by name.

    >>> signature(nn.Linear(2, 3, bias=False))
    (('weight', (3, 2)),)
    """
    return tuple((name, tuple(p.shape)) for name, p in block.named_parameters(remove_duplicate=False))


def _counted(names: tuple[str, ...]) -> tuple[str, int | None]:
    """What stands before the numbers of names that count, and the first number; None where they do not count.

    >>> _counted(("block1", "block2")), _counted(("first", "second"))
    (('block', 1), ('', None))
    """
    parts: list[Any] = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    if not all(parts) or len({part[1] for part in parts}) > 1:
        return "", None
    numbers = [int(part[2]) for part in parts]
    counts = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return (parts[0][1], numbers[0]) if counts else ("", None)
