"""Bad values for every argument of every public function: refused in one clear line, or allowed by a table."""

from __future__ import annotations

import dataclasses
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
from tests.faults.baselines import problem, sgd
from tests.faults.ranges import OPTIONAL, RANGES, SHOWN, keys, range_of
from tests.faults.signatures import BASELINES, STAND_INS, WITHOUT, declared, numbers_without_a_call, public_callables, resolve
from theodolite.errors import TheodoliteError
from theodolite.problem.tensors import map_tensors, named_tensors

PACKAGE = str(Path(th.__file__).parent)
#: Seconds after which a call counts as endless.
PATIENCE = 20.0
#: Share of messages that may be unclear.
CRYPTIC = 0.02


def like(good: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The valid value with its tensors changed, or a changed tensor where it has none.

    Records of the package are replaced as a whole: its functions make them, and nobody can change the tensors in one.
    """
    if any(named_tensors(good)) and not is_record(good):
        return map_tensors(lambda t: change(t.double()), good)
    return change(torch.ones(2, 2, dtype=torch.float64))


#: What is put in the place of a valid value, by name.
BAD: dict[str, Callable[[Any], Any]] = {
    "nan": lambda good: float("nan"),
    "inf": lambda good: float("inf"),
    "-inf": lambda good: -float("inf"),
    "-1": lambda good: -1,
    "-1e-9": lambda good: -1e-9,
    "0": lambda good: 0,
    "1": lambda good: 1,
    "1.0": lambda good: 1.0,
    "2.5": lambda good: 2.5,
    "beyond": lambda good: 10**6,
    "huge": lambda good: 10**30,
    "true": lambda good: True,
    "text": lambda good: "text",
    "none": lambda good: None,
    "empty": lambda good: [],
    "module": lambda good: nn.Linear(1, 1),
    "meta": lambda good: like(good, lambda t: t.to("meta")),
    "shape": lambda good: like(good, lambda t: torch.ones(5, 7, 3, dtype=t.dtype)),
    "nan tensor": lambda good: like(good, lambda t: torch.full_like(t, float("nan"))),
    "nan list": lambda good: [float("nan")],
}


#: Objects of another kind than the one that belongs there; each is left out where it is of that kind.
WRONG: dict[str, Callable[[Any], Any]] = {
    "object": lambda good: object(),
    "class": lambda good: nn.Linear,
    "function": lambda good: repr,
    "problem": lambda good: problem(),
    "result": lambda good: th.top_eigenpairs(torch.eye(2).double(), 1, progress=False),
    "optimizer": lambda good: sgd(nn.Linear(1, 1)),
    "dict": lambda good: {"a": object()},
    "objects": lambda good: [object(), object()],
}
ALL = {**BAD, **WRONG}


@dataclass(frozen=True)
class Case:
    """One argument of one public callable, and what is put in its place."""

    name: str
    argument: str
    bad: str

    def allowed(self, value: Any) -> bool:
        """Whether the value lies in the range of the argument."""
        found = range_of(self.name, self.argument)
        optional = value is None and any(key in OPTIONAL for key in keys(self.name, self.argument))
        return optional or (found is not None and bool(found.holds(value)))


@dataclass(frozen=True)
class Judgement:
    """What became of a case: "clear", "allowed", "accepted" (which is wrong), "cryptic" or "endless"."""

    case: Case
    verdict: str
    message: str


def all_cases() -> list[Case]:
    """Every argument of every valid call with every bad value, apart from flags and from what is a default."""
    found = []
    for name, make in BASELINES.items():
        parameters = inspect.signature(declared(name)).parameters
        for argument, good in make().items():
            if isinstance(good, bool) or any(key in SHOWN for key in keys(name, argument)):
                continue  # flags are true or false as Python has it
            default = parameters[argument].default if argument in parameters else None  # options: None is the default
            place = range_of(name, argument)
            left_out = {"none"} if default is None else set()
            left_out |= set() if place is not None and place.bounded else {"beyond"}
            left_out |= set() if is_number(good) else {"true"}
            found += [Case(name, argument, bad) for bad in BAD if bad not in left_out]
    return found


def wrong_objects() -> list[Case]:
    """Every argument of every valid call with objects of another kind."""
    kinds = {bad: type(make(None)) for bad, make in WRONG.items()}
    return [
        Case(name, argument, bad)
        for name, make in BASELINES.items()
        for argument, good in make().items()
        if not isinstance(good, bool) and not any(key in SHOWN for key in keys(name, argument))
        for bad, kind in kinds.items()
        if not isinstance(good, kind)
        and not (bad == "function" and callable(good))  # what a function of the user does is its own
    ]


def is_record(value: Any) -> bool:
    """A frozen record of this package, such as a result, or several of them."""
    if isinstance(value, dict | list | tuple):
        return any(map(is_record, value.values() if isinstance(value, dict) else value))
    return dataclasses.is_dataclass(value) and type(value).__module__.startswith("theodolite")


def is_number(value: Any) -> bool:
    """A number, or a list of such."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    bad = arguments[case.argument] = ALL[case.bad](arguments[case.argument])
    allowed = case.allowed(bad)
    try:
        with warnings.catch_warnings(record=True) as warned, patience(PATIENCE):
            warnings.simplefilter("always")
            found = resolve(case.name)(**arguments)
    except TimeoutError:
        return Judgement(case, "endless", "")
    except Exception as error:
        # A value that is right by itself may not go with the others: then the line may speak of these.
        kind = "allowed" if allowed and is_plain(error) else "clear" if is_clear(error, case.argument) else "cryptic"
        return Judgement(case, kind, f"{type(error).__name__}: {error}")
    # A monitor ends no training: it says what is wrong, once.
    told = next((str(w.message) for w in warned if str(w.message).startswith("theodolite.Monitor:")), None)
    if told is not None and not allowed:
        return Judgement(case, "clear" if names(case.argument, told) else "cryptic", told)
    return Judgement(case, "allowed" if allowed else "accepted", said(found))


def said(result: Any) -> str:
    """What a result says; for reports."""
    try:
        return str(result.sentence() if hasattr(result, "sentence") else repr(result)[:200])
    except Exception as error:
        return f"a result that cannot say what it found: {error}"


def is_plain(error: Exception) -> bool:
    """One line that this package raises: not a text of torch or NumPy that passes through."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = last.filename.startswith(PACKAGE) and str(last.line).lstrip().startswith("raise ")
    return ours and isinstance(error, ValueError | TypeError | TheodoliteError | FileNotFoundError) and "\n" not in str(error)


def is_clear(error: Exception, argument: str) -> bool:
    """The same, and it names the argument."""
    return is_plain(error) and names(argument, str(error))


def names(argument: str, text: str) -> bool:
    """Whether the argument stands in the text; a matrix may be written with a capital letter."""
    return re.search(rf"\b{re.escape(argument)}\b", text, re.IGNORECASE) is not None


def report(found: list[Judgement]) -> str:
    """The judgements that are no good, one to a line."""
    wrong = [j for j in found if j.verdict not in ("clear", "allowed")]
    return "\n".join(f"{j.verdict}: {j.case.name}({j.case.argument} = {j.case.bad}): {j.message[:150]!r}" for j in wrong)


def judge_all(cases: list[Case]) -> None:
    """Nothing is accepted that the table does not allow, nothing is endless, and few messages are cryptic."""
    found = [judge(case) for case in cases]
    counts = {word: sum(j.verdict == word for j in found) for word in ("clear", "allowed", "accepted", "cryptic", "endless")}
    assert counts["accepted"] == counts["endless"] == 0, f"{counts}\n{report(found)}"
    assert counts["cryptic"] <= CRYPTIC * len(found), f"{counts}\n{report(found)}"


def test_every_public_callable_has_a_valid_call_or_a_reason():
    assert public_callables() <= {*BASELINES, *WITHOUT}
    assert set(WITHOUT) <= public_callables()
    assert not set(BASELINES) & set(WITHOUT)
    assert not numbers_without_a_call()


def test_every_number_has_a_range_that_holds_the_valid_one():
    """And no range is stated for what is no argument."""
    calls = {name: make() for name, make in BASELINES.items()}
    named = {key for name, given in calls.items() for argument in given for key in keys(name, argument)}
    assert not [name for place in RANGES for name in place.names.split() if name not in named]
    numeric = [(n, a, v) for n, given in calls.items() for a, v in given.items() if is_number(v)]
    assert not [(n, a) for n, a, _ in numeric if range_of(n, a) is None]
    odd = [(n, a) for n, a, v in numeric if not isinstance(v, list | tuple) and not range_of(n, a).holds(v)]
    assert not odd


def test_the_guide_states_the_ranges_of_the_common_names():
    text = (Path(__file__).parents[2] / "docs/guide/python.rst").read_text(encoding="utf-8")
    table = re.findall(r"   \* - (.*)\n     - (``.*``)", text)
    assert len(table) >= 10
    for words, names in table:
        for name in re.findall(r"``(\w+)``", names):
            assert range_of("", name).words == words, name


@pytest.mark.parametrize("name", ["hessian", "critical_learning_rate", "measures.dynamics.split_loss", "train"])
def test_baselines_are_valid(name):
    resolve(name)(**BASELINES[name]())


def test_bad_values_of_some_arguments():
    """One case in thirty, with every kind of bad value among them; the slow test has all."""
    cases = [case for case in all_cases() if case.name != "survey"]
    judge_all(random.Random(0).sample(cases, 300))


def test_wrong_objects_for_some_arguments():
    judge_all(random.Random(0).sample([case for case in wrong_objects() if case.name != "survey"], 250))


@pytest.mark.slow
def test_wrong_objects_for_every_argument():
    cases = wrong_objects()
    assert len(cases) >= 5000
    judge_all(cases)


@pytest.mark.slow
def test_bad_values_of_every_argument():
    cases = all_cases()
    assert len(cases) >= 5000
    judge_all(cases)


def test_inference_mode_and_the_meta_device():
    """Data of inference mode are right; weights without gradients or values are refused in one line."""
    data = torch.ones(3, 2), torch.zeros(3, 1)
    with torch.inference_mode():
        frozen, there = nn.Linear(2, 1), tuple(t.clone() for t in data)
    assert th.hessian(th.Problem(nn.Linear(2, 1), nn.MSELoss(), there)).to_dense().isfinite().all()
    for model, words in ((frozen, "inference mode"), (nn.Linear(2, 1, device="meta"), "meta device")):
        for call in (
            lambda m: th.Problem(m, nn.MSELoss(), data),
            lambda m: th.tangent_kernel(m, data[0]),
            lambda m: th.agop(m, data[0]),
        ):
            with pytest.raises(ValueError, match=words) as caught:
                call(model)
            assert "\n" not in str(caught.value)


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
