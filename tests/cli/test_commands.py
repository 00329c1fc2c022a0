"""Commands: output, exit codes, one clear line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from theodolite.cli import main

SAMPLES = "tests.experiments.samples"


@pytest.fixture
def theodolite(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_modules_are_searched_where_they_were_before_the_command(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_the_user.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(SystemExit, match="2"):
        main(["survey", "--model", "broken_module_of_the_user:model"])
    assert sys.path == before


def test_reproduce_writes_the_page_and_succeeds(theodolite, tmp_path):
    code, out, _ = theodolite("reproduce", "checks/kronecker-identity", "--out", str(tmp_path))
    assert code == 0
    assert "3 holds" in out
    assert (tmp_path / "index.html").exists()
    code, _, err = theodolite("reproduce", "checks/kronecker-identity", "--out", str(tmp_path))
    assert code == 2
    assert "--resume" in err
    assert err.count("\n") == 1
    assert theodolite("reproduce", "checks/kronecker-identity", "--out", str(tmp_path), "--resume")[0] == 0
    assert theodolite("reproduce", "checks/kronecker-identity", "--out", str(tmp_path), "--fresh")[0] == 0
    assert theodolite("report", str(tmp_path))[0] == 0


def test_a_wrong_claim_is_in_the_exit_code(theodolite, tmp_path):
    code, out, _ = theodolite("reproduce", f"{SAMPLES}:Wrong", "--out", str(tmp_path))
    assert code == 1
    assert "fails: the mean is 7" in out
    assert theodolite("report", str(tmp_path), "--experiment", f"{SAMPLES}:Wrong")[0] == 1
    assert "badge failed" in (tmp_path / "index.html").read_text()


def test_a_failed_job_is_in_the_exit_code_and_the_others_finish(theodolite, tmp_path):
    code, out, err = theodolite("reproduce", f"{SAMPLES}:Failing", f"{SAMPLES}:Right", "--out", str(tmp_path))
    assert code == 1
    assert "3 of 6 jobs failed" in out
    assert "samples/right (tiny): 1 holds" in out
    assert "seed 3 is odd" in err


def test_a_figure_that_cannot_be_drawn_is_in_the_exit_code(theodolite, tmp_path):
    code, out, err = theodolite("reproduce", f"{SAMPLES}:Undrawn", "--out", str(tmp_path))
    assert code == 1
    assert "1 holds" in out
    assert "no figure: samples/undrawn (tiny): RuntimeError: no ink" in err
    assert theodolite("report", str(tmp_path), "--experiment", f"{SAMPLES}:Undrawn")[0] == 1
    assert "no ink" in (tmp_path / "index.html").read_text()
    assert theodolite("reproduce", f"{SAMPLES}:Right", "--out", str(tmp_path))[0] == 0


def test_json(theodolite, tmp_path):
    code, out, _ = theodolite("reproduce", f"{SAMPLES}:Wrong", "--out", str(tmp_path), "--json")
    assert code == 1
    assert next(claim["state"] for claim in json.loads(out)[0]["claims"]) == "fails"
    code, out, _ = theodolite("list", "checks", "--json")
    assert code == 0
    assert {row["id"] for row in json.loads(out)} >= {"checks/stability-edge", "checks/kronecker-identity"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "checks/stabilty-edge"], "checks/stability-edge"),
        (["reproduce", "nosuch/thing"], "The nearest are"),
        (["reproduce", "nosuch/*"], "No experiment fits"),
        (["reproduce", "checks/stability-edge", "--engine", "jobli"], "'joblib'"),
        (["reproduce", "checks/stability-edge", "--size", "huge"], "huge"),
        (["list", "nosuch"], "No experiment fits"),
        (["report", "nosuch-folder"], "There is no folder"),
        (["data", "where", "mnits"], "mnist"),
        (["data", "fetch", "nosuchdata"], "theodolite data list"),
        (["nosuchcommand"], "nosuchcommand"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(theodolite, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = theodolite(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_data_file_is_named_with_the_command_that_fetches_it(theodolite, tmp_path, monkeypatch):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = theodolite("data", "where", "mnist")
    assert code == 2
    assert "theodolite data fetch mnist" in err


def test_a_module_that_does_not_import_is_one_line(theodolite, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("def :\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = theodolite("reproduce", "broken_module:Thing", "--out", str(tmp_path / "out"))
    assert code == 2
    assert "SyntaxError" in err
    assert "Traceback" not in err


def test_files_in_the_working_folder_hide_nothing(tmp_path):
    """A user's `statistics.py` beside the run must not be taken for Python's own."""
    for name in ("statistics", "random", "queue", "code", "token"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')\n")
    program = "import sys; sys.path = [p for p in sys.path if p]; from theodolite.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "list"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_list_data_and_info(theodolite):
    code, out, _ = theodolite("list")
    assert code == 0
    assert "figures and tables" in out
    code, out, _ = theodolite("data", "list")
    assert code == 0
    assert "mnist" in out
    code, out, _ = theodolite("data", "where", "digits")
    assert code == 0
    code, out, _ = theodolite("info")
    assert code == 0
    assert "torch: " in out
