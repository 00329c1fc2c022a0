"""The survey page says what was found, worst first, escapes what others wrote, and is kind where there is nothing to say."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

import theodolite as th
from tests.unit.report import test_gallery
from theodolite import plots
from theodolite.report import Page, Section, page_html, write_page
from theodolite.report.page import MOST, SHOWN, cell, table_of
from theodolite.report.rendering import breakable, pieces, slug
from theodolite.results import Finding, Severity

EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'


class Checker(test_gallery.Checker):
    VOID = test_gallery.Checker.VOID | {"wbr"}


def finding(severity=Severity.NOTE, sentence="A sentence.", **more) -> Finding:
    return Finding(**{"instrument": "rate", "severity": severity, "sentence": sentence, **more})


def section(**more) -> Section:
    return Section(**{"name": "rate", "title": "Critical rate", "question": "How fast?", **more})


def html(findings=(), sections=(), title="a network", **more) -> str:
    return page_html(Page(title=title, findings=findings, sections=sections, **more))


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    return checker


def part_of(text: str, anchor: str) -> str:
    return text.split(f'<section id="{anchor}"')[1].split("</section>")[0]


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


@pytest.fixture(scope="module")
def full() -> str:
    rows = [{"eigen_value": 1 / 3 + i, "converged": i % 2 == 0, "name": "x"} for i in range(40)]
    svg = plots.to_svg(plots.curves([{"x": 0, "y": 1.0}, {"x": 1, "y": 2.0}], "x", "y"), prefix="figure-1")
    done = section(
        sentence="It is 0.5.",
        findings=[finding(sentence="It is 0.5.")],
        svg=svg,
        rows=rows,
        how="By hand.",
        cost="3 s",
        source="https://example.org/theory",
    )
    sections = [
        done,
        section(name="noise", title="Noise", state="skipped", reason="One batch only."),
        section(name="path", title="Path", state="failed", reason="KeyError: 'x'", figure_error="ValueError: no rows"),
    ]
    findings = [
        finding(Severity.GOOD, "Fine."),
        finding(Severity.CRITICAL, "Broken.", quantity="rate", value=0.51234, error=0.0123, advice="Lower it.", source="a book"),
        finding(Severity.NOTE, "So it is.", source="see https://example.org/a(b)."),
        finding(Severity.WARNING, "Careful.", instrument="not a section"),
        finding(Severity.CRITICAL, "Broken too."),
    ]
    return html(
        findings,
        sections,
        facts={"parameters": "123"},
        plan=[{"instrument": "rate", "expected_seconds": 2.0, "real_seconds": None}],
        provenance={"torch": "2.x"},
        made="2026-01-02 03:04 UTC",
    )


def test_the_page_is_whole_and_self_contained(full):
    assert set(checked(full).outside) == {"https://example.org/theory", "https://example.org/a(b)"}  # links only
    assert '<html lang="en">' in full
    assert '<meta name="color-scheme" content="light dark">' in full
    assert not re.search(r"<(link|img|script|iframe)\b|@import|url\(http", full)
    assert len(full) < 150_000


def test_findings_come_worst_first_and_in_their_order(full):
    places = [full.index(f'"sentence">{text}') for text in ("Broken.", "Broken too.", "Careful.", "So it is.", "Fine.")]
    assert places == sorted(places)
    assert "2 critical findings 1 warning 1 note 1 good sign from 3 instruments, 1 failed, 1 skipped" in words(full)


def test_a_card_has_number_advice_source_and_its_section(full):
    card = full.split('<article class="card critical">')[1].split("</article>")[0]
    assert words(card) == "critical Critical rate Broken. 0.512 ± 0.012 rate What to do: Lower it. Source: a book"
    assert 'href="#section-rate"' in card
    lonely = full.split('<article class="card warning">')[1].split("</article>")[0]
    assert "href" not in lonely.replace('href="#icon-', "")


def test_a_section_has_all_its_parts(full):
    part = part_of(full, "section-rate")
    parts = [
        "How fast?",
        "It is 0.5.",
        "<figure><svg",
        "eigen value",
        "28 more rows",
        "How it was measured",
        "By hand.",
        "3 s",
        "Theory",
    ]
    places = [part.index(text) for text in parts]
    assert places == sorted(places)
    assert part.count("It is 0.5.") == 1  # not once more as a finding
    assert part.split("<details>")[0].count("<tr>") == SHOWN + 1
    assert '<th scope="col" class="number">eigen value</th>' in part
    assert '<td class="number">0.3333</td><td class="word">yes</td>' in part


def test_instruments_without_a_result_say_why(full):
    assert "This instrument was skipped: One batch only." in part_of(full, "section-noise")
    failed = part_of(full, "section-path")
    assert "This instrument failed: KeyError: &#39;x&#39;" in failed
    assert "no figure" in failed
    assert "ValueError: no rows" in failed
    assert "<figure>" not in failed


def test_plan_provenance_and_footer_close_the_page(full):
    parts = [
        "Expected and real cost",
        "expected seconds",
        "Provenance",
        "2.x",
        f"Made by theodolite {th.__version__}, 2026-01-02",
    ]
    places = [full.index(text) for text in parts]
    assert places == sorted(places)
    assert '<td class="word">rate</td><td class="number">2</td><td class="word">–</td>' in full


def test_headings_are_in_order(full):
    levels = [int(level) for level in re.findall(r"<h(\d)", full)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_what_others_wrote_is_escaped_everywhere():
    row = {EVIL: EVIL, "n": 1}
    texts = dict.fromkeys(("title", "question", "reason", "sentence", "figure_error", "how", "cost", "source"), EVIL)
    evil = Finding(
        instrument=EVIL, severity=Severity.NOTE, sentence=EVIL, label=EVIL, quantity=EVIL, value=1.0, advice=EVIL, source=EVIL
    )
    sections = [Section(name=EVIL, **texts, state=state, rows=[row] * 20, findings=[evil]) for state in ("done", "failed", EVIL)]
    text = html([evil], sections, EVIL, facts={EVIL: EVIL}, plan=[row], provenance={EVIL: EVIL}, made=EVIL)
    checker = checked(text)
    assert checker.outside == []
    assert "<script" not in text
    assert "<img" not in text
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in checker.ids)


@pytest.mark.parametrize(
    "source",
    ["javascript:alert(1)", "JAVASCRIPT:alert(1)//https:", "data:text/html,x", "file:///etc/passwd", "//a.org", "ftp://a.org"],
)
def test_only_web_addresses_become_links(source):
    text = html([finding(source=source)], [section(source=source)])
    assert checked(text).outside == []
    assert source in text.replace("<wbr>", "")


def test_an_address_cannot_leave_its_attribute():
    text = html([finding(source="https://a.org/'onclick='alert(1)\"onclick=\"x <b>")])
    (link,) = re.findall(r"<a href=\"https[^>]*>", text)
    assert link == '<a href="https://a.org/&#39;onclick=&#39;alert(1)" rel="noopener noreferrer">'


@pytest.mark.parametrize(
    "text", ["", "plain", "https://", "http://a.org, and https://b.org/x_(y).", "(https://a.org)", "https://..."]
)
def test_pieces_lose_nothing(text):
    assert "".join(part for part, _ in pieces(text)) == text


def test_silence_is_explained():
    done, failed = section(), section(name="other", state="failed", reason="no")
    assert "Nothing needs your attention" in html([], [done])
    assert "The instruments that finished found nothing" in html([], [done, failed])
    assert "No instrument finished, so nothing is known yet" in html([], [failed])
    assert "No instrument was asked" in html()
    for text in (html(), html([], [done, failed])):
        checked(text)
        assert "<figure>" not in text
        assert "<table" not in text
        assert "Provenance" not in text


def test_names_that_look_alike_have_their_own_anchors():
    names = ["a b", "a-b", "A_B", "λ", "μ", "a-b-2"]
    text = html([finding(instrument=name) for name in names], [section(name=name) for name in names])
    checker = checked(text)
    anchors = [name for name in checker.ids if name.startswith("section-")]
    assert anchors == ["section-a-b", "section-a-b-2", "section-a-b-3", "section-part", "section-part-2", "section-a-b-2-2"]
    assert re.findall(r'goto small" href="#([^"]+)"', text) == anchors


def test_a_finding_with_an_odd_number_is_shown():
    for value, shown in ((float("nan"), "nan"), (float("inf"), "infinite"), (0, "0"), (-1e-9, "-1e-09")):
        assert f"<b>{shown}</b>" in html([finding(value=value)])
    assert '<p class="value">' not in html([finding(value=None, quantity="rate")])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1234567"),
        (123456.7, "1.235e+05"),
        (np.float32(0.1), "0.1"),
        (np.int64(7), "7"),
        (np.bool_(True), "yes"),
        (torch.tensor(0.25), "0.25"),
        (torch.tensor([1.0, 2.0]), "1, 2"),
        (torch.zeros(30, 40), "30 × 40 numbers"),
        (float("nan"), "not a number"),
        (1 + 2j, "1+2j"),
        (" ", "–"),
        (Severity.NOTE, "note"),
        ({"a": 1}, "{'a': 1}"),
    ],
)
def test_cells(value, shown):
    assert cell(value) == shown


def test_tables_hold_ragged_rows_and_fold_only_when_it_saves_room():
    table = table_of([{"a": 1}, {"b": "x" * 300}, {"a": np.float64(2.5)}])
    assert table.columns == [("a", "number"), ("b", "text")]
    assert [line[0].text for line in table.shown] == ["1", "–", "2.5"]
    assert len(table.shown[1][1].text) == 200
    assert not table_of([{"a": 1}] * (SHOWN + 3)).folded
    assert len(table_of([{"a": 1}] * (SHOWN + 4)).folded) == 4
    assert table_of([{"a": True}, {"a": None}]).columns == [("a", "word")]
    assert table_of([]).columns == []


def test_a_huge_table_does_not_make_a_huge_page():
    text = html([], [section(rows=[{"a": i, "b": 1 / (i + 1)} for i in range(100_000)])])
    assert len(text) < 80_000
    assert f"{100_000 - MOST} further rows are not on this page" in text


def test_long_names_may_be_broken_at_their_dots_only():
    assert breakable("short.name") == "short.name"
    name = "encoder.layers.11.self_attention.weight"
    assert breakable(name).replace("<wbr>", "") == name
    assert breakable(f"<{name}>").startswith("&lt;encoder.<wbr>")


def test_a_slug_is_safe():
    assert slug(EVIL) == "script-alert-1-script-img-src-x-onerror-alert-2"
    assert slug("") == "part"


def test_the_page_is_written_whole_into_a_new_folder(tmp_path):
    page = Page(title="odd \udcff name", findings=[], sections=[], made="now")
    path = write_page(page, tmp_path / "new" / "survey.html")
    assert path == tmp_path / "new" / "survey.html"
    assert "odd ? name" in path.read_text(encoding="utf-8")
    assert [file.name for file in path.parent.iterdir()] == ["survey.html"]
