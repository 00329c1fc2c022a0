"""The page of a monitored training: its data, its server, and who may ask it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.monitors.logs import HOSTILE, fake_run, header, write_lines
from theodolite import plots
from theodolite.monitors.log import fold, read_log
from theodolite.plots.axes_style import notes
from theodolite.plots.monitor import plot_monitor
from theodolite.report import watch
from theodolite.report.watch import WatchServer, news, page_data, policy, thinned, watch_html, write_watch


@pytest.fixture
def served(tmp_path) -> Iterator[WatchServer]:
    with WatchServer(tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield server
        server.stop()
        thread.join()


def ask(server: WatchServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


# What the page draws


def test_the_tables_hold_what_was_logged():
    log = fold(fake_run(1000))
    data = page_data(log)
    assert data["tables"]["steps"]["step"] == list(range(1000))
    assert data["tables"]["steps"]["loss"] == pytest.approx([row["loss"] for row in log.steps], rel=1e-5)
    probe = [row for row in log.looks if row["on"] == "probe"]
    assert data["tables"]["probe"]["top_share"] == pytest.approx([row["top_share"] for row in probe], rel=1e-5)
    exceeded = sum(row["exceeded"] for row in log.looks if row["on"] == "batch")
    assert data["counts"] == {"steps": 1000, "batch": 100, "probe": 20, "exceeded": exceeded, "seconds": pytest.approx(7.0)}
    assert 0 < exceeded < 100
    assert len(data["spikes"]) == 7
    json.dumps(data, allow_nan=False)


def test_what_is_not_finite_is_a_gap_with_its_step():
    rows = [{"kind": "step", "step": t, "loss": value, "gradient_norm": 1.0} for t, value in enumerate([1.0, math.nan, math.inf])]
    data = page_data(fold([*rows, {"kind": "spike", "start": 1, "height": math.inf}]))
    assert data["tables"]["steps"]["loss"] == [1.0, None, None]
    assert data["nonfinite"] == {"loss": [1, 2], "gradient_norm": []}
    assert data["spikes"][0]["nonfinite"] == {"height": "inf"}
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("value", ["text", [1.0], {"a": 1}, 10**400, 1e301, None])
def test_what_is_no_number_is_not_drawn(value):
    data = page_data(fold([{"kind": "step", "step": 0, "loss": value}]))
    assert data["tables"]["steps"]["loss"] == [None]


values = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(st.tuples(values, values), min_size=1, max_size=300), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_thinning_keeps_the_extremes_and_the_ends(rows, buckets):
    table = {"step": list(range(len(rows))), "loss": [a for a, _ in rows], "rate": [b for _, b in rows]}
    thin = thinned(table, buckets)
    assert [thin["step"][0], thin["step"][-1]] == [0, len(rows) - 1]
    assert thin["step"] == sorted(set(thin["step"]))
    assert len(thin["step"]) <= max(2 + 6 * buckets, 4 * buckets)
    for name in ("loss", "rate"):
        assert thin[name] == [table[name][step] for step in thin["step"]]
        there, kept = ([v for v in t[name] if v is not None] for t in (table, thin))
        assert (max(there, default=0), min(there, default=0)) == (max(kept, default=0), min(kept, default=0))
        assert (None in table[name]) == (None in thin[name])


def test_a_long_run_makes_a_small_page(tmp_path):
    rows = [{"kind": "step", "step": t, "loss": 2.0 + (t % 10), "rate": 0.1} for t in range(60_000)]
    rows[12_345]["loss"] = 9876.5
    write_lines(tmp_path / "monitor.jsonl", [header(), *rows])
    text = write_watch(tmp_path, tmp_path / "page.html").read_text()
    assert "9876.5" in text
    assert '"steps": 60000' in text
    assert len(text) < 400_000


def test_a_log_read_in_pieces_gives_the_page_of_the_whole(tmp_path, monkeypatch):
    """Also where a training went back and did steps again, with other values and another end."""
    monkeypatch.setattr(watch, "CHUNK", 3000)
    again = list(fake_run(150, seed=1, first=120))
    again[5] = {**again[5], "loss": None, "nonfinite": {"loss": "nan"}}
    first = [*fake_run(200), {"kind": "step", "step": 130, "loss": None, "nonfinite": {"loss": "inf"}}]
    path = write_lines(tmp_path / "monitor.jsonl", [*first, *again, {"kind": "step", "step": 3}])
    log = read_log(path)
    assert page_data(log)["nonfinite"]["loss"]
    for buckets in (10_000, 3):
        assert watch.whole_data(path, buckets) == {**page_data(log, buckets), "bad_lines": 0}


@pytest.mark.slow
def test_a_log_of_100_megabytes_takes_less_than_300(tmp_path):
    line = '{"kind":"step","step":%d,"loss":%.16f,"gradient_norm":1.25,"update_norm":0.5,"rate":0.1}\n'
    with (tmp_path / "monitor.jsonl").open("w") as file:
        for step in range(1_000_000):
            file.write(line % (step, 1 / (1 + step)))
    program = (
        "import resource, sys; from theodolite.report.watch import write_watch; write_watch(*sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300 * 1024


# The page as a file


def test_a_written_page_holds_everything_and_escapes_it(tmp_path):
    write_lines(tmp_path / "run" / "monitor.jsonl", fake_run(100, model=HOSTILE))
    page = write_watch(tmp_path / "run", tmp_path / "out" / "page.html")
    text = page.read_text()
    assert text.count("<script") == 2  # the data and the one script
    assert "alert(1)" in text
    assert "<img" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text)
    setup = json.loads(re.findall(r'<script type="application/json" id="setup">(.*?)</script>', text)[0])
    assert setup["runs"][0]["data"]["runs"][0]["model"] == HOSTILE
    assert setup["live"] is False
    assert setup["runs"][0]["age"] < 60


def test_a_page_of_nothing_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="Monitor"):
        write_watch(tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


# The server


def test_the_three_paths(served):
    write_lines(served.path, fake_run(30, model=HOSTILE))
    status, headers, body = ask(served)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert HOSTILE.encode() not in body
    status, headers, body = ask(served, "/data?offset=0&token=")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body)["tables"]["steps"]["step"] == list(range(30))
    assert ask(served, "/favicon.ico")[0] == 204
    for path in ("/nosuch", "/data/", "/../etc/passwd", "//etc/passwd", "/monitor.jsonl", "/%2e%2e/"):
        assert ask(served, path)[0] == 404, path


def test_a_server_of_two_runs_says_which_is_ahead(tmp_path, monkeypatch):
    paths = [tmp_path / name / "monitor.jsonl" for name in ("slow", "fast")]
    write_lines(paths[0], ({"kind": "step", "step": t, "loss": 2.0 * 0.99**t} for t in range(100)))
    assert watch.comparison(*paths) == ()  # the other one is still to come
    write_lines(paths[1], ({"kind": "step", "step": t, "loss": 2.0 * 0.95**t} for t in range(100)))
    with WatchServer(paths[0], other=paths[1]) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            status, _, body = ask(server, "/comparison")
            assert status == 200
            assert json.loads(body)[0].startswith("fast is ahead at step 99: ")
        finally:
            server.stop()
            thread.join()
    monkeypatch.setattr(watch, "COMPARED", 10)
    assert watch.comparison(*paths) == ()
    assert watch.comparison(paths[0], None) == ()


def test_only_get_is_answered(served):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(served, method=method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""])
def test_a_foreign_name_for_this_machine_is_refused(served, host):
    """A web page can point its own name at 127.0.0.1; the browser then sends that name along."""
    write_lines(served.path, fake_run(5))
    for path in ("/", "/data"):
        status, headers, body = ask(served, path, host=host.format(port=served.port))
        assert (status, b"ResNet" in body) == (403, False)
        assert "Access-Control-Allow-Origin" not in headers


def test_loopback_names_are_served(served):
    for host in ("127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}"):
        assert ask(served, host=host.format(port=served.port))[0] == 200


def test_only_this_machine_is_listened_to(served):
    assert served.address == f"http://127.0.0.1:{served.port}/"
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        if not address.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((address, served.port), timeout=2)


def test_the_policy_allows_the_one_script_by_its_hash(served):
    _, headers, body = ask(served)
    scripts = re.findall(r"<script>(.*?)</script>", body.decode(), re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy()
    assert "unsafe-inline" not in policy().split("script-src")[1].split(";")[0]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_news_come_once_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "CHUNK", 2000)
    path = write_lines(tmp_path / "monitor.jsonl", fake_run(100))
    steps, place = [], {"offset": 0, "token": "", "more": True}
    while place["more"]:
        place = json.loads(news(path, f"offset={place['offset']}&token={place['token']}"))
        steps += place["tables"]["steps"]["step"]
    assert steps == list(range(100))
    assert place["end"]["catapults"] == 2
    assert place["offset"] == path.stat().st_size
    again = json.loads(news(path, f"offset={place['offset']}&token={place['token']}"))
    assert again["tables"]["steps"]["step"] == []
    os.utime(path, (1e9, 1e9))
    assert json.loads(news(path, ""))["age"] > 1e8


@pytest.mark.parametrize("query", ["", "offset=-1", "offset=x", "offset=9" * 99, "offset=%00&token=%ff", "offset=²"])
def test_odd_questions_get_the_log_from_its_start(tmp_path, query):
    path = write_lines(tmp_path / "monitor.jsonl", fake_run(5))
    assert json.loads(news(path, query))["tables"]["steps"]["step"] == list(range(5))


def test_a_log_that_is_not_there_yet(tmp_path):
    found = json.loads(news(tmp_path / "none.jsonl", "offset=77&token=abc"))
    assert (found["offset"], found["token"], found["age"], found["end"]) == (0, "", None, None)


def test_callers_too_many_are_hung_up_on_and_the_others_served(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "CALLERS", 4)
    with WatchServer(tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(20)]
        ended = [caller for caller in silent[4:] if caller.recv(1) == b""]
        assert len(ended) == 16
        assert threading.active_count() <= before + 4
        for caller in silent:
            caller.close()
        for _ in range(100):  # until the four have noticed
            try:
                assert ask(server)[0] == 200
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail("no caller was served after the silent ones had gone")
        server.stop()
        thread.join()


def test_ports_that_cannot_be(served):
    with pytest.raises(ValueError, match="cannot be used"):
        WatchServer(served.path, served.port)
    for port in (-1, 70_000):
        with pytest.raises(ValueError, match="0 to 65535"):
            WatchServer(served.path, port)


def test_a_live_page_holds_no_data(tmp_path):
    write_lines(tmp_path / "monitor.jsonl", fake_run(5))
    assert '"data": null' in watch_html(tmp_path)


# The printed figure


def test_the_figure_of_a_log(tmp_path):
    write_lines(tmp_path / "monitor.jsonl", fake_run(1000))
    log = read_log(tmp_path)
    figure = plot_monitor(log, title="ResNet")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[0] == "Loss"
    assert len(titles) == 6
    marks = {line.get_label(): line.get_xdata().tolist() for line in figure.axes[0].lines if line.get_label().startswith("_")}
    assert marks["_catapult"] == [301, 601]
    assert [text.get_text() for text in figure.legends[0].get_texts()][1] == "catapult (2)"
    exceeded = sum(bool(row.get("exceeded")) for row in log.looks)
    assert f"dots: {exceeded} of 100 batches above their critical rate" in notes(figure.axes[1])
    assert plots.to_svg(figure).startswith("<svg")
    rows = plot_monitor([*log.spikes, *log.looks, *log.steps])  # records in any order draw the same
    assert [line.get_ydata().tolist() for line in rows.axes[0].lines] == [
        line.get_ydata().tolist() for line in figure.axes[0].lines
    ]


def test_the_figure_of_a_long_run_keeps_its_spike():
    rows = [{"kind": "step", "step": t, "loss": 50.0 if t == 4321 else 1.0, "gradient_norm": 1.0} for t in range(20_000)]
    rows[7000]["loss"] = math.nan
    figure = plot_monitor(rows)
    loss = figure.axes[0].lines[0]
    assert len(loss.get_xdata()) < 4000
    assert max(y for y in loss.get_ydata() if y == y) == 50.0
    assert "1 of " in notes(figure.axes[0])[0]
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Loss", "Gradient and update"]  # the others were not measured
    plots.to_svg(figure)


def test_the_figure_of_hostile_or_empty_logs():
    steps = [{"kind": "step", "step": t, "loss": -1.0 * t} for t in range(3)]
    plots.to_svg(plot_monitor([*steps, {"kind": "spike", "start": 1, "cause": "$\\frac{$"}]))
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_monitor([])
    with pytest.raises(TypeError, match="MonitorLog"):
        plot_monitor("monitor.jsonl")
