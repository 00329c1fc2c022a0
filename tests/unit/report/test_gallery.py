"""The page says what the runs say, escapes what others wrote, and needs no network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from tests.experiments.samples import Failing, Right, Wrong
from theodolite import experiments
from theodolite.report import collect_runs, write_gallery

SAMPLES = "tests.experiments.samples"
KNOWN = (Right(), Wrong(), Failing())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("gallery")
    for name in ("Right", "Wrong", "Failing"):
        experiments.run(f"{SAMPLES}:{name}", out=out)
    return out


@pytest.fixture(scope="module")
def page(folder):
    return write_gallery(folder, known=KNOWN).path.read_text()


class Checker(HTMLParser):
    """Counts open tags and collects ids, links and sources."""

    VOID = frozenset({"meta", "br", "link", "path", "use", "rect", "stop", "image", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_self_contained_and_its_ids_are_unique(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.outside == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert not re.search(r"https?://(?!www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)", page)


def test_a_wrong_claim_shows_as_failed(page):
    section = page.split('id="section-samples-wrong-tiny"')[1].split("</section>")[0]
    assert len(re.findall(r'class="badge failed">.{0,120}</svg>fails', section)) == 2
    assert "the mean is 7" in section
    assert "7 ± 0.1" in section
    assert "read from a plot" in section
    assert "not reproduced at this size" in section
    assert "could not be measured" in section
    assert "</svg>2 fails" in page


def test_reported_stands_beside_measured_with_settings_and_the_command(page):
    section = page.split('id="section-samples-right-tiny"')[1].split("</section>")[0]
    for part in ("0.5", "line 1", "between 0 and 1", "holds", "count", "torch", "<svg", f"theodolite reproduce {SAMPLES}:Right"):
        assert part in section, part


def test_failed_jobs_are_shown_with_their_traceback(page):
    section = page.split('id="section-samples-failing-tiny"')[1].split("</section>")[0]
    assert "3 of 6 jobs failed" in section
    assert "RuntimeError: seed 3 is odd" in section
    assert "Traceback" in section


def test_what_others_wrote_is_escaped(page):
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_coverage_stands_at_the_top(page):
    assert page.index("figures and tables are registered") < page.index("<section")


def test_an_interrupted_run_is_shown_as_such(folder, tmp_path):
    source = folder / "samples" / "right" / "tiny"
    target = tmp_path / "samples" / "right" / "tiny"
    target.mkdir(parents=True)
    lines = (source / "rows.jsonl").read_text().splitlines(keepends=True)
    (target / "manifest.json").write_text((source / "manifest.json").read_text())
    (target / "rows.jsonl").write_text("".join(lines[:2]).replace("$tensor", "$lost"))
    run = experiments.load_run(target, KNOWN)
    assert (run.unfinished, run.good) == (6, False)  # both lines fail their check sum now
    (target / "rows.jsonl").write_text("")
    text = write_gallery(tmp_path, known=KNOWN).path.read_text()
    assert "6 of 6 jobs are not done" in text
    assert "no figure" in text


def test_a_run_that_cannot_be_read_is_listed_not_hidden(folder, tmp_path):
    source = folder / "samples" / "right" / "tiny"
    manifest = json.loads((source / "manifest.json").read_text())
    manifest = {**manifest, "version": 1, "settings": {**manifest["settings"], "target": "gone.module:Right"}}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "manifest.json").write_text(json.dumps(manifest))  # the first version has no check sum
    (tmp_path / "manifest.json").write_text("not a run")
    runs, bad = collect_runs(tmp_path)
    assert runs == []
    assert "--experiment gone.module:Right" in bad[0].reason
    assert "unreadable" in write_gallery(tmp_path).path.read_text()


def test_nothing_to_show_is_said(tmp_path):
    with pytest.raises(ValueError, match="holds no runs"):
        write_gallery(tmp_path)
    with pytest.raises(FileNotFoundError, match="theodolite reproduce"):
        write_gallery(tmp_path / "nosuch")
