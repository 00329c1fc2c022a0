"""Claims hold, fail, are not reproduced or only measured; the registry finds, and names what is near."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import theodolite as th
from tests.experiments.samples import Right, Wrong
from theodolite.experiments import Claim, Experiment, Measured, Reported, State, UnknownExperimentError
from theodolite.experiments.base import check_declaration
from theodolite.experiments.manifest import items

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
    assert "5 of 6 jobs were there already, a line cut short was found" in resumed.sentence()
    assert "there already" not in th.experiments.load_run(rows.parent).sentence()


def test_unknown_names_bring_the_nearest():
    with pytest.raises(UnknownExperimentError, match=r"checks/stability-edge.*theodolite list"):
        th.experiments.get("checks/stability-egde")
    with pytest.raises(UnknownExperimentError, match="module:Class"):
        th.experiments.get("nosuch.module:Thing")
    with pytest.raises(UnknownExperimentError, match="no Experiment"):
        th.experiments.get("theodolite.experiments:Claim")
    with pytest.raises(UnknownExperimentError, match="could not be imported"):
        th.experiments.get(":Thing")
    with pytest.raises(ValueError, match="size must be one of"):
        th.experiments.run("checks/stability-edge", "huge")


def test_experiments_can_be_registered(monkeypatch):
    monkeypatch.setattr("theodolite.experiments.registry._CLASSES", {})
    th.experiments.register(Wrong)
    assert "samples/wrong" in th.experiments.names("samples/*")
    assert isinstance(th.experiments.get("samples/wrong"), Wrong)


@pytest.mark.parametrize("missing", ["id", "source", "claims", "sizes"])
def test_an_experiment_must_state_its_parts(missing):
    broken = type("Broken", (Right,), {"__doc__": "A title.", missing: None})
    with pytest.raises(ValueError, match=missing):
        check_declaration(broken)
    for bad in ("../../outside", "a//b", "/a", "a/../b", ""):
        with pytest.raises(ValueError, match="id"):
            check_declaration(type("Broken", (Right,), {"__doc__": "A title.", "id": bad}))
    with pytest.raises(ValueError, match="docstring"):
        check_declaration(type("Broken", (Right,), {"__doc__": None}))
    with pytest.raises(ValueError, match="sizes tiny, laptop, paper"):
        check_declaration(type("Broken", (Right,), {"__doc__": "A title.", "sizes": {"tiny": {}}}))


def test_the_manifest_is_the_whole_list():
    assert len(items()) == 209
    assert items()[0].key == "000 Figure 2.1"
    assert {item.system for item in items()} == {"A", "B", "C1", "C2", "D", "E", "F", "G", "H", "I", "J", "K"}
    known = {item.key for item in items()}
    assert all(item.same_as in known for item in items() if item.same_as)


def test_coverage_counts_registered_rows_and_their_twins(monkeypatch):
    monkeypatch.setattr("theodolite.experiments.registry._CLASSES", {})
    monkeypatch.setattr("theodolite.experiments.registry._TARGETS", {})  # as if nothing were registered yet
    before = th.experiments.coverage()

    class Figure(Right):
        """A figure that stands in two sources."""

        id = "samples/figure"
        reproduces = ["002 Figure 1"]

    th.experiments.register(Figure)
    after = th.experiments.coverage()
    assert (before.count, after.count) == (0, 2)
    assert after.registered["002 Figure 1"] == ("samples/figure",)
    assert after.registered["000 Figure 4.1"] == ("samples/figure",)
    assert "002 Figure 1" in before.missing
    assert after.by_system()["C1"][0] == 2
    assert 0 < after.fraction < 1

    class Unknown(Figure):
        """A row that does not exist."""

        id = "samples/unknown"
        reproduces = ["009 Figure 1"]

    th.experiments.register(Unknown)
    with pytest.raises(ValueError, match="009 Figure 1"):
        th.experiments.coverage()


def test_an_experiment_is_abstract():
    with pytest.raises(TypeError):
        Experiment()
