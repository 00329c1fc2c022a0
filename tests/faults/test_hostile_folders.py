"""Folders and files from strangers: read as data, refused in one line where they name code or are out of all proportion."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from theodolite.cli import main

FIGURE = "checks/kronecker-identity"
#: A module that leaves a mark when it is imported.
MARKING = "from pathlib import Path\nPath({mark!r}).touch()\nfrom tests.experiments.samples import Right\n"


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of one honest run."""
    out = tmp_path_factory.mktemp("honest")
    with pytest.raises(SystemExit, match="0"):
        main(["reproduce", FIGURE, "--out", str(out)])
    return out


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """A copy of the run, in the folder that the command is called in; a module there leaves `mark` when it is imported."""
    home = tmp_path / "stranger"
    shutil.copytree(finished, home)
    (home / "stranger_code.py").write_text(MARKING.format(mark=str(tmp_path / "mark")))
    monkeypatch.chdir(home)
    monkeypatch.delitem(sys.modules, "stranger_code", raising=False)
    return home


def edit_manifest(folder, **changes):
    path = folder / FIGURE / "tiny" / "manifest.json"
    manifest = json.loads(path.read_text())
    target = changes.pop("target", None)
    if target is not None:
        manifest["settings"]["target"] = target
    path.write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "stranger_code:Right"},
        {"name": "unknown/one", "target": "stranger_code:Right"},
        {"name": "samples/right", "target": "stranger_code:Right"},
    ],
)
def test_code_that_a_manifest_names_is_not_run(call, folder, changes):
    edit_manifest(folder, **changes)
    code, _, err = call("report", ".")
    assert code == 1
    assert "code that a folder names is not run" in err
    assert "--experiment" in err
    code, *_ = call("reproduce", FIGURE, "--out", ".", "--fresh", "--size", "tiny")
    assert code == 0
    assert not (folder.parent / "mark").exists()
    assert "stranger_code" not in sys.modules


def test_code_that_the_user_names_is_run(call, folder):
    edit_manifest(folder, name="samples/right", target="stranger_code:Right")
    code, out, _ = call("report", ".", "--experiment", "stranger_code:Right")
    assert "samples/right (tiny)" in out
    assert (folder.parent / "mark").exists()
    assert code == 1  # its rows are those of something else


def test_the_page_of_an_own_experiment_shows_it_and_its_report_says_how(call, folder):
    code, *_ = call("reproduce", "stranger_code:Right", "--out", "mine")
    assert code == 0
    assert "samples/right" in (folder / "mine" / "index.html").read_text()
    code, _, err = call("report", "mine")
    assert code == 1
    assert "--experiment tests.experiments.samples:Right" in err
    assert call("report", "mine", "--experiment", "tests.experiments.samples:Right")[0] == 0


def test_packages_that_lie_in_the_folder_are_not_installed_ones(call, folder):
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[theodolite.experiments]\nsamples/right = stranger_code:Right\n")
    edit_manifest(folder, name="samples/right")
    assert "not registered" in call("report", ".")[2]
    assert "samples/right" not in call("list")[1]
    assert not (folder.parent / "mark").exists()


@pytest.mark.parametrize(
    "content",
    [
        '{"format": "theodolite-run", "x": ' + "[" * 100_000,
        '{"format": "theodolite-run"}',
        json.dumps({"format": "theodolite-run", "name": FIGURE, "keys": [], "settings": {"size": "huge", "parameters": {}}}),
        json.dumps({"format": "theodolite-run", "name": FIGURE, "keys": 3, "settings": {"size": "tiny", "parameters": {}}}),
        json.dumps({"format": "theodolite-run", "name": 3, "keys": [], "settings": [], "provenance": 7}),
    ],
)
def test_an_odd_manifest_hides_no_other_run(call, folder, content):
    (folder / "odd").mkdir()
    (folder / "odd" / "manifest.json").write_text(content)
    code, out, err = call("report", ".")
    assert f"{FIGURE} (tiny): 3 holds" in out
    assert "odd" in err or code == 0
    assert "Traceback" not in err
