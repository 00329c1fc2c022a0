"""`theodolite watch`: a page once, a page that waits, Ctrl-C, and a help that is instant."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.unit.monitors.logs import fake_run, write_lines
from theodolite.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["watch", *arguments])
    return int(ended.value.code or 0)


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(run_folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from theodolite.cli import main; main()", "watch", str(run_folder), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_hears_ctrl_c, **pipes)


def test_the_page_once(tmp_path, capsys):
    write_lines(tmp_path / "run" / "monitor.jsonl", fake_run(50))
    assert run(str(tmp_path / "run"), "--once", str(tmp_path / "page.html")) == 0
    assert str(tmp_path / "page.html") in capsys.readouterr().out
    assert '"live": false' in (tmp_path / "page.html").read_text()


def test_bad_input_is_one_line(tmp_path, capsys):
    assert run(str(tmp_path), "--once", str(tmp_path / "page.html")) == 2
    assert "There is no monitor log" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(str(tmp_path), "--port", str(taken.getsockname()[1])) == 2
    assert "--port 0 takes a free one" in capsys.readouterr().err


def test_it_waits_serves_and_ends_kindly(tmp_path):
    process = start(tmp_path / "run")
    try:
        assert process.stdout is not None
        assert "Waiting for" in process.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        with urllib.request.urlopen(address + "data", timeout=10) as answer:
            assert json.load(answer)["offset"] == 0
        write_lines(tmp_path / "run" / "monitor.jsonl", fake_run(40))
        with urllib.request.urlopen(address + "data", timeout=10) as answer:
            assert len(json.load(answer)["tables"]["steps"]["step"]) == 40
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0
    assert errors.strip().splitlines() == [f"Ended. `theodolite watch {tmp_path / 'run'} --once page.html` keeps the page."]


def test_help_is_light(tmp_path):
    program = (
        "import sys; from theodolite.cli import main\n"
        "try: main(['watch', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'pandas', 'jinja2', 'http.server'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--once" in done.stdout
