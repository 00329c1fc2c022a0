"""Bad values for every argument of every public function: refused in one clear line, or allowed by a table."""

from __future__ import annotations

import inspect
import random
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from tests.faults.baselines import BASELINES, STAND_INS, WITHOUT, public_callables, resolve
from theodolite.errors import TheodoliteError
from theodolite.problem.tensors import map_tensors, named_tensors

PACKAGE = str(Path(th.__file__).parent)
#: Seconds after which a call counts as endless.
PATIENCE = 20.0
#: Share of messages that may be unclear.
CRYPTIC = 0.02


def like(good: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The valid value with its tensors changed, or a changed tensor where it has none."""
    if any(named_tensors(good)):
        return map_tensors(lambda t: change(t.double()), good)
    return change(torch.ones(2, 2, dtype=torch.float64))


#: What is put in the place of a valid value, by name.
BAD: dict[str, Callable[[Any], Any]] = {
    "nan": lambda good: float("nan"),
    "inf": lambda good: float("inf"),
    "-inf": lambda good: -float("inf"),
    "-1": lambda good: -1,
    "0": lambda good: 0,
    "2.5": lambda good: 2.5,
    "huge": lambda good: 10**30,
    "text": lambda good: "text",
    "none": lambda good: None,
    "empty": lambda good: [],
    "module": lambda good: nn.Linear(1, 1),
    "meta": lambda good: like(good, lambda t: t.to("meta")),
    "shape": lambda good: like(good, lambda t: torch.ones(5, 7, 3, dtype=t.dtype)),
    "nan tensor": lambda good: like(good, lambda t: torch.full_like(t, float("nan"))),
    "nan list": lambda good: [float("nan")],
}

# Values that are bad elsewhere and right here: of an argument by its name, or of one function's by "function argument".
ALLOWED: dict[str, str] = {}


@dataclass(frozen=True)
class Case:
    """One argument of one public callable, and what is put in its place."""

    name: str
    argument: str
    bad: str

    def allowed(self) -> bool:
        """Whether the table says that the value is right here."""
        found = ALLOWED.get(f"{self.name} {self.argument}", ALLOWED.get(self.argument, ""))
        return self.bad in found.split(", ")


@dataclass(frozen=True)
class Judgement:
    """What became of a case: "clear", "allowed", "accepted" (which is wrong), "cryptic" or "endless"."""

    case: Case
    verdict: str
    message: str


def all_cases() -> list[Case]:
    """Every argument of every baseline with every bad value, apart from flags and from what is a default."""
    found = []
    for name, make in BASELINES.items():
        function = getattr(th, name) if name in STAND_INS and "." not in name else resolve(name)
        parameters = inspect.signature(function).parameters
        for argument, good in make().items():
            if isinstance(good, bool):
                continue  # flags are true or false as Python has it
            default = parameters[argument].default if argument in parameters else None  # options: None is the default
            found += [Case(name, argument, bad) for bad in BAD if bad != "none" or default is not None]
    return found


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds."""

    def strike(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(case: Case) -> Judgement:
    """Call the function with one bad value and judge what happens."""
    arguments = BASELINES[case.name]()
    arguments[case.argument] = BAD[case.bad](arguments[case.argument])
    try:
        with warnings.catch_warnings(), patience(PATIENCE):
            warnings.simplefilter("ignore")
            found = resolve(case.name)(**arguments)
    except TimeoutError:
        return Judgement(case, "endless", "")
    except Exception as error:
        kind = "clear" if is_clear(error, case.argument) else "cryptic"
        return Judgement(case, kind, f"{type(error).__name__}: {error}")
    sentence = getattr(found, "sentence", None)
    said = sentence() if callable(sentence) else repr(found)[:200]
    return Judgement(case, "allowed" if case.allowed() else "accepted", str(said))


def is_clear(error: Exception, argument: str) -> bool:
    """One line of this package that names the argument or says what is expected."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = isinstance(error, ValueError | TypeError | TheodoliteError | FileNotFoundError) and last.startswith(PACKAGE)
    text = str(error)
    words = rf"\b{re.escape(argument)}\b|\b(must|needs?|takes|accepts|[Ee]xpected|give|only|NaN|empty|no submodule)\b"
    return ours and "\n" not in text and bool(re.search(words, text))


def report(found: list[Judgement]) -> str:
    """The judgements that are no good, one to a line."""
    wrong = [j for j in found if j.verdict not in ("clear", "allowed")]
    return "\n".join(f"{j.verdict}: {j.case.name}({j.case.argument} = {j.case.bad}): {j.message[:150]!r}" for j in wrong)


def judge_all(cases: list[Case]) -> None:
    """Nothing is accepted that the table does not allow, nothing is endless, and few messages are cryptic."""
    found = [judge(case) for case in cases]
    counts = {word: sum(j.verdict == word for j in found) for word in ("clear", "allowed", "accepted", "cryptic", "endless")}
    print(counts)
    assert counts["accepted"] == counts["endless"] == 0, report(found)
    assert counts["cryptic"] <= CRYPTIC * len(found), report(found)


def test_every_public_callable_has_a_baseline_or_a_reason():
    assert public_callables() == {name for name in (*BASELINES, *WITHOUT) if name not in METHODS}
    assert not set(BASELINES) & set(WITHOUT)


#: Baselines of methods, beside those of their classes.
METHODS = {name for name in STAND_INS if "." in name}


@pytest.mark.parametrize("name", ["hessian", "critical_learning_rate", "measures.dynamics.split_loss", "train"])
def test_baselines_are_valid(name):
    resolve(name)(**BASELINES[name]())


def test_bad_values_of_some_arguments():
    """About one argument in twelve with every kind of bad value among them; the slow test has all."""
    cases = [case for case in all_cases() if case.name != "survey"]
    judge_all(random.Random(0).sample(cases, 300))


@pytest.mark.slow
def test_bad_values_of_every_argument():
    cases = all_cases()
    assert len(cases) >= 5000
    judge_all(cases)


def test_the_judge_finds_what_is_wrong(monkeypatch):
    """It calls a cryptic message cryptic, an accepted NaN accepted, and a clear refusal clear."""

    def careless(*, rate: float, steps: int) -> float:
        return rate * len(steps)  # type: ignore[arg-type]

    def careful(*, rate: float, steps: int) -> float:
        if not rate > 0:
            raise ValueError(f"rate must be positive. Got {rate}.")
        return rate

    for function, expected in ((careless, ["accepted", "cryptic"]), (careful, ["cryptic", "accepted"])):
        monkeypatch.setitem(BASELINES, "planted", lambda: {"rate": 0.1, "steps": [1]})
        monkeypatch.setitem(STAND_INS, "planted", function)
        assert [judge(Case("planted", *what)).verdict for what in (("rate", "nan"), ("steps", "0"))] == expected
    assert judge(Case("top_eigenpairs", "tol", "2.5")).verdict == "clear"
