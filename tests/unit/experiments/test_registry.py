"""The registry finds figures by chapter and names what is near; sources are cited as readers do; foreign papers are welcome."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import theodolite as th
from tests.experiments.samples import Right, Wrong
from theodolite.experiments import Experiment, Study, UnknownExperimentError
from theodolite.experiments.figure import check_declaration
from theodolite.experiments.registry import chapters, figures_of


def test_unknown_names_bring_the_nearest():
    with pytest.raises(UnknownExperimentError, match=r"checks/stability-edge.*theodolite list"):
        th.experiments.get("checks/stability-egde")
    with pytest.raises(UnknownExperimentError, match="module:Class"):
        th.experiments.get("nosuch.module:Thing")
    with pytest.raises(UnknownExperimentError, match="no Experiment"):
        th.experiments.get("theodolite.experiments:Claim")
    with pytest.raises(UnknownExperimentError, match="could not be imported"):
        th.experiments.get(":Thing")
    with pytest.raises(ValueError, match="size must be 'tiny'"):
        th.experiments.run("checks/stability-edge", "huge")


def test_experiments_can_be_registered(monkeypatch):
    monkeypatch.setattr("theodolite.experiments.registry._REGISTERED", {})
    th.experiments.register(Wrong)
    assert "samples/wrong" in th.experiments.names("samples/*")
    assert isinstance(th.experiments.get("samples/wrong"), Wrong)


def test_every_chapter_has_figures_and_ids_follow_from_items():
    found = {name: figure for chapter in chapters() for name, figure in figures_of(chapter).items()}
    assert set(found) <= set(th.experiments.names())
    assert all(figures_of(chapter) for chapter in chapters())
    named = [figure() for figure in found.values() if figure.item]
    for figure in named:
        word, _, number = figure.items[0].partition(" ")[2].partition(" ")
        assert figure.id.endswith(f"/{word.lower()}-{number}"), figure.id
        assert figure.source.startswith(figure.sources[0].label), figure.id
    assert len(named) > 90


def test_no_experiment_names_a_source_by_number():
    for name in th.experiments.names():
        figure = th.experiments.get(name)
        reported = [claim.reported.where for claim in figure.claims if claim.reported is not None]
        for text in (figure.source, figure.departs, figure.description, *reported):
            assert not re.search(r"(?<![\d,.])00[0-4]\b", text), (name, text)


@pytest.mark.parametrize("missing", ["id", "where", "claims", "sizes"])
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


def test_sources_list_every_figure_and_table():
    items = [item for source in th.experiments.sources().values() for item in source.items]
    assert len(items) == 209
    assert items[0].key == "wu-2023 Figure 2.1"
    assert {item.system for item in items} == {"A", "B", "C1", "C2", "D", "E", "F", "G", "H", "I", "J", "K"}
    known = {item.key for item in items}
    assert all(item.same_as in known for item in items if item.same_as)
    for source in th.experiments.sources().values():
        assert source.title
        assert source.authors
        assert 2020 <= source.year <= 2024
        assert source.link.startswith("https://")


def test_coverage_counts_registered_items_and_their_twins(monkeypatch):
    monkeypatch.setattr("theodolite.experiments.registry._REGISTERED", {})
    monkeypatch.setattr("theodolite.experiments.registry.chapters", list)  # as if nothing were registered yet
    before = th.experiments.coverage()

    class Figure(Right):
        """A figure that stands in two sources."""

        id = "samples/figure"
        item = "wu-zhu-2020 Figure 1"

    th.experiments.register(Figure)
    after = th.experiments.coverage()
    assert (before.count, after.count) == (0, 2)
    assert after.registered["wu-zhu-2020 Figure 1"] == ("samples/figure",)
    assert after.registered["wu-2023 Figure 4.1"] == ("samples/figure",)
    assert "wu-zhu-2020 Figure 1" in before.missing
    assert after.by_system()["C1"][0] == 2
    assert 0 < after.fraction < 1

    class Foreign(Figure):
        """A figure of a paper that this package does not list."""

        id = "samples/foreign"
        item = "lee-2031 Figure 1"

    th.experiments.register(Foreign)
    assert th.experiments.coverage().count == 2
    assert th.experiments.coverage().others == ("lee-2031 Figure 1",)
    assert "1 of other sources" in str(th.experiments.coverage())
    assert th.experiments.get("samples/foreign").source == "lee-2031, Figure 1; a test"


def test_an_experiment_is_abstract():
    with pytest.raises(TypeError):
        Experiment()
    with pytest.raises(TypeError):
        Study()


FOREIGN = """
from theodolite.experiments import Figure, Study, at_least, rows, sizes

class Coins(Study):
    sizes = sizes(tiny={"n": 4}, laptop={"n": 40}, paper={"n": 400})
    def jobs(self, p):
        return [{"seed": seed} for seed in range(p.n)]
    def run(self, job):
        return {"seed": job["seed"], "value": job["seed"] % 2}

class Figure7(Figure):
    \"\"\"A figure of a paper that nobody here has read.\"\"\"
    study, item = Coins(), "lee-2031 Figure 7"
    id = "lee/figure-7"
    claims = [at_least(0.5, "half of the coins", rows.mean("value"), says="half")]
    def draw(self, rows):
        from theodolite import plots
        return plots.curves(rows, "seed", "value").figure

class Silent(Figure7):
    id = "lee/silent"
"""


def test_an_installed_package_adds_experiments_of_its_own_paper(tmp_path):
    """Registered by entry points alone: it lists, runs and shows; one that is broken hides nothing."""
    (tmp_path / "lee_paper.py").write_text(FOREIGN)
    info = tmp_path / "lee_paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lee-paper\nVersion: 1.0\n")
    points = {"lee/figure-7": "Figure7", "lee/broken": "Missing", "lee/silent": "Silent"}
    lines = ["[theodolite.experiments]", *(f"{name} = lee_paper:{attribute}" for name, attribute in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    package = Path(th.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(package)])}

    def command(*arguments):
        line = [sys.executable, "-c", "from theodolite.cli import main; main()", *arguments]
        return subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    listed = command("list", "lee")
    assert "lee-2031, Figure 7" in listed.stdout
    assert "1 of other sources" in listed.stdout
    assert "cannot be used: lee/broken" in listed.stderr
    assert "cannot be used: lee/silent" in listed.stderr  # without a docstring
    done = command("reproduce", "lee/figure-7", "--out", "shown")
    assert done.returncode == 0, done.stderr
    assert "reported half (lee-2031, Figure 7)" in done.stdout
    page = (tmp_path / "shown" / "index.html").read_text()
    assert "lee-2031, Figure 7" in page
    assert command("report", "shown").returncode == 0


class OldWay(Experiment):
    """As version 0.1 wrote experiments: sources by number, `figure`, annotated attributes, an `__init__` of its own."""

    id = "samples/old-way"
    source = "003, chapter 3"
    reproduces = ("003 Figure 3.3",)
    sizes: dict = {"tiny": {"n": 2}, "laptop": {"n": 2}, "paper": {"n": 2}}
    claims: tuple = (th.experiments.Claim("all are there", len, rule="equal", expected=2),)

    def __init__(self):
        self.drawn = 0

    def jobs(self, p):
        return [{"seed": seed} for seed in range(p["n"])]

    def run(self, job):
        return {"seed": job["seed"]}

    def figure(self, rows):
        self.drawn += 1
        return len(rows)


def test_experiments_written_the_old_way_still_run():
    run = th.experiments.run(OldWay)
    assert run.good
    assert run.experiment.items == ["zhu-2024 Figure 3.3"]
    assert run.experiment.draw(run.rows) == 2
    assert run.experiment.source == "003, chapter 3"
