"""Checks of arguments: each says what is accepted and what came.

A rule takes the name of an argument and its value, and returns the value as it is used; `checked` applies rules by name before a
function runs. `wanted` are the words for what is accepted, where the usual ones do not say enough. What the common names mean,
and so which numbers they take, is said in the guide (`docs/guide/python.rst`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, get_type_hints

from theodolite.errors import TheodoliteError
from theodolite.text import quoted

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

#: What `positive` accepts, where a tensor or a text may have been meant.
A_NUMBER = "positive and finite, a number"
_LARGEST = 2**63 - 1

#: A check of one argument: name and value in, the value as it is used out.
Rule = Callable[[str, Any], Any]


def checked(**rules: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check arguments by name before a function runs; None passes where it is the default.

    Names that a function hands on (`**options`) are checked too, and where they are known (`options: Unpack[...]`, or a rule
    `options=those_of(other)`) an unknown one is refused in the name of this function.

    >>> @checked(steps=count, rate=positive)
    ... def descend(rate=None, steps=1):
    ...     return rate, steps
    >>> descend(), descend(0.5)
    ((None, 1), (0.5, 1))
    >>> descend(0.5, steps=0)
    Traceback (most recent call last):
    ValueError: steps must be a positive integer. Got 0.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        places = [*parameters]
        rest = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), "")
        optional = {name for name in rules if name not in parameters or parameters[name].default is None}

        @functools.cache
        def handed_on() -> frozenset[str] | None:
            """The names that `rest` takes; None where any goes."""
            own = rules[rest]("", None) if rest in rules else _unpacked(function, rest)
            return None if own is None else frozenset(own) | {*places}

        def check(name: str, value: Any) -> Any:
            return value if name not in rules or (value is None and name in optional) else rules[name](name, value)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if rest and (known := handed_on()) is not None and (unknown := [name for name in kwargs if name not in known]):
                near = _nearest(unknown[0], [*known])
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown[0]!r}{near}")
            given: Any = [check(places[min(i, len(places) - 1)], value) for i, value in enumerate(args)]
            named: Any = {name: check(name, value) for name, value in kwargs.items()}
            return function(*given, **named)

        return called

    return decorate


def those_of(function: Callable[..., Any]) -> Rule:
    """For `checked(options=those_of(other))`: the names that `**options` takes are the arguments of another function."""
    return lambda name, value: inspect.signature(function).parameters


def _unpacked(function: Callable[..., Any], rest: str) -> Iterable[str] | None:
    """The keys of `**rest: Unpack[Keys]`, where it is written so."""
    words = str(function.__annotations__.get(rest, ""))
    if not words.startswith("Unpack["):
        return None
    return get_type_hints(function.__globals__[words.removeprefix("Unpack[").rstrip("]")], function.__globals__)


def fields_checked(record: Any, **rules: Rule) -> None:
    """The same for the fields of a frozen dataclass, from its `__post_init__`."""
    for name, rule in rules.items():
        object.__setattr__(record, name, rule(name, getattr(record, name)))


@contextmanager
def about(name: str) -> Iterator[None]:
    """What is refused in here is said of the argument `name`, where the text does not name it itself.

    >>> with about("train"):
    ...     count("batch_size", 0)
    Traceback (most recent call last):
    ValueError: train: batch_size must be a positive integer. Got 0.
    """
    try:
        yield
    except (ValueError, TypeError, TheodoliteError) as error:
        text = str(error)
        if text.startswith((f"{name}:", f"{name} ")):
            raise
        raise type(error)(f"{name}: {text}") from error


def integer(name: str, value: Any, *, least: int | None = None, wanted: str | None = None) -> int:
    """The value as an integer, of whatever integer type it is; not True or False, and not below `least`.

    >>> integer("steps", 3, least=1)
    3
    >>> integer("steps", 2.5, least=1)
    Traceback (most recent call last):
    ValueError: steps must be a positive integer. Got 2.5.
    """
    found = _index(value)
    if found is not None and not -_LARGEST <= found <= _LARGEST:
        raise ValueError(f"{name} must be below 2^63, the largest number that indices and counts have. Got {shown(value)}.")
    if found is None or (least is not None and found < least):
        usual = {None: "an integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        raise ValueError(f"{name} must be {wanted or usual}. Got {shown(value)}.")
    return found


def optional_integer(name: str, value: Any, *, least: int | None = None, wanted: str | None = None) -> int | None:
    """The same, where None is accepted too."""
    return None if value is None else integer(name, value, least=least, wanted=wanted)


def positive_integers(**values: Any) -> None:
    """Refuse sizes that are not 1, 2, 3, ...

    >>> positive_integers(width=0)
    Traceback (most recent call last):
    ValueError: width must be a whole number of at least 1. Got 0.
    """
    for name, value in values.items():
        integer(name, value, least=1, wanted="a whole number of at least 1")


def random_seed(value: Any, name: str = "seed") -> int:
    """A seed that torch's generators take.

    >>> random_seed(7)
    7
    """
    found = _index(value)
    if found is None:
        raise ValueError(f"{name} must be an integer. Got {shown(value)}.")
    if not -(2**63) <= found < 2**64:
        raise ValueError(f"{name} must lie between -2^63 and 2^64 - 1. Got {found}; take a smaller one.")
    return found


def positive(name: str, value: Any, *, wanted: str = "a positive number") -> float:
    """The value as a positive finite float, of whatever real type it is.

    >>> positive("rate", 1), positive("tol", "0.1", wanted="positive")
    Traceback (most recent call last):
    ValueError: tol must be positive. Got '0.1'.
    """
    number = _real(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be {wanted}. Got {shown(value)}.")
    return number


def fraction(name: str, value: Any) -> float:
    """The value as a float strictly between 0 and 1: a tolerance, a level of confidence.

    >>> fraction("tol", 1e-3), fraction("level", 95)
    Traceback (most recent call last):
    ValueError: level must be a number above 0 and below 1. Got 95.
    """
    number = _real(value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must be a number above 0 and below 1. Got {shown(value)}.")
    return number


def count(name: str, value: Any) -> int:
    """The value as one of 1, 2, 3, ..."""
    return integer(name, value, least=1)


def whole(name: str, value: Any) -> int:
    """The value as one of 0, 1, 2, ..."""
    return integer(name, value, least=0)


def seed(name: str, value: Any) -> int:
    """A seed that torch's generators take; as a rule."""
    return random_seed(value, name)


def finite(name: str, value: Any) -> float:
    """The value as a finite float.

    >>> finite("shift", -2), finite("shift", float("inf"))
    Traceback (most recent call last):
    ValueError: shift must be a finite number. Got inf.
    """
    found = _real(value)
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number. Got {shown(value)}.")
    return found


def nonnegative(name: str, value: Any) -> float:
    """The value as a finite float of at least 0."""
    found = _real(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} must be at least 0, a finite number. Got {shown(value)}.")
    return found


def a_number(name: str, value: Any) -> float:
    """The value as a float, NaN and infinity too: what a run that blew up may hold."""
    found = _number(value)
    if found is None:
        raise ValueError(f"{name} must be a number. Got {shown(value)}.")
    return found


def an_error(name: str, value: Any) -> float:
    """A standard error, infinite where nothing is known about it.

    >>> an_error("loss_error", float("inf")), an_error("loss_error", -0.1)
    Traceback (most recent call last):
    ValueError: loss_error must be a number of at least 0, or infinite. Got -0.1.
    """
    found = _real(value)
    if not found >= 0:
        raise ValueError(f"{name} must be a number of at least 0, or infinite. Got {shown(value)}.")
    return found


def share(name: str, value: Any) -> float:
    """The value as a float from 0 to 1, both included."""
    found = _real(value)
    if not 0 <= found <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1. Got {shown(value)}.")
    return found


def number_in(
    *, above: float | None = None, least: float | None = None, below: float | None = None, most: float | None = None
) -> Rule:
    """A rule for finite numbers with ends, each of which is included (`least`, `most`) or not (`above`, `below`).

    >>> number_in(least=0, below=1)("momentum", 1)
    Traceback (most recent call last):
    ValueError: momentum must be a number of at least 0 and below 1. Got 1.
    """
    ends = {"above {:g}": above, "of at least {:g}": least, "below {:g}": below, "at most {:g}": most}
    words = " and ".join(text.format(end) for text, end in ends.items() if end is not None) or "that is finite"

    def check(name: str, value: Any) -> float:
        found = _real(value)
        low = (above is None or found > above) and (least is None or found >= least)
        if not (math.isfinite(found) and low and (below is None or found < below) and (most is None or found <= most)):
            raise ValueError(f"{name} must be a number {words}. Got {shown(value)}.")
        return found

    return check


def place(name: str, value: Any, there: int) -> int:
    """The value as one of 0, 1, ... below `there`.

    >>> place("layer", 3, 3)
    Traceback (most recent call last):
    ValueError: layer must be one of 0 .. 2. Got 3.
    """
    found = _index(value)
    if found is None or not 0 <= found < there:
        raise ValueError(f"{name} must be one of 0 .. {there - 1}. Got {shown(value)}.")
    return found


def up_to(name: str, value: Any, there: int, *, of: str) -> int:
    """The value as one of 1, 2, ... up to `there`, the number `of` things.

    >>> up_to("k", 4, 3, of="eigenpairs")
    Traceback (most recent call last):
    ValueError: k must be one of 1 .. 3, the number of eigenpairs. Got 4.
    """
    found = _index(value)
    if found is None or not 1 <= found <= there:
        raise ValueError(f"{name} must be one of 1 .. {there}, the number of {of}. Got {shown(value)}.")
    return found


def a_path(name: str, value: Any) -> str | os.PathLike[str]:
    """A path, as a text or a `Path`."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, as a text or a pathlib.Path. Got {shown(value)}.")
    return value


def each(rule: Rule) -> Rule:
    """A rule for sequences: at least one entry, each of which passes `rule`.

    >>> each(count)("widths", [3, 0])
    Traceback (most recent call last):
    ValueError: widths[1] must be a positive integer. Got 0.
    """

    def check(name: str, value: Any) -> list[Any]:
        try:
            entries = None if isinstance(value, str | Mapping) else list(value)
        except TypeError:
            entries = None
        if not entries:
            raise ValueError(f"{name} must be a sequence with at least one entry. Got {shown(value)}.")
        return [rule(f"{name}[{i}]", entry) for i, entry in enumerate(entries)]

    return check


def one_or_each(rule: Rule) -> Rule:
    """A rule for one value or a sequence of them."""
    return lambda name, value: (
        each(rule)(name, value)
        if isinstance(value, Iterable) and not isinstance(value, str) and _ndim(value)
        else rule(name, value)
    )


def series(name: str, value: Any) -> list[float]:
    """Numbers in order as floats, NaN and infinity among them: what a run went through.

    >>> series("losses", [1, float("inf"), "0.5"])
    Traceback (most recent call last):
    ValueError: losses[2] must be a number. Got '0.5'.
    """
    return [a_number(f"{name}[{i}]", entry) for i, entry in enumerate(sequence(name, value))]


def series_with_gaps(name: str, value: Any) -> list[float | None]:
    """The same with None where nobody looked."""
    entries = list(sequence(name, value))
    known = iter(series(name, [entry for entry in entries if entry is not None]))
    return [None if entry is None else next(known) for entry in entries]


def a_function(name: str, value: Any) -> Any:
    """Something that can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function. Got {shown(value)}.")
    return value


def sequence(name: str, value: Any) -> Any:
    """A list, a tensor or another iterable of values, not a text or a dict."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable) or getattr(value, "is_meta", False):
        raise TypeError(f"{name} must be a sequence. Got {shown(value)}.")
    return value


def a_text(name: str, value: Any) -> str:
    """A text, and not a number for one."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text. Got {shown(value)}.")
    return value


def a_mapping(name: str, value: Any) -> Any:
    """A dict or another mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict. Got {shown(value)}.")
    return value


def mapping_of(rule: Rule) -> Rule:
    """A rule for dicts whose values pass `rule`.

    >>> mapping_of(count)("sizes", {"train": 0})
    Traceback (most recent call last):
    ValueError: sizes['train'] must be a positive integer. Got 0.
    """
    return lambda name, value: {key: rule(f"{name}[{key!r}]", entry) for key, entry in a_mapping(name, value).items()}


def given(name: str, value: Any) -> Any:
    """Anything but None."""
    if value is None:
        raise ValueError(f"{name} must be given. Got None.")
    return value


def optional(rule: Rule) -> Rule:
    """The rule, where None is accepted though it is not the default."""
    return lambda name, value: None if value is None else rule(name, value)


def one_of(*choices: Any) -> Rule:
    """A rule for a few words."""

    def check(name: str, value: Any) -> Any:
        either(name, value, choices)
        return value

    return check


def instance(*kinds: type, wanted: str = "") -> Rule:
    """A rule for objects of a class; `wanted` says how to get one.

    >>> instance(dict)("settings", 3)
    Traceback (most recent call last):
    TypeError: settings must be a dict. Got 3.
    """
    words = wanted or " or ".join(f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}" for kind in kinds)

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError(f"{name} must be {words}. Got {shown(value)}.")
        return value

    return check


def at_least(least: int, **values: Any) -> None:
    """Refuse counts and sizes below `least`.

    >>> at_least(1, columns=0)
    Traceback (most recent call last):
    ValueError: columns must be at least 1. Got 0.
    """
    for name, value in values.items():
        if not least <= _real(value) < math.inf:
            raise ValueError(f"{name} must be at least {least}. Got {shown(value)}.")


def between(low: float, high: float, **values: Any) -> None:
    """Refuse numbers outside [low, high]; NaN and the infinities are outside.

    >>> between(0, 1, share=1.5)
    Traceback (most recent call last):
    ValueError: share must lie in [0, 1]. Got 1.5.
    """
    for name, value in values.items():
        if not (low <= _real(value) <= high and math.isfinite(value)):
            ends = ("(" if low == -math.inf else "[", ")" if high == math.inf else "]")
            raise ValueError(f"{name} must lie in {ends[0]}{low:g}, {high:g}{ends[1]}. Got {shown(value)}.")


def choice(name: str, value: Any, choices: Iterable[Any], *, wanted: str | None = None) -> None:
    """Refuse what is not one of the choices, and name the nearest where one is near.

    >>> choice("which", "larges", ["largest", "smallest"])
    Traceback (most recent call last):
    ValueError: which must be one of 'largest', 'smallest'. Got 'larges'; did you mean 'largest'?
    """
    known = list(choices)
    if hasattr(value, "shape") or value not in known:
        raise ValueError(f"{name} must be {wanted or f'one of {quoted(known)}'}. Got {shown(value)}{_nearest(value, known)}")


def either(name: str, value: Any, choices: Collection[Any]) -> None:
    """The same, for few choices: "'a', 'b' or 'c'".

    >>> either("mode", "test", ["train", "eval"])
    Traceback (most recent call last):
    ValueError: mode must be 'train' or 'eval'. Got 'test'.
    """
    choice(name, value, choices, wanted=quoted(choices, "or"))


def entry(name: str, value: Any, table: Mapping[str, T]) -> T:
    """The entry of a table called `value`.

    >>> entry("activation", "sine", {"relu": 1, "tanh": 2})
    Traceback (most recent call last):
    ValueError: activation must be one of 'relu', 'tanh'. Got 'sine'.
    """
    choice(name, value, table)
    return table[value]


def also_called(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept arguments under a second name, given by keyword: `also_called(lr="rate")` takes `lr` for `rate`.

    >>> @also_called(lr="rate")
    ... def step(weight, rate):
    ...     return weight - rate
    >>> step(1.0, lr=0.25)
    0.75
    >>> step(1.0, 0.25, lr=0.25)
    Traceback (most recent call last):
    TypeError: step() got both rate and lr, two names of one argument: give one of them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        places = [*inspect.signature(function).parameters]

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for other in names.keys() & kwargs.keys():
                name = names[other]
                if name in kwargs or name in places[: len(args)]:
                    raise TypeError(
                        f"{function.__qualname__}() got both {name} and {other}, two names of one argument: give one of them."
                    )
                kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return called

    return decorate


def shown(value: Any) -> str:
    """A value in a few words of one line: itself where it is short, else what it is.

    >>> shown(0.5), shown("text"), shown([0] * 99)
    ('0.5', "'text'", 'a list of 99')
    """
    if (shape := getattr(value, "shape", ())) and not callable(shape):
        where = " on the meta device" if getattr(value, "is_meta", False) else ""
        return f"a {type(value).__name__} of shape {tuple(shape)}{where}"
    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sized) else "")


def _index(value: Any) -> int | None:
    """The value as an integer, of whatever integer type it is; None where it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _number(value: Any) -> float | None:
    """The value as a float, NaN and infinity too; None where it is no number."""
    try:
        return None if isinstance(value, str | bool | complex) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _real(value: Any) -> float:
    """The value as a float, of whatever real type it is; NaN where it is no number."""
    found = _number(value)
    return math.nan if found is None else found


def _ndim(value: Any) -> int:
    """The number of dimensions of a tensor or an array; 1 for all else."""
    found = getattr(value, "ndim", 1)
    return found if isinstance(found, int) else 1


def _nearest(value: Any, known: list[Any]) -> str:
    names = [name for name in known if isinstance(name, str)]
    near = difflib.get_close_matches(value, names, 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else "."
