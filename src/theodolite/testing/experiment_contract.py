"""The contract that every experiment keeps. Inherit it and name the experiment; pytest does the rest.

class TestFigure33(ExperimentContract):
    id = "catapult/figure-3.3"
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from theodolite.experiments import ExperimentRun, Figure, get, load_run, run, sources
from theodolite.experiments.claims import SIZES
from theodolite.experiments.figure import check_declaration
from theodolite.experiments.running import run_folder
from theodolite.runners import Computations, run_stored
from theodolite.runners.store import Record, plain, read_records
from theodolite.testing.equality import same

#: Each experiment's run at `tiny` and the shortest of its jobs, which is cheap to repeat.
_RUNS: dict[str, tuple[ExperimentRun, Record]] = {}


class DeclarationContract:
    """What an experiment says of itself, and one of its jobs: all that is quick where the whole is not."""

    id: ClassVar[str]
    #: What jobs computed, shared by all experiments that inherit from here; a folder shares it with other processes too.
    computations: ClassVar[Computations] = Computations()

    @property
    def experiment(self) -> Figure:
        return get(self.id)

    def test_states_what_an_experiment_must(self) -> None:
        check_declaration(type(self.experiment))
        own = sources()
        known = {item.key for source in own.values() for item in source.items}
        assert [key for key in self.experiment.items if key.partition(" ")[0] in own and key not in known] == []

    def test_jobs_are_plain_distinct_and_the_same_each_time(self) -> None:
        experiment = self.experiment
        for size in SIZES:
            jobs = [plain(job) for job in experiment.chosen_jobs(size)[:200]]
            again = [plain(job) for job in experiment.chosen_jobs(size)[:200]]
            texts = [json.dumps(job, sort_keys=True) for job in jobs]
            assert jobs
            assert jobs == again
            assert len(set(texts)) == len(texts)

    def test_its_first_job_gives_rows(self) -> None:
        job = self.experiment.chosen_jobs("tiny")[0]
        done = run_stored(self.experiment.study.work(), [job], name=self.id, computations=self.computations)
        assert [record.traceback for record in done.failures] == []
        assert done.rows


class ExperimentContract(DeclarationContract):
    """Runs the experiment once at `tiny` and looks at it from all sides.

    A claim that states why it `fails` at `tiny` must fail there: the test says so when it begins to hold.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if old := [name for name in ("known_failures", "unsettled") if name in vars(cls)]:
            raise TypeError(f"{cls.__name__}: {old[0]} now stands on the claim, as fails={{'tiny': reason}} or undecided=...")

    @property
    def tiny_run(self) -> ExperimentRun:
        return self._run_once()[0]

    def _run_once(self) -> tuple[ExperimentRun, Record]:
        if self.id not in _RUNS:
            with tempfile.TemporaryDirectory() as out:  # kept and read back, so that rows prove they can be
                run(self.id, "tiny", out=out, computations=self.computations)
                folder = run_folder(Path(out), self.experiment.id, "tiny")
                shortest = min(read_records(folder).values(), key=lambda record: record.seconds)
                _RUNS[self.id] = load_run(folder, [self.experiment]), shortest
        return _RUNS[self.id]

    def test_every_job_finishes_at_tiny(self) -> None:
        assert [record.traceback for record in self.tiny_run.failures] == []
        assert self.tiny_run.rows

    def test_a_job_gives_the_same_rows_again(self) -> None:
        shortest = self._run_once()[1]
        again = run_stored(
            self.experiment.study.work(), [shortest.job], name=self.id, computations=_AllBut(self.computations, shortest.key)
        )
        assert again.failures == []
        assert same(again.rows, shortest.rows)

    def test_claims_are_measured_and_hold(self) -> None:
        verdicts = self.tiny_run.verdicts
        assert [v.note for v in verdicts if v.note] == []
        open_here = {claim.text for claim in self.experiment.claims if "tiny" in claim.undecided}
        expected = {claim.text for claim in self.experiment.claims if "tiny" in claim.fails}
        assert {v.text for v in verdicts if v.failed} - open_here == expected

    def test_claims_can_fail(self) -> None:
        """Rows whose numbers are all NaN must convince nobody."""
        rows = [{k: float("nan") if is_number(v) else v for k, v in row.items()} for row in self.tiny_run.rows]
        for unconvincing in (rows, []):
            assert [v.text for v in self.experiment.judge(unconvincing, "paper") if v.holds] == []

    def test_the_figure_is_drawn(self) -> None:
        assert any(ax.has_data() for ax in self.experiment.draw(self.tiny_run.rows).axes)

    def test_the_figure_is_written(self) -> None:
        from theodolite.plots import to_svg

        assert to_svg(self.experiment.draw(self.tiny_run.rows)).startswith("<svg")

    def test_the_figure_repeats(self) -> None:
        rows = self.tiny_run.rows
        assert same(drawn(self.experiment.draw(rows)), drawn(self.experiment.draw(rows)))


class _AllBut(Computations):
    """What was computed, without one job: it is done again, but not what it needs."""

    def __init__(self, known: Computations, left_out: str) -> None:
        super().__init__()
        self._known, self._left_out = known, left_out

    def get(self, key: str) -> Record | None:
        return None if key == self._left_out else self._known.get(key)


#: How artists of matplotlib tell what they show.
_SHOWN = ("get_text", "get_xydata", "get_offsets", "get_array", "get_data", "get_facecolor", "get_color", "get_label", "get_xy")


def drawn(figure: Any) -> list[list[Any]]:
    """What a figure shows, without the work of rendering it: kind, words, places and colours of all that its axes hold."""
    artists = [artist for ax in figure.axes for artist in ax.get_children()]
    return [[type(artist).__name__, *(_told(artist, name) for name in _SHOWN)] for artist in artists]


def _told(artist: Any, name: str) -> Any:
    """The answer of one of its methods as plain values."""
    answer = getattr(artist, name)() if hasattr(artist, name) else None
    if isinstance(answer, tuple | list):
        return [getattr(part, "tolist", lambda part=part: str(part))() for part in answer]
    return answer.tolist() if hasattr(answer, "tolist") else str(answer)


def is_number(value: Any) -> bool:
    """Whether a value is a number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
