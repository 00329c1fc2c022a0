"""A claim compares what was measured with what was reported, by a rule that can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from theodolite.arguments import checked, finite, nonnegative, optional
from theodolite.experiments.query import Measured
from theodolite.results import Row
from theodolite.runners.store import plain
from theodolite.text import nearest

#: From seconds to the source's own setting.
SIZES = ("tiny", "laptop", "paper")
#: Rows -> a value, or `Measured` with its error.
Measure = Callable[[list[Row]], Any]


class State(Enum):
    """What became of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_REPRODUCED = "not reproduced at this size"
    MEASURED = "measured"


ReadFrom = Literal["text", "plot", "code", "theory"]


@dataclass(frozen=True)
class Reported:
    """A value of the source: where it stands, and whether it was read from its text, a plot or an author's code.

    `"theory"` marks what follows from a statement of the source without being printed there. A `where` that is empty means the
    figure or table whose claim it is.
    """

    value: Any
    where: str = ""
    read_from: ReadFrom = "text"

    def __str__(self) -> str:
        return f"{show(self.value)} ({self.origin})"

    @classmethod
    def theory(cls, value: Any, where: str) -> Reported:
        """What follows from a statement of the source."""
        return cls(value, where, "theory")

    def placed(self, where: str, read_from: ReadFrom = "text") -> Reported:
        """The same, at a place and read in a way unless it says so itself."""
        return Reported(self.value, self.where or where, read_from if self.read_from == "text" else self.read_from)

    @property
    def origin(self) -> str:
        """Where the value stands and how it was read."""
        return self.where + _READ_FROM[self.read_from]


_READ_FROM = {
    "text": "",
    "plot": "; read from a plot",
    "code": "; read from an author's code",
    "theory": "; follows from the theory",
}


@dataclass(frozen=True)
class Verdict:
    """A claim after the measurement."""

    text: str
    state: State
    measured: Any
    error: float | None
    expected: Any
    reported: Reported | None
    rule: str
    note: str = ""
    reason: str = ""  # why the claim was expected to fail at this size
    undecided: str = ""  # why it may go either way at this size

    @property
    def holds(self) -> bool:
        return self.state is State.HOLDS

    @property
    def failed(self) -> bool:
        return self.state is State.FAILS

    @property
    def surprising(self) -> bool:
        """Whether a claim that was expected to fail at this size began to hold."""
        return bool(self.reason) and self.holds

    def __str__(self) -> str:
        value = show(self.measured) + (f" ± {self.error:.2g}" if self.error is not None else "")
        wanted = f", wanted {self.rule}" if self.rule else ""
        reported = f", reported {self.reported}" if self.reported is not None else ""
        note = f" ({self.note})" if self.note else ""
        if self.reason:
            note += f" (expected to fail at this size: {self.reason})"
        if self.undecided:
            note += f" (may go either way at this size: {self.undecided})"
        return f"{self.state.value}: {self.text}: measured {value}{wanted}{reported}{note}"


@dataclass(frozen=True)
class Claim:
    """A statement of the source that our rows confirm or not.

    Args:
        text: The statement.
        measure: Rows -> the measured value, or `Measured` with its error; a `Value` of a query is one.
        rule: How it is compared with `expected`: "within" (a distance of `tolerance`), "relative" (that times the expected
            value), "at least", "at most", "between" (expected is a pair) or "equal". Default: "within" for numbers, else
            "equal".
        expected: What the rule compares with; None means the reported value. A claim with neither is only measured.
        tolerance: Slack of the rule.
        reported: The value of the source, if it gives one.
        since: The smallest size at which the source's statement is expected to be seen; a miss below it reads "not
            reproduced at this size" and does not count as failed. What cannot be measured at all fails at any size.
        fails: Size -> the reason why the claim does not hold there. It is shown as failed, with the reason; where it begins
            to hold, that is reported.
        undecided: Size -> the reason why it may go either way there, such as the last bits of a sum.

    `at_least`, `at_most`, `between`, `equal`, `within`, `relative` and `measured` write claims down shortly, best as
    `{"the statement": at_least(0.5, measure)}`.
    """

    text: str
    measure: Measure
    rule: str | None = None
    expected: Any = None
    tolerance: float = 0.0
    reported: Reported | None = None
    since: str = "tiny"
    fails: Mapping[str, str] = field(default_factory=dict)
    undecided: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reported is not None and not isinstance(self.reported, Reported):
            object.__setattr__(self, "reported", Reported(self.reported))
        wanted = self.wanted
        if self.rule is None:
            number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
            object.__setattr__(self, "rule", "within" if number or wanted is None else "equal")
        if self.rule not in (*RULES, "shown"):
            raise ValueError(
                f"rule must be one of {', '.join(map(repr, RULES))}; the nearest is "
                f"{nearest(str(self.rule), RULES, 1)[0]!r}. Got {self.rule!r}."
            )
        nonnegative("tolerance", self.tolerance)
        if self.rule == "between" and not (isinstance(wanted, list | tuple) and len(wanted) == 2):
            raise ValueError(f"The rule 'between' needs a pair of numbers. Got {wanted!r}.")
        for size in (self.since, *self.fails, *self.undecided):
            if size not in SIZES:
                raise ValueError(f"since, fails and undecided name sizes: {', '.join(SIZES)}. Got {size!r}.")

    @property
    def wanted(self) -> Any:
        """What the rule compares with."""
        if self.rule == "shown":
            return None
        return self.expected if self.expected is not None else self.reported.value if self.reported else None

    def judge(self, rows: list[Row], size: str, where: str = "") -> Verdict:
        """Measure and compare; a claim that cannot be measured, or has no rows to be measured on, fails.

        `where` is the place in the source that a reported value without one comes from.
        """
        wanted = self.wanted
        rule = "" if wanted is None else describe(str(self.rule), wanted, self.tolerance)
        value, error_bar, note = None, None, ""
        try:
            if not rows:
                raise ValueError("there are no rows")
            found = self.measure(rows)
            found = found if isinstance(found, Measured) else Measured(found)
            value, error_bar = plain(found.value), None if found.error is None else float(found.error)
            state = State.MEASURED if wanted is None else self._compare(value, wanted, size)
        except Exception as error:
            state, note = State.FAILS, f"could not be measured: {type(error).__name__}: {error}"
        reported = self.reported and self.reported.placed(where or "the source")
        return Verdict(
            self.text,
            state,
            value,
            error_bar,
            wanted,
            reported,
            rule,
            note,
            self.fails.get(size, ""),
            self.undecided.get(size, ""),
        )

    def _compare(self, value: Any, wanted: Any, size: str) -> State:
        found = value is not None and value == value  # neither nothing nor NaN
        if found and bool(RULES[str(self.rule)](value, plain(wanted), self.tolerance)):
            return State.HOLDS
        return State.NOT_REPRODUCED if SIZES.index(size) < SIZES.index(self.since) else State.FAILS


def _verb(rule: str | None, expected: Any, said: tuple[Any, ...], tolerance: float = 0.0, **given: Any) -> Claim:
    """A claim from what the verbs below take.

    That is `(text, measure)` or `(measure,)`, then `reported` (a number) or `says` (words), `where` it stands, how it was
    `read_from`, and what else a claim has.
    """
    text, measure = said if len(said) == 2 else ("", *said)
    says, where, read_from = given.pop("says", None), given.pop("where", ""), given.pop("read_from", "text")
    reported = given.pop("reported", says)
    if (says is not None and reported is not says) or (where and (reported is None or isinstance(reported, Reported))):
        raise ValueError(f"{text or 'A claim'}: give `reported` or `says`, and `where` only beside one of them.")
    if reported is not None and not isinstance(reported, Reported):
        reported = Reported(reported, where, read_from)
    return Claim(text, measure, rule, expected, tolerance, reported, **given)


@checked(bound=finite)
def at_least(bound: float, *said: Any, **given: Any) -> Claim:
    """The measured value is at least `bound`: `at_least(bound, text, measure)`, or without the text where a mapping has it.

    >>> (claim,) = listed({"half of the runs catapult": at_least(0.5, lambda rows: len(rows) / 4, says="most", where="Figure 3")})
    >>> print(claim.judge([{}, {}], "tiny"))
    holds: half of the runs catapult: measured 0.5, wanted at least 0.5, reported most (Figure 3)
    """
    return _verb("at least", bound, said, **given)


@checked(bound=finite)
def at_most(bound: float, *said: Any, **given: Any) -> Claim:
    """The measured value is at most `bound`."""
    return _verb("at most", bound, said, **given)


@checked(low=finite, high=finite)
def between(low: float, high: float, *said: Any, **given: Any) -> Claim:
    """The measured value lies between two bounds."""
    if low > high:
        raise ValueError(f"low must be at most high, {high:g}, or nothing lies between them. Got {low:g}.")
    return _verb("between", (low, high), said, **given)


def equal(value: Any, *said: Any, **given: Any) -> Claim:
    """The measured value is exactly this."""
    return _verb("equal", value, said, **given)


@checked(tolerance=nonnegative, value=optional(finite))
def within(tolerance: float, value: float | None, *said: Any, **given: Any) -> Claim:
    """The measured value is at most `tolerance` away from `value` (None: from the reported one)."""
    return _verb("within", value, said, tolerance, **given)


@checked(tolerance=nonnegative, value=optional(finite))
def relative(tolerance: float, value: float | None, *said: Any, **given: Any) -> Claim:
    """The measured value is at most `tolerance` times `value` (None: the reported one) away from it."""
    return _verb("relative", value, said, tolerance, **given)


def measured(*said: Any, **given: Any) -> Claim:
    """Nothing is wanted of the value; it is shown."""
    return _verb("shown", None, said, **given)


def quoted(source: str, value: Any, place: str, read_from: ReadFrom = "text") -> dict[str, Any]:
    """Keywords of a claim on what a source reports elsewhere: `at_most(0.1, measure, **quoted("Zhu 2024", "small", "Lemma 3"))`.

    >>> str(quoted("Zhu 2024", "small", "Theorem 3.3.1")["reported"])
    'small (Zhu 2024, Theorem 3.3.1)'
    """
    return {"reported": Reported(value, f"{source}, {place}", read_from)}


#: Claims, mappings of statements to claims, and sequences of both.
Claims = Iterable[Any]


def listed(claims: Any) -> tuple[Claim, ...]:
    """Claims one after the other, from claims, mappings of statements to claims, and sequences of both."""
    if isinstance(claims, Claim):
        if not claims.text:
            raise ValueError(
                'A claim needs its statement: {"the statement": at_least(...)}, or at_least(bound, "the statement", ...).'
            )
        return (claims,)
    if isinstance(claims, Mapping):
        return tuple(replace(claim, text=text) for text, claim in claims.items())
    return tuple(claim for part in claims for claim in listed(part))


def cited(where: str, claims: Any, *, read_from: ReadFrom = "text", **given: Any) -> tuple[Claim, ...]:
    """Claims whose reported values stand at one place and were read in one way, unless they say so themselves.

    `given` is what else they have in common, such as `since`. An empty `where` is the figure or table whose claims they are.

    >>> (claim,) = cited("Theorem 3", {"it falls": at_most(0.0, min, says="falls")}, read_from="theory", since="laptop")
    >>> str(claim.reported), claim.since
    ('falls (Theorem 3; follows from the theory)', 'laptop')
    """
    found = [(claim, claim.reported and claim.reported.placed(where, read_from)) for claim in listed(claims)]
    return tuple(replace(claim, reported=reported, **given) for claim, reported in found)


RULES: Mapping[str, Callable[[Any, Any, float], bool]] = {
    "within": lambda m, e, tol: abs(m - e) <= tol,
    "relative": lambda m, e, tol: abs(m - e) <= tol * abs(e),
    "at least": lambda m, e, tol: m >= e - tol,
    "at most": lambda m, e, tol: m <= e + tol,
    "between": lambda m, e, tol: e[0] - tol <= m <= e[1] + tol,
    "equal": lambda m, e, tol: m == e,
}


def describe(rule: str, expected: Any, tolerance: float) -> str:
    """A rule as words.

    >>> describe("within", 2.0, 0.1), describe("between", (0, 1), 0.0), describe("relative", 3.6, 0.05)
    ('2 ± 0.1', 'between 0 and 1', '3.6 ± 5 %')
    """
    slack = f" (± {tolerance:g})" if tolerance else ""
    if rule == "within":
        return f"{show(expected)} ± {tolerance:g}"
    if rule == "relative":
        return f"{show(expected)} ± {100 * tolerance:g} %"
    if rule == "between":
        return f"between {show(expected[0])} and {show(expected[1])}{slack}"
    return show(expected) if rule == "equal" else f"{rule} {show(expected)}{slack}"


def show(value: Any) -> str:
    """A value as a reader likes it: numbers short, yes and no for truth.

    >>> show(0.123456789), show(True), show(None), show((1.0, 2.5))
    ('0.1235', 'yes', 'nothing', '1, 2.5')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(show(v) for v in value)
    return str(value)
