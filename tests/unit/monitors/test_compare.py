"""`compare_runs`: losses that were made up, so that who is ahead, by how much and from where is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

import theodolite as th
from tests.unit.monitors.logs import header, write_lines
from theodolite.monitors.log import MonitorLog, fold


def run(loss: Callable[[int], float], steps: Iterable[int] = range(200), pace: float | None = None) -> MonitorLog:
    """A log; `pace` is the seconds of a step."""
    times = {} if pace is None else {"seconds": pace}
    return fold(
        [header(), *({"kind": "step", "step": t, "loss": loss(t), **{k: v * (t + 1) for k, v in times.items()}} for t in steps)]
    )


def wavy(level: float) -> Callable[[int], float]:
    """Losses that alternate around a level: their mean over every part is the level itself."""
    return lambda t: level + 0.25 * (-1) ** t


@pytest.mark.parametrize(("a", "b", "ahead"), [(1.0, 1.5, "one"), (1.5, 1.0, "two")])
def test_the_lower_loss_is_ahead_by_the_exact_difference(a, b, ahead):
    found = th.compare_runs(run(wavy(a)), run(wavy(b)), names=("one", "two"))
    assert (found.ahead, found.at_step, found.difference, found.error) == (ahead, 199, b - a, 0.0)
    assert [row["loss"] for row in found.runs] == [a, b]
    assert [row["best"] for row in found.runs] == [a - 0.25, b - 0.25]
    assert f"{ahead} is ahead at step 199" in found.sentence()


def test_of_runs_of_other_lengths_the_common_steps_count():
    falling = run(lambda t: 2.0 - t / 128, range(200))
    found = th.compare_runs(falling, run(lambda t: 1.0, range(100)), names=("long", "short"))
    assert found.at_step == 99
    assert found.difference == 1.0 - (2.0 - 89.5 / 128)  # steps 80 to 99, the last twenty; later ones are far lower
    assert found.ahead == "short"


def test_a_difference_within_its_error_is_none():
    scattered = [run(lambda t, shift=shift: 1.0 + math.sin(3.0 * (t + shift)) ** 3) for shift in (0, 1)]
    found = th.compare_runs(*scattered, names=("one", "two"))
    assert found.difference != 0.0
    assert abs(found.difference) < 2 * found.error
    assert found.ahead == ""
    assert "Neither run is ahead" in found.sentence()


def test_at_equal_time_the_slower_steps_are_fewer():
    """Both learn alike per step; the second takes four times as long for one."""
    found = th.compare_runs(
        run(lambda t: 2.0 - t / 256, pace=0.5), run(lambda t: 2.0 - t / 256, pace=2.0), names=("quick", "slow")
    )
    assert (found.ahead, found.difference) == ("", 0.0)
    assert (found.at_seconds, found.ahead_in_time) == (100.0, "quick")
    assert found.time_difference == (2.0 - 39.5 / 256) - (2.0 - 189.5 / 256)  # its steps 30 to 49 against 180 to 199
    assert "After 100 s of training quick is ahead." in found.verdict()


def test_without_times_nothing_is_said_of_time():
    found = th.compare_runs(run(wavy(1.0)), run(wavy(2.0)))
    assert (found.at_seconds, found.ahead_in_time) == (None, "")
    assert not any("training" in sentence for sentence in found.verdict())


def test_runs_that_part_are_the_same_up_to_there():
    found = th.compare_runs(run(wavy(1.0)), run(lambda t: wavy(1.0)(t) + 2.0 * (t >= 120)))
    assert (found.same_until, found.parted, found.ahead) == (119, 120, "first")


def test_a_run_with_itself():
    found = th.compare_runs(run(wavy(1.0)), run(wavy(1.0)))
    assert (found.same_until, found.parted, found.ahead, found.difference) == (199, None, "", 0.0)


@pytest.mark.parametrize("end", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_behind(end):
    found = th.compare_runs(run(lambda t: end if t == 199 else 0.1), run(wavy(9.0)), names=("lost", "alive"))
    assert (found.ahead, found.error) == ("alive", math.inf)


def test_nothing_in_common():
    found = th.compare_runs(run(wavy(1.0), []), run(wavy(1.0)))
    assert (found.at_step, found.ahead) == (None, "")
    assert "have no step in common" in found.sentence()


def test_files_are_called_by_their_folders(tmp_path):
    for name, level in (("low", 1.0), ("high", 2.0)):
        write_lines(tmp_path / name / "monitor.jsonl", ({"kind": "step", "step": t, "loss": level} for t in range(40)))
    found = th.compare_runs(tmp_path / "high", tmp_path / "low" / "monitor.jsonl")
    assert (found.names, found.ahead, found.difference) == (("high", "low"), "low", -1.0)
    same = th.compare_runs(tmp_path / "low", tmp_path / "low")
    assert same.names == ("low (first)", "low (second)")
