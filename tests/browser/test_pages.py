"""Our pages in a real browser: pictures are there, nothing sticks out, nothing is fetched, and dark is dark."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from tests.browser import browser
from tests.browser.browser import find_browser, look
from theodolite import experiments, plots
from theodolite.report import Page, Section, page_html, write_gallery
from theodolite.results import Finding, Severity

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium here; CHROMIUM may name one")

LAYER = "model.transformer.blocks.11.attention.self_attention.query_key_value_projection.lora_adapter.weight"
HOSTILE = "ResNet-18 <script>alert(1)</script><img src=x onerror=alert(2)>"


def findings() -> list[Finding]:
    return [
        Finding(
            instrument="spectrum",
            severity=Severity.GOOD,
            sentence="The Hessian has no negative eigenvalue beyond its error.",
            quantity="lowest eigenvalue",
            value=-0.0012,
            error=0.0031,
        ),
        Finding(
            instrument="rate",
            severity=Severity.CRITICAL,
            sentence="The learning rate 0.5 lies 3.1 times above the largest stable one, so the loss grows at every step.",
            quantity="learning rate / critical rate",
            value=3.1247,
            error=0.021,
            advice="Lower the learning rate below 0.16, or warm it up over the first few hundred steps.",
            source="https://arxiv.org/abs/2103.00065",
        ),
        Finding(
            instrument="layers",
            severity=Severity.WARNING,
            sentence=f"The layer {LAYER} gets 0.02% of the gradient: it hardly learns.",
            quantity="share of the squared gradient",
            value=0.000213,
            advice="Look at its initial scale.",
            source="Theory of layer-wise curvature, chapter 4",
        ),
        Finding(
            instrument="spectrum",
            severity=Severity.NOTE,
            sentence="Nine eigenvalues stand apart from the bulk, as many as there are classes less one.",
            quantity="outliers",
            value=9,
            source="javascript:alert(3)",
        ),
    ]


def spectrum() -> Section:
    rows = [
        {"rank": i + 1, "eigenvalue": 30 * math.exp(-i / 6), "residual": 0.02 * (1 + i), "converged": i < 30, "layer": LAYER}
        for i in range(40)
    ]
    svg = plots.to_svg(plots.eigenvalues(rows, log=True, title="Eigenvalues of the Hessian"), prefix="figure-1")
    own = [f for f in findings() if f.instrument == "spectrum"]
    return Section(
        name="spectrum",
        title="Spectrum of the Hessian",
        question="Which directions are steep, and how many of them?",
        sentence=own[0].sentence,
        findings=own,
        svg=svg,
        rows=rows,
        how="Lanczos with full reorthogonalisation on 4096 examples; the residual bounds the error of every eigenvalue.",
        cost="412 gradients, 38 s (expected 35 s)",
        source="https://arxiv.org/abs/1706.04454",
    )


def rate() -> Section:
    rows = [
        {"rate": r, "step": s, "loss": 2.3 * math.exp((-0.1 if r < 0.3 else 0.05) * s)} for r in (0.1, 0.5) for s in range(30)
    ]
    svg = plots.to_svg(plots.curves(rows, "step", "loss", by="rate", log="y"), prefix="figure-2")
    few = [{"learning_rate": 0.1, "final_loss": 0.1266, "diverged": False}, {"learning_rate": 0.5, "diverged": True}]
    own = [f for f in findings() if f.instrument == "rate"]
    return Section(
        name="rate",
        title="Critical learning rate",
        question="From which learning rate on does training diverge?",
        sentence=own[0].sentence,
        findings=own,
        svg=svg,
        rows=few,
        how="Bisection.",
        cost="31 s",
    )


def layers() -> Section:
    table = [[math.cos(i * j) / (1 + abs(i - j)) for j in range(8)] for i in range(8)]
    own = [f for f in findings() if f.instrument == "layers"]
    svg = plots.to_svg(plots.matrix(table, title="Coupling of layers"), prefix="figure-3")
    names = [f"{LAYER}.{i}" for i in range(5)]
    return Section(
        name="layers",
        title="Layers",
        question="Which layers learn?",
        findings=own,
        svg=svg,
        rows=[{"layer_with_a_long_name": n, "parameters": 2359296 * (i + 1), "share": 10.0**-i} for i, n in enumerate(names)],
    )


def survey_page() -> Page:
    """A page with everything on it: long names, long tables, all severities, instruments that failed or were skipped."""
    sections = [
        rate(),
        spectrum(),
        layers(),
        Section(
            name="noise <b>",
            title="Gradient noise",
            question="How noisy is one batch?",
            state="skipped",
            reason="One batch only.",
        ),
        Section(
            name="path",
            title="Path of training",
            question="Does the path bend?",
            state="failed",
            reason=f"KeyError: {LAYER * 2}",
            figure_error="ValueError: nothing to draw",
        ),
    ]
    plan = [
        {"instrument": s.name, "expected_seconds": 35.2 + i, "real_seconds": None if s.reason else 38.0}
        for i, s in enumerate(sections)
    ]
    return Page(
        title=HOSTILE,
        findings=findings(),
        sections=sections,
        facts={"parameters": "11 173 962", "examples": "4096 of 50 000", "loss": "cross entropy", "layer": LAYER},
        plan=plan,
        provenance={"torch": "2.13.0", "command": f"theodolite survey {LAYER} --out {'x' * 90}", "seed": "0"},
        made="2026-01-02 03:04 UTC",
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    out = tmp_path_factory.mktemp("gallery")
    runs = [experiments.run(f"tests.experiments.samples:{name}", out=out) for name in ("Right", "Wrong", "Failing")]
    opened = write_gallery(out, known=[run.experiment for run in runs]).path.read_text().replace("<details>", "<details open>")
    return {"survey": page_html(survey_page()), "gallery": opened}


@pytest.mark.parametrize(("name", "figures"), [("survey", 3), ("gallery", 3)])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_is_drawn_whole_and_leaves_the_reader_in_peace(pages, tmp_path, name, figures, dark):
    views = look(pages[name], tmp_path, dark=dark)
    assert [view.width for view in views] == [390, 1280]
    for view in views:
        assert view.troubles == []
        assert len(view.figures) == figures
        assert view.is_dark is dark
        assert view.faintest["ratio"] >= 4.5, view.faintest


def test_unfolded_tables_stay_inside(pages, tmp_path):
    for view in look(pages["survey"].replace("<details>", "<details open>"), tmp_path):
        assert view.troubles == []


@pytest.mark.parametrize("name", ["survey", "gallery"])
def test_on_paper_nothing_sticks_out_and_it_is_white(pages, tmp_path, name):
    (view,) = look(pages[name].replace("@media print", "@media all"), tmp_path, widths=[720])
    assert view.troubles == []
    assert not view.is_dark


def seen(body: str, folder, head: str = "") -> list[str]:
    page = f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"
    (view,) = look(page, folder, widths=[390])
    return view.troubles


def test_a_plain_page_gives_no_trouble(tmp_path):
    assert seen("<p id='here'>all well</p><a href='#here'>up</a>", tmp_path) == []


def test_overflow_is_seen(tmp_path):
    assert seen("<div style='width: 800px'>wide</div>", tmp_path) == ["at 390: 808 pixels in 390"]


def test_errors_and_dialogs_are_seen(tmp_path):
    found = " ".join(seen("<script>console.error('oh no'); alert('hello'); nosuch()</script>", tmp_path))
    for part in ("error oh no", "dialog alert: hello", "nosuch is not defined"):
        assert part in found


def test_requests_are_seen(tmp_path):
    body = "<img src='https://picture.invalid/x.png'><style>p { background: url(https://wash.invalid/y.png) }</style><p>x</p>"
    found = " ".join(seen(body, tmp_path, head="<link rel='stylesheet' href='https://sheet.invalid/z.css'>"))
    for part in ("request https://picture.invalid", "request https://wash.invalid", "request https://sheet.invalid"):
        assert part in found


def test_empty_figures_dead_links_and_faint_text_are_seen(tmp_path):
    found = seen("<figure><svg style='width: 0; height: 0'></svg></figure><a href='#nosuch'>gone</a>", tmp_path)
    assert found == ["at 390: link to nowhere #nosuch", "at 390: figure 0 has no size"]
    (view,) = look("<!doctype html><head></head><p style='color: #ccc'>faint</p>", tmp_path, widths=[390])
    assert view.faintest["ratio"] < 2


def test_a_browser_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch):
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/child\nsleep 600\n")
    script.chmod(0o755)
    monkeypatch.setenv("CHROMIUM", str(script))
    monkeypatch.setattr(browser, "TIMEOUT", 1)
    with pytest.raises(subprocess.TimeoutExpired):
        look("<p>never seen</p>", tmp_path)
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/stat")  # a zombie that nobody has fetched yet is dead, too
    assert not status.exists() or status.read_text().split()[2] == "Z"
