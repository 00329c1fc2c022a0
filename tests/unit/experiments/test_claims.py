"""Claims hold, fail, are not reproduced or only measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import theodolite as th
from tests.experiments.samples import Right, Wrong
from theodolite.experiments import (
    Claim,
    Measured,
    Reported,
    State,
    at_least,
    at_most,
    between,
    equal,
    measured,
    relative,
    within,
)

ROWS = [{"x": 2.0}]


def judge(value, size="tiny", **options):
    return Claim("text", lambda rows: value, **options).judge(ROWS, size)


@pytest.mark.parametrize(
    ("rule", "expected", "tolerance", "good", "bad"),
    [
        ("within", 2.0, 0.1, 2.1 - 1e-9, 2.11),
        ("relative", 10.0, 0.05, 9.5, 9.49),
        ("at least", 3.0, 0.0, 3.0, 2.999),
        ("at most", 3.0, 0.5, 3.5, 3.51),
        ("between", (0.0, 1.0), 0.0, 1.0, 1.001),
        ("equal", "yes", 0.0, "yes", "no"),
    ],
)
def test_every_rule_can_hold_and_fail(rule, expected, tolerance, good, bad):
    options = {"rule": rule, "expected": expected, "tolerance": tolerance}
    assert judge(good, **options).state is State.HOLDS
    assert judge(bad, **options).state is State.FAILS
    assert judge(float("nan"), **options).state is State.FAILS
    assert judge(None, **options).state is State.FAILS


def test_the_reported_value_is_what_the_rule_compares_with_unless_told():
    reported = Reported(0.5, "Table 1", read_from="plot")
    assert judge(0.52, reported=reported, tolerance=0.05).holds
    assert judge(0.6, reported=reported, tolerance=0.05).failed
    assert judge(0.6, reported=reported, expected=0.6).holds
    assert "read from a plot" in str(judge(0.6, reported=reported))


def test_a_miss_below_the_stated_size_is_no_failure():
    options = {"expected": 1.0, "since": "laptop"}
    assert judge(2.0, "tiny", **options).state is State.NOT_REPRODUCED
    assert judge(2.0, "laptop", **options).state is State.FAILS
    assert judge(2.0, "paper", **options).state is State.FAILS
    assert judge(1.0, "tiny", **options).state is State.HOLDS


def test_no_value_to_compare_with_means_measured():
    verdict = judge(Measured(3.0, error=0.5))
    assert verdict.state is State.MEASURED
    assert (verdict.measured, verdict.error) == (3.0, 0.5)
    assert "3 ± 0.5" in str(verdict)


def test_what_cannot_be_measured_fails_and_says_why():
    verdict = Claim("text", lambda rows: rows[0]["y"], expected=1.0).judge(ROWS, "tiny")
    assert verdict.failed
    assert "KeyError: 'y'" in verdict.note


def test_a_bug_below_the_stated_size_is_no_size_effect():
    assert Claim("text", lambda rows: rows[0]["y"], expected=1.0, since="paper").judge(ROWS, "tiny").failed


def test_no_rows_convince_nobody():
    claim = Claim("text", lambda rows: sum(row["x"] for row in rows), rule="equal", expected=0)
    assert claim.judge([], "tiny").failed
    assert "no rows" in claim.judge([], "tiny").note


@pytest.mark.parametrize(
    ("value", "good"),
    [
        (torch.tensor(2.0), True),
        (np.float32(2.0), True),
        (torch.tensor([1.0, 2.0]), False),
        (np.array([1.0]), False),
        ("two", False),
    ],
)
def test_measured_values_of_any_kind_are_judged(value, good):
    assert judge(value, expected=2.0).holds is good


def test_a_bare_reported_value_is_enough():
    claim = Claim("text", lambda rows: "yes", reported="yes")
    assert claim.judge(ROWS, "tiny").holds
    assert claim.reported.value == "yes"
    assert judge(True, expected=True).holds
    assert judge(False, expected=True).failed
    assert judge(0, expected=0).holds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "withn"}, "'within'"),
        ({"since": "huge"}, "since"),
        ({"fails": {"huge": "no reason"}}, "fails"),
        ({"rule": "between", "expected": 1.0}, "pair"),
        ({"rule": "between"}, "pair"),
    ],
)
def test_bad_claims_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Claim("text", lambda rows: 1.0, **options)


def test_runs_carry_verdicts():
    run = th.experiments.run("tests.experiments.samples:Wrong")
    assert [v.state for v in run] == [State.FAILS, State.NOT_REPRODUCED, State.MEASURED, State.FAILS]
    assert not th.experiments.run(Wrong).good
    assert not run.good
    assert len(run) == 4
    assert run[0].failed
    assert "2 fails" in str(run)
    assert th.experiments.run(Right()).good


def test_a_resumed_run_says_what_was_there(tmp_path):
    th.experiments.run(Right, out=tmp_path)
    rows = tmp_path / "samples" / "right" / "tiny" / "rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-5])
    resumed = th.experiments.run(Right, out=tmp_path, resume=True)
    assert "6 of 6 jobs were there already, a line cut short was found" in resumed.sentence()
    assert "there already" not in th.experiments.load_run(rows.parent, [Right()]).sentence()


@pytest.mark.parametrize(
    ("claim", "rule"),
    [
        (at_least(1.0, "text", lambda rows: 2.0), "at least 1"),
        (at_most(3.0, "text", lambda rows: 2.0, tolerance=0.5), "at most 3 (± 0.5)"),
        (between(1.0, 3.0, "text", lambda rows: 2.0), "between 1 and 3"),
        (equal(2.0, "text", lambda rows: 2.0), "2"),
        (within(0.1, None, "text", lambda rows: 2.05, reported=2.0), "2 ± 0.1"),
        (relative(0.1, 2.1, "text", lambda rows: 2.0, says="about two"), "2.1 ± 10 %"),
        (measured("text", lambda rows: 2.0), ""),
    ],
)
def test_verbs_write_claims_down(claim, rule):
    verdict = claim.judge(ROWS, "tiny", where="Zhu 2024, Figure 3.3")
    assert verdict.rule == rule
    assert verdict.state is (State.HOLDS if rule else State.MEASURED)
    assert verdict.reported is None or verdict.reported.where == "Zhu 2024, Figure 3.3"


def test_an_expected_failure_says_why_and_a_claim_that_begins_to_hold_is_noticed():
    claim = at_least(1.0, "text", lambda rows: rows[0]["x"], fails={"tiny": "too few points"}, where="Table 1", says="one")
    failed, held = claim.judge([{"x": 0.0}], "tiny"), claim.judge([{"x": 2.0}], "tiny")
    assert failed.failed
    assert not failed.surprising
    assert "too few points" in str(failed)
    assert held.surprising
    assert claim.judge([{"x": 0.0}], "laptop").reason == ""
    assert failed.reported.where == "Table 1"
