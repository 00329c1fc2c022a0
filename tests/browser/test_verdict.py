"""What a reader sees first: the verdict of a survey above folded sections, and which of two runs is ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import theodolite as th
from tests.browser.browser import MEASURE, find_browser
from tests.browser.devtools import Browser, browser
from tests.unit.monitors.logs import fake_run, write_lines
from theodolite.instruments.page import page_of
from theodolite.report import write_page
from theodolite.report.watch import write_watch

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium here; CHROMIUM may name one")

SIZES = ((390, 844), (1280, 800))
TALLEST = 6000  # pixels of a survey's page before anything is unfolded
INSIDE = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
OPEN = "document.querySelectorAll('details.section[open]').length"
PANELS = "[...document.querySelectorAll('.charts section')]"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory) -> SimpleNamespace:
    """A network that learns too slowly at its own rate; a quick survey's sections twice are as many as a normal one's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(48, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = (x, x[:, :3].argmax(1))
    found = th.survey(model, nn.CrossEntropyLoss(), data, optimizer=optimizer, depth="quick", progress=False)
    made = page_of(found)
    file = write_page(replace(made, sections=[*made.sections, *made.sections]), tmp_path_factory.mktemp("survey") / "index.html")
    return SimpleNamespace(survey=found, address=file.as_uri())


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> str:
    """Of two logged runs the second ends at a third of the first one's loss; nobody measured validation or features."""
    folder = tmp_path_factory.mktemp("runs")
    for name, factor in (("slow", 1.0), ("fast", 1 / 3)):
        records = [record for record in fake_run(300) if record.get("on") != "probe"]
        steps = ({**record, "loss": factor * record["loss"]} if record["kind"] == "step" else record for record in records)
        write_lines(folder / name / "monitor.jsonl", steps)
    return write_watch(folder / "slow", folder / "page.html", other=folder / "fast").as_uri()


def box(page: Browser, selector: str) -> SimpleNamespace:
    return SimpleNamespace(**page.ask(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()"))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_verdict_stands_first_and_above_the_fold(page, surveyed, width, height):
    page.open(surveyed.address, width=width)
    verdict = box(page, "#verdict")
    assert 0 < verdict.top < verdict.bottom <= height
    assert page.ask("document.querySelector('h1').nextElementSibling.id") == "verdict"
    said = page.ask("document.getElementById('verdict').innerText")
    assert surveyed.survey.sentences[0] in said.replace("\u200b", "")
    assert page.ask("document.querySelector('#verdict .setting').innerText") == f"lr={surveyed.survey.lr:.3g}"
    assert page.ask(INSIDE)
    assert page.errors == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_is_folded_until_it_is_asked_for(page, surveyed, width, height):
    page.open(surveyed.address, width=width)
    assert page.ask(OPEN) == 0
    assert page.ask("document.querySelectorAll('details.section').length") > 20
    assert page.ask("document.documentElement.scrollHeight") <= TALLEST
    page.ask("document.querySelector('details.section > summary').click()")
    assert page.ask(OPEN) == 1
    assert page.ask("document.querySelector('details.section > div').checkVisibility()")
    page.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.ask(INSIDE)


def test_a_link_to_a_section_opens_it(page, surveyed):
    page.open(surveyed.address)
    target = page.ask("document.querySelector('a.goto').getAttribute('href').slice(1)")
    page.ask("document.querySelector('a.goto').click()")
    page.until(f"document.getElementById('{target}').closest('details').open")
    assert page.ask(OPEN) == 1
    page.until("scrollY > 0")


def test_paper_shows_everything(page, surveyed):
    page.open(surveyed.address)
    seen = "[...document.querySelectorAll('details.section > div')].filter((part) => part.checkVisibility()).length"
    folded = page.ask("document.documentElement.scrollHeight")
    assert page.ask(seen) == 0
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert page.ask(seen) == page.ask("document.querySelectorAll('details.section > div').length")
        assert page.ask("document.documentElement.scrollHeight") > 3 * folded
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


def faintest(page: Browser) -> dict[str, object]:
    measure = MEASURE[: MEASURE.index("function measured(")]
    return page.ask(f"(() => {{ {measure} return faintest(window, document); }})()")


def test_dark_pages_can_be_read(page, surveyed, two_runs):
    for address in (surveyed.address, two_runs):
        page.open(address, dark=True)
        page.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(19, 23, 27)"
        assert faintest(page)["ratio"] >= 4.5, faintest(page)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_two_runs_are_told_apart_and_the_better_one_is_named(page, two_runs, width, height):
    page.open(two_runs, width=width)
    assert page.ask("document.getElementById('verdict').innerText").startswith("fast is ahead at step 299: losses ")
    assert box(page, "#verdict").bottom <= height
    legends = page.ask(f"{PANELS}.map((panel) => [...panel.querySelectorAll('.legend li')].map((item) => item.innerText))")
    assert len(legends) >= 4
    for legend in legends:
        assert legend[:2] == ["slow", "fast"]
    of_each = "['.r1', '.r2'].map((run) => panel.querySelector('figure .trace' + run)?.getAttribute('d'))"
    lines = page.ask(f"{PANELS}.map((panel) => {of_each})")
    assert all(first and second for first, second in lines)
    titles = page.ask(f"{PANELS}.map((panel) => panel.querySelector('h2').innerText)")
    assert "Loss" in titles
    assert "AGOP alignment" not in titles  # nobody measured it
    assert page.ask(INSIDE)
    assert page.errors == []
