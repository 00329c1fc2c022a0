"""The live page in a real browser: it follows the log, runs nothing of what the log says, and fits a phone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.browser import find_browser, look
from tests.browser.devtools import Browser, browser
from tests.unit.monitors.logs import HOSTILE, fake_run, header, write_lines
from theodolite.monitors.log import LogWriter, read_log
from theodolite.report.watch import WatchServer, watch_html, write_watch

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium here; CHROMIUM may name one")

NOW = "document.getElementById('now').innerText.replaceAll('\\n', ' ')"
STATE = "document.getElementById('state').textContent"
CARDS = "document.querySelectorAll('article.card').length"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def served(tmp_path) -> Iterator[WatchServer]:
    with WatchServer(tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield server
        server.stop()
        thread.join()


def points_of(page: Browser, chart: str) -> int:
    """How many points the first line of a figure has."""
    return page.ask(f"(document.querySelector('#chart-{chart} figure .trace')?.getAttribute('d') ?? '').split(/[ML]/).length - 1")


def test_the_page_follows_the_log(page, served):
    page.open(served.address)
    page.until(f"{STATE} === 'waiting'")
    records = list(fake_run(400))
    with LogWriter(served.path) as log:
        for record in records[:200]:
            log.write(**record)
        page.until(f"{STATE} === 'running'")
        last = max(r["step"] for r in records[:200] if r["kind"] == "step")
        page.until(f"{NOW}.includes('step {last}')")
        drawn, cards = points_of(page, "loss"), page.ask(CARDS)
        assert drawn > 50
        for record in records[200:-1]:
            log.write(**record)
        page.until(f"{NOW}.includes('step 399')")
        assert points_of(page, "loss") > drawn
        assert page.ask(CARDS) > cards
        assert page.ask(STATE) == "running"
        log.write(**records[-1])
        page.until(f"{STATE} === 'finished'")
    assert page.ask("document.querySelector('article.card').className") == "card critical"  # the worst one first
    assert page.ask("document.querySelectorAll('#chart-loss > figure > svg > path.mark').length") == 7
    assert page.errors == []


def test_another_run_in_the_same_place_starts_the_page_anew(page, served):
    write_lines(served.path, fake_run(200))
    page.open(served.address)
    page.until(f"{NOW}.includes('step 199')")
    served.path.unlink()
    write_lines(served.path, fake_run(50, model="LeNet", end=False))
    page.until("document.querySelector('h1').textContent === 'LeNet'")
    page.until(f"{NOW}.includes('step 49')")
    label = page.ask("document.querySelector('#chart-loss svg.chart').getAttribute('aria-label')")
    assert label.startswith("Loss, steps 0 to 49")


def test_a_silent_run_is_called_stalled_and_a_gone_server_is_noticed(page, tmp_path):
    path = write_lines(tmp_path / "monitor.jsonl", fake_run(50, end=False))
    os.utime(path, (1e9, 1e9))
    server = WatchServer(path)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        page.open(server.address)
        page.until(f"{STATE} === 'stalled'")
        assert "no new line for" in page.ask("document.getElementById('age').textContent")
    finally:
        server.stop()
        thread.join()
        server.close()
    page.until(f"{STATE} === 'no connection'")
    assert points_of(page, "loss") > 10  # what was drawn stays


def test_what_the_log_says_is_never_run(page, served):
    spike = {
        "kind": "spike",
        "start": 3,
        "peak": 4,
        "end": 5,
        "cause": HOSTILE,
        "severity": HOSTILE,
        "sentence": HOSTILE,
        "advice": HOSTILE,
    }
    evil = header(HOSTILE, loss=HOSTILE, optimizer=HOSTILE, started=HOSTILE, curvature=HOSTILE, parameters=HOSTILE)
    write_lines(served.path, [evil, *(r for r in fake_run(20, end=False) if r["kind"] in ("step", "look")), spike])
    page.open(served.address)
    page.until(f"document.querySelector('h1').textContent === {HOSTILE!r}")
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.ask("document.querySelector('article.card').textContent")
    assert page.errors == []


def test_an_inserted_script_is_refused_by_the_policy(page, served):
    """Were text ever to become markup, the policy would still stop it."""
    page.open(served.address)
    page.ask("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned = 1\">')")
    page.ask("{const s = document.createElement('script'); s.textContent = 'window.owned = 2'; document.body.append(s);}")
    assert page.ask("typeof window.owned") == "undefined"
    assert page.ask("fetch('http://127.0.0.1:9/').then(() => 'let out', () => 'refused')") == "refused"


def test_a_spike_of_one_step_stays_visible_in_a_long_run(page, served):
    """100 thousand steps on some hundred pixels: the one high loss reaches the top of the figure."""
    steps = 100_000
    lines = ({"kind": "step", "step": t, "loss": 1000.0 if t == 23_457 else 1.0 + (t % 7) / 10} for t in range(steps))
    write_lines(served.path, [header(), *lines])
    page.open(served.address)
    page.until(f"{NOW}.includes('step 99,999')", 60)
    assert 300 < points_of(page, "loss") < 4000
    heights = page.ask("document.querySelector('#chart-loss figure .trace').getAttribute('d').match(/ [\\d.]+/g).map(Number)")
    assert sum(height < 60 for height in heights) == 1


def test_numbers_can_be_read_with_the_keyboard(page, served):
    write_lines(served.path, fake_run(100))
    page.open(served.address)
    page.until(f"{NOW}.includes('step 99')")
    readout = "document.querySelector('#chart-loss .readout').textContent"
    page.ask("document.getElementById('range').focus()")
    page.press("Tab")
    assert page.ask("document.activeElement.closest('section').id") == "chart-loss"
    page.press("Home")
    assert page.ask(readout).startswith("Step 0: of the batch 2.")
    page.press("ArrowRight")
    assert page.ask(readout).startswith("Step 1: ")
    assert page.ask("document.querySelector('#chart-norms .readout').textContent").startswith("Step 1: ")  # all figures follow
    page.press("Escape")
    assert page.ask(readout).startswith("Step 99: ")


@pytest.mark.parametrize("dark", [False, True])
def test_a_written_page_fits_and_reads(tmp_path, dark):
    model = "model.transformer.blocks.11.attention.self_attention.query_key_value_projection" + HOSTILE
    path = write_lines(tmp_path / "monitor.jsonl", fake_run(600, model=model))
    text = write_watch(path, tmp_path / "page.html").read_text()
    for view in look(text, tmp_path, dark=dark):
        assert view.troubles == []
        assert view.is_dark == dark
        assert view.faintest["ratio"] >= 4.5, view.faintest
        assert len(view.figures) == 7


@pytest.mark.parametrize(
    "records",
    [
        [],
        [header()],
        [header(), {"kind": "step", "step": 0, "loss": 1.0}],
        [header(), *({"kind": "step", "step": t, "loss": v} for t, v in enumerate([0.0, -1.0, 2.0, 0.0]))],
        [header(), *({"kind": "step", "step": t, "loss": None, "nonfinite": {"loss": "nan"}} for t in range(5))],
        [
            {"kind": "look", "step": 7, "on": "batch", "ratio": 2.0, "exceeded": True},
            {"kind": "spike", "start": 9, "cause": "non-finite"},
        ],
        [header(model=None, parameters="many"), {"kind": "end"}, {"kind": "weather"}],
        [{"kind": "step", "step": t, "loss": 1.0, "rate": "fast"} for t in range(3)],
    ],
)
def test_odd_logs_are_shown_too(page, tmp_path, records):
    path = write_lines(tmp_path / "monitor.jsonl", records)
    (tmp_path / "page.html").write_text(watch_html(path, read_log(path), age=3.0))
    page.open((tmp_path / "page.html").as_uri(), width=390)
    assert page.ask(
        "[...document.querySelectorAll('svg.chart')].every((chart) => chart.querySelector('.trace'))"
    )  # none is empty
    assert "NaN" not in page.ask("document.querySelector('main').innerHTML")
    assert page.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.errors == []


def test_a_phone_can_follow_a_running_training(page, served):
    write_lines(served.path, fake_run(300, end=False))
    for dark in (False, True):
        page.open(served.address, width=390, dark=dark)
        page.until(f"{NOW}.includes('step 299')")
        assert page.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        widths = page.ask("[...document.querySelectorAll('svg.chart')].map((chart) => chart.getBoundingClientRect().right)")
        assert max(widths) <= 390


def test_the_written_page_works_from_a_file(page, tmp_path):
    write_lines(tmp_path / "monitor.jsonl", fake_run(300))
    out: Path = write_watch(tmp_path, tmp_path / "page.html")
    page.open(out.as_uri())
    assert page.ask(STATE) == "finished"
    assert points_of(page, "loss") > 100
    assert page.errors == []
