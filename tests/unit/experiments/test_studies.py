"""Studies: what several figures look at is computed once, across figures, processes and engines; needs come first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import theodolite as th
from theodolite.experiments import Figure, Params, Study, at_least, rows, sizes
from theodolite.runners import Computations, Engine
from theodolite.runners.code_version import code_version


class Trained(Study):
    """Weights by seed; every call leaves a mark in a folder."""

    marks: str
    sizes = sizes(tiny={"n": 1}, laptop={"n": 1}, paper={"n": 1})

    def jobs(self, p):
        return [{"seed": 0}]

    def run(self, job):
        mark(self.marks, f"trained-{job['seed']}")
        if job["seed"] == 13:
            raise RuntimeError("unlucky")
        return {"weights": torch.full((3,), float(job["seed"]))}


class Curves(Study):
    """Rows of two kinds from one job, on weights that another study trained."""

    marks: str
    factor: float = 1.0
    sizes = sizes(shift=0.5, tiny={"seeds": (1, 2)}, laptop={"seeds": (1, 2, 3)}, paper={"seeds": (1, 2, 3, 4)})

    def jobs(self, p):
        return [{"seed": seed, "shift": p.shift, "name": name} for seed in p.seeds for name in ("a", "b")]

    def needs(self, job):
        return [Trained(marks=self.marks).job(seed=job["seed"])]

    def run(self, job, trained):
        mark(self.marks, f"curve-{job['seed']}-{job['name']}")
        value = self.factor * float(trained[0]["weights"].sum()) + job["shift"]
        yield {"kind": "run", "seed": job["seed"], "name": job["name"], "value": value}
        yield {"kind": "step", "seed": job["seed"], "name": job["name"], "value": 2 * value}


def mark(folder, name):
    place = Path(folder)
    number = len(list(place.glob(f"{name}.*")))
    (place / f"{name}.{number}").touch()


def figures(marks):
    class View(Figure):
        def draw(self, rows):
            from theodolite import plots

            return plots.curves(rows, "seed", "value").figure

    class FigureA(View):
        """Runs of both names."""

        study, item, id = Curves(marks=str(marks)), "lee-2031 Figure A", "lee/figure-A"
        view = rows(kind="run")
        claims = [at_least(0.0, "all are positive", rows.min("value"))]

    class FigureB(View):
        """Steps of one name."""

        study, item, id = Curves(marks=str(marks)), "lee-2031 Figure B", "lee/figure-B"
        only, view = {"name": "a"}, rows(kind="step")
        claims = [at_least(7.0, "the mean", rows.mean("value"))]

    return FigureA(), FigureB()


@pytest.mark.parametrize("engine", ["serial", "joblib"])
def test_figures_of_one_study_compute_it_once(tmp_path, engine):
    marks = tmp_path / "marks"
    marks.mkdir()
    first, second = figures(marks)
    a = th.experiments.run(first, out=tmp_path / "out", engine=Engine(engine, workers=2))
    assert (a.jobs, a.reused, [row["value"] for row in a.rows]) == (4, 0, [3.5, 3.5, 6.5, 6.5])
    made = sorted(path.name for path in marks.iterdir())
    assert made == ["curve-1-a.0", "curve-1-b.0", "curve-2-a.0", "curve-2-b.0", "trained-1.0", "trained-2.0"]
    b = th.experiments.run(second, out=tmp_path / "out", engine=engine)
    assert (b.jobs, b.reused, [row["value"] for row in b.rows]) == (2, 2, [7.0, 13.0])
    assert sorted(path.name for path in marks.iterdir()) == made
    assert [v.holds for v in (*a, *b)] == [True, True]
    th.experiments.run(second, out=tmp_path / "other")  # another folder knows nothing of the first
    assert len(list(marks.iterdir())) == 10


def test_without_a_folder_needs_are_computed_once_and_computations_can_be_passed(tmp_path):
    first, second = figures(tmp_path)
    known = Computations()
    th.experiments.run(first, computations=known)
    assert th.experiments.run(second, computations=known).reused == 2
    assert len(list(tmp_path.iterdir())) == 6


def test_a_larger_size_reuses_what_a_smaller_one_computed(tmp_path):
    first, _ = figures(tmp_path)
    known = Computations()
    th.experiments.run(first, "tiny", computations=known)
    larger = th.experiments.run(first, "laptop", computations=known)
    assert (larger.jobs, larger.reused) == (6, 4)


def test_fresh_does_everything_anew_but_once(tmp_path):
    first, second = figures(tmp_path)
    out = tmp_path / "out"
    th.experiments.run(first, out=out)
    anew = Computations(out / "computations", fresh=True)
    assert th.experiments.run(first, out=out, fresh=True, computations=anew).reused == 0
    assert th.experiments.run(second, out=out, fresh=True, computations=anew).reused == 2
    assert len([path for path in tmp_path.iterdir() if path.name != "out"]) == 12


def test_a_need_that_fails_fails_what_needs_it_and_nothing_else(tmp_path):
    class Unlucky(Curves):
        sizes = sizes(shift=0.0, tiny={"seeds": (1, 13)}, laptop={"seeds": ()}, paper={"seeds": ()})

    class Shown(Figure):
        """One job of two fails."""

        study, where, id = Unlucky(marks=str(tmp_path)), "a test", "lee/unlucky"
        only = {"name": "a"}
        claims = [at_least(0.0, "all are positive", rows.min("value"))]

        def draw(self, rows):
            raise NotImplementedError

    run = th.experiments.run(Shown())
    assert [record.job["seed"] for record in run.failures] == [13]
    assert "What it needs failed: RuntimeError: unlucky" in run.failures[0].error
    assert len(run.rows) == 2


def test_options_are_part_of_what_is_computed(tmp_path):
    one, two = Curves(marks="x"), Curves(marks="x", factor=2.0)
    assert one.name != two.name
    assert one.name == Curves(marks="x", factor=1.0).name
    assert Curves(marks="x", sizes={"tiny": Params(seeds=(9,), shift=0.0)}).name == one.name
    with pytest.raises(TypeError, match=r"no option 'colour'. It has: factor, marks"):
        Curves(colour="red")


def test_parameters_are_read_as_attributes():
    p = Params(width=3, steps=2)
    assert (p.width, p.but(steps=5).steps, dict(p)) == (3, 5, {"width": 3, "steps": 2})
    with pytest.raises(AttributeError, match="height"):
        p.height  # noqa: B018
    assert sizes(a=1, tiny={"b": 2}, laptop={"b": 3}, paper={"a": 4})["paper"] == {"a": 4}


MODULE = """
from theodolite.experiments import Figure, Study, at_least, rows, sizes
{comment}
class S(Study):
    "{words}"
    sizes = sizes(tiny={{}}, laptop={{}}, paper={{}})
    def jobs(self, p):
        return [{{"seed": 0}}]
    def run(self, job):
        return {{"value": {value}}}
class F(Figure):
    "A view."
    study, where, id = S(), "here", "x/y"
    claims = [at_least({bound}, "text", rows.min("value"))]
    def draw(self, rows):
        return None
"""


def test_only_what_decides_rows_counts_as_code(tmp_path):
    """Comments, docstrings and claims make nothing older; a number in the computation does."""

    def digest(**changed):
        text = MODULE.format(**{"comment": "", "words": "a study", "value": 1, "bound": 0, **changed})
        (tmp_path / "owned.py").write_text(text)
        code = "import owned; from theodolite.runners.code_version import code_version; print(code_version(owned.S))"
        path = {"PYTHONPATH": f"{tmp_path}:{Path(th.__file__).parents[1]}", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True).stdout

    base = digest()
    assert digest(comment="# said otherwise") == digest(words="the same study") == digest(bound=5) == base
    assert digest(value=2) != base


def test_the_code_of_a_study_is_its_import_closure():
    from theodolite.experiments.checks.linear_models import KroneckerIdentity
    from theodolite.runners import code_version as module

    found = {}
    module._collect_own(KroneckerIdentity.__module__, found)
    assert "theodolite.problem.problem" in found
    assert "theodolite.linalg.eigenpairs" in found
    assert not any(name.startswith(("theodolite.plots", "theodolite.report", "theodolite.cli")) for name in found)
    assert "theodolite.experiments.claims" not in found
    assert code_version(KroneckerIdentity) == code_version(KroneckerIdentity)


# Rows of older code


class Needed(Study):
    def run(self, job):
        return {"value": VALUE["needed"]}


class Looking(Study):
    sizes = sizes(tiny={"n": 1}, laptop={"n": 2}, paper={"n": 3})

    def jobs(self, p):
        return [{"seed": seed} for seed in range(p.n)]

    def needs(self, job):
        return [Needed().job(of=job["seed"] * 0)]

    def run(self, job, needed):
        return {"seed": job["seed"], "value": needed[0]["value"] + VALUE["own"]}


class One(Figure):
    """A view."""

    study, where, id = Looking(), "a test", "lee/one"
    claims = {"positive": at_least(0.0, rows.min("value"))}

    def draw(self, rows):
        raise NotImplementedError


class Two(One):
    """Another view of the same study."""

    id = "lee/two"
    claims = {"positive": at_least(0.0, rows.max("value"))}


VALUE = {"needed": 1, "own": 0}


@pytest.fixture
def code(monkeypatch):
    """Digests that a test can change: `code["Needed"] = 2` is an edited file."""
    versions = {"Needed": 1, "Looking": 1}
    monkeypatch.setattr(
        "theodolite.runners.runs.code_version", lambda owner, *rest: f"{owner.__name__} {versions[owner.__name__]}"
    )
    monkeypatch.setitem(VALUE, "needed", 1)
    monkeypatch.setitem(VALUE, "own", 0)
    return versions


def values(run):
    return [row["value"] for row in run.rows], run.reused, run.outdated


def test_what_was_built_on_older_rows_is_older_too(tmp_path, code):
    assert values(th.experiments.run(One, out=tmp_path)) == ([1], 0, 0)
    VALUE["needed"], code["Needed"] = 2, 2
    assert values(th.experiments.run(One, "laptop", out=tmp_path)) == ([1, 1], 1, 2)  # the new job took the old need
    assert values(th.experiments.run(One, "laptop", out=tmp_path, update=True)) == ([2, 2], 0, 0)
    assert th.experiments.load_run(tmp_path / "lee" / "one" / "laptop", [One()]).outdated == 0
    assert th.experiments.load_run(tmp_path / "lee" / "one" / "tiny", [One()]).outdated == 1


def test_current_rows_of_another_figure_replace_older_ones(tmp_path, code):
    for figure in (One, Two):
        th.experiments.run(figure, out=tmp_path)
    VALUE["own"], code["Looking"] = 5, 2
    th.experiments.run(One, out=tmp_path, update=True)
    assert values(th.experiments.run(Two, out=tmp_path, resume=True)) == ([6], 1, 0)


def test_what_fresh_forgot_does_not_come_back(tmp_path, code):
    th.experiments.run(One, "paper", out=tmp_path)
    VALUE["own"] = 5
    anew = Computations(tmp_path / "computations", fresh=True)
    looked = [anew.get(record) for record in known_keys(tmp_path)]  # a fresh run that was stopped before its first job ended
    assert looked == [None] * 4
    assert values(th.experiments.run(Two, "paper", out=tmp_path)) == ([6, 6, 6], 0, 0)
    assert values(th.experiments.run(Two, "paper", computations=Computations(tmp_path / "computations"), fresh=True))[1] == 0


def known_keys(folder):
    return [path.stem for path in (folder / "computations").rglob("*.json")]


def test_a_failing_need_of_one_job_leaves_the_others_alone(tmp_path):
    class Choosy(Looking):
        sizes = sizes(tiny={"n": 3}, laptop={"n": 3}, paper={"n": 3})

        def needs(self, job):
            return [] if job["seed"] else [][1]

        def run(self, job):
            return {"value": 1}

    class Shown(One):
        """A view."""

        study, id = Choosy(), "lee/choosy"

    run = th.experiments.run(Shown(), out=tmp_path)
    assert ["IndexError" in record.error for record in run.failures] == [True]
    assert len(run.rows) == 2
    assert th.experiments.run(Shown(), out=tmp_path, resume=True).reused == 2


def test_provisional_rows_are_shown_and_done_again(tmp_path):
    class Absent(Looking):
        def needs(self, job):
            return []

        def run(self, job):
            return {"value": VALUE["own"], "provisional": VALUE["own"] == 0}

    class Shown(One):
        """A view."""

        study, id = Absent(), "lee/absent"

    assert values(th.experiments.run(Shown(), out=tmp_path)) == ([0], 0, 0)
    VALUE["own"] = 7
    try:
        assert values(th.experiments.run(Shown(), out=tmp_path, resume=True)) == ([7], 0, 0)
    finally:
        VALUE["own"] = 0


def test_rows_in_memory_belong_to_whoever_asks(tmp_path):
    known = Computations()
    first = th.experiments.run(One, computations=known)
    first.rows[0]["value"] = 99
    assert th.experiments.run(One, computations=known).rows[0]["value"] == 1


def test_the_rows_of_a_run_of_version_0_1_are_kept_and_marked(tmp_path):
    """A folder made by that version: it loads without a view, and going on with it redoes nothing unasked."""
    old = Path(__file__).parents[2] / "data" / "before-second-plan"
    (manifest,) = old.rglob("manifest.json")
    folder = tmp_path / "checks" / "kronecker-identity" / "tiny"
    shutil.copytree(manifest.parent, folder)
    loaded = th.experiments.load_run(folder)
    assert loaded.outdated == loaded.jobs == loaded.done
    resumed = th.experiments.run("checks/kronecker-identity", out=tmp_path, resume=True)
    assert (resumed.reused, resumed.outdated) == (loaded.jobs, loaded.jobs)
    assert resumed.rows == loaded.rows
    assert th.experiments.run("checks/kronecker-identity", out=tmp_path, update=True).outdated == 0


def test_two_scripts_do_not_share_rows(tmp_path):
    script = """
import sys
import theodolite as th
from theodolite.experiments import Experiment, at_least, rows, sizes
class Mine(Experiment):
    "Mine."
    id, where = "mine/mine", "here"
    sizes = sizes(tiny={{}}, laptop={{}}, paper={{}})
    claims = {{"positive": at_least(0, rows.min("value"))}}
    def jobs(self, p):
        return [{{"seed": 0}}]
    def run(self, job):
        return {{"value": {value}}}
    def draw(self, rows):
        return None
print(th.experiments.run(Mine, computations=th.runners.Computations(sys.argv[1])).rows)
"""
    for value in (1, 2):
        path = tmp_path / f"script{value}.py"
        path.write_text(script.format(value=value))
        environment = {**os.environ, "PYTHONPATH": str(Path(th.__file__).parents[1])}
        command = [sys.executable, str(path), str(tmp_path / "shared")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"[{{'value': {value}}}]"


def test_rows_made_before_a_data_set_arrived_are_marked(tmp_path, monkeypatch):
    """What stands in for missing files decides rows as code does: `update` redoes them when the files are there."""
    from theodolite.experiments.catapult.sweeps import Sweep
    from theodolite.experiments.checks.linear_models import KroneckerIdentity

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    before = code_version(Sweep), code_version(KroneckerIdentity)
    files = {
        f"{which}_{part}": numpy.zeros((4, 28, 28) if which == "x" else 4, "uint8")
        for which in "xy"
        for part in ("train", "test")
    }
    numpy.savez(tmp_path / "mnist.npz", **files)
    assert code_version(Sweep) != before[0]
    assert code_version(KroneckerIdentity) == before[1]
