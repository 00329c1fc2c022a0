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

#: Values that are bad elsewhere and right here: which, and of what arguments, by name or as function.argument.
RANGES: tuple[tuple[str, str], ...] = (
    ("-1, 0", "seed order_seed tangent_kernel.outputs"),
    # Counts and places that may be none.
    ("0", "memory_budget hold_bytes output samples sample directions probes top held_out drop_first random_state init_seed "
     "order_seed "
     "pair_seed paths check_steps best_step safe_share rows rounds quantile word coherence epochs resamples expansions rng "
     "overfitting_dictionary.radius "
     "expected_regime.steps visiting_steps.steps class_orbit.steps descend.steps one_example.steps pure_quadratic.steps "
     "unit_sigma.steps"),
    ("0, empty", "exclude"),
    ("empty", "stability.checkpoints layers"),
    # Positive numbers without a bound, and those that may be 0 too.
    ("2.5, huge", "bandwidth low high blown_up settled radius lr learning_rate penalty rise scale largest_input "
     "largest_test_input "
     "smoothness enough c lambda_1 critical_learning_rate.rate linearity.rate expected_regime.rate weight_linearity.rate "
     "pl_report.rate "
     "convex_bounds.rate silencing_shift.slack"),
    ("0, 2.5, huge", "slack classify_run.rise kernel_fall tolerance beta eta until spread ridge noise half_sum_rate.rate "
     "stability.rate gamma"),
    # Any finite number, and arrays of them in formulas that broadcast.
    ("-1, 0, 2.5, huge", "shift train_shift strength GeneralQuadratic.gamma split_loss_by_curvature.loss displacement.c "
     "quadratic_step.rate reduced_step.w"),
    ("-1, 0, 2.5, huge, shape", "rare_word_kl.strength class_orbit.rate descend.rate top_direction.rate one_example.g "
     "one_example.kernel "
     "one_example.rate one_example.y one_example.c pure_quadratic.g pure_quadratic.kernel pure_quadratic.rate "
     "pure_quadratic.gamma "
     "pure_quadratic.norm unit_sigma.g unit_sigma.kernel unit_sigma.rate unit_sigma.y unit_sigma.c0 unit_sigma.gamma"),
    ("0, shape", "rare_word_kl.probability silencing_shift.logits silencing_shift.thresholds largest_norm.inputs "
     "class_orbit.v largest_smoothness.inputs"),
    ("inf, 0, 2.5, huge, empty, shape", "fv_bound.beta fv_bound.m fv_bound.delta visits"),
    # Formulas pass NaN on, and one step of a run that has blown up begins at NaN.
    ("shape, nan tensor", "kl_divergence.teacher kl_divergence.student total_variation.teacher total_variation.student "
     "log_bulk_partition.logits rare_word_logits.logits shift_logits.logits class_eigenvalues.u class_eigenvalues.v "
     "class_eigenvalues.u0 "
     "gated_kernel.u gated_kernel.v gated_kernel.gate gated_kernel.x gated_output.u gated_output.v gated_output.gate "
     "gated_output.x "
     "quadratic_step.residual quadratic_step.jacobian quadratic_step.curved reduced_step.u reduced_step.v "
     "top_direction.next_kernel "
     "top_direction.residual top_direction.next_residual one_example_step.g one_example_step.kernel example_losses.outputs "
     "objective_and_gradient.components objective_and_gradient.signals"),
    ("nan, inf, -inf, -1, 0, 2.5, huge, nan tensor", "one_example_step.y one_example_step.c one_example_step.rate"),
    # A loss that is NaN has diverged; a label may be anything.
    ("empty, nan list", "classify_run.trace classify_run.kernel track_eigenpairs.labels catapult_count.exceeded"),
    ("nan tensor", "DagNetwork.graph"),
    # Modules are models and functions; None is a choice of its own; a text is a name.
    ("module", "linearize.model quadratize.model TaylorTwin.model in_degree_report.model batch_weight features product "
     "shifted_module.shift"),
    ("none", "mode accuracy linearity_deviation.sample masked_loss.visible objective_and_gradient.visible"),
    ("text", "target AGOP.at"),
)  # fmt: skip
ALLOWED = {(name, value) for values, names in RANGES for name in names.split() for value in values.split(", ")}


@dataclass(frozen=True)
class Case:
    """One argument of one public callable, and what is put in its place."""

    name: str
    argument: str
    bad: str

    def allowed(self) -> bool:
        """Whether the table says that the value is right here."""
        function = self.name.rpartition(".")[2]
        return (self.argument, self.bad) in ALLOWED or (f"{function}.{self.argument}", self.bad) in ALLOWED


@dataclass(frozen=True)
class Judgement:
    """What became of a case: "clear", "allowed", "accepted" (which is wrong), "cryptic" or "endless"."""

    case: Case
    verdict: str
    message: str


#: Rooms of training and monitors check their arguments in their own way, and are judged by their own tests so far.
ELSEWHERE = {"train", "Fleet", "Fleet.train", "Monitor", "Monitor.observe", "MultiCatapult"}


def all_cases() -> list[Case]:
    """Every argument of every baseline with every bad value, apart from flags and from what is a default."""
    found = []
    for name, make in BASELINES.items():
        if name in ELSEWHERE:
            continue
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
    words = (
        rf"\b{re.escape(argument)}\b|\b(must|needs?|takes|accepts|[Ee]xpected|give|only|load|refused|NaN|empty|no submodule)\b"
    )
    return ours and "\n" not in text and bool(re.search(words, text))


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


def test_every_public_callable_has_a_baseline_or_a_reason():
    assert public_callables() <= {*BASELINES, *WITHOUT}
    assert set(WITHOUT) <= public_callables()
    assert not set(BASELINES) & set(WITHOUT)


@pytest.mark.parametrize("name", ["hessian", "critical_learning_rate", "measures.dynamics.split_loss", "train"])
def test_baselines_are_valid(name):
    resolve(name)(**BASELINES[name]())


def test_bad_values_of_some_arguments():
    """One case in thirty, with every kind of bad value among them; the slow test has all."""
    cases = [case for case in all_cases() if case.name != "survey"]
    judge_all(random.Random(0).sample(cases, 300))


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
