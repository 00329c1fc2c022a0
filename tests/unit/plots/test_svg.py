"""SVG: the same bytes each time and in each process, ids that do not collide, safe titles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.unit.plots.examples import every_kind, hash_of
from theodolite import plots


@pytest.fixture(scope="module")
def figures():
    return every_kind()


@pytest.fixture(scope="module")
def drawn(figures):
    return {name: plots.to_svg(figure) for name, figure in figures.items()}


def test_two_calls_give_the_same_bytes_and_leave_the_figure_as_found(figures, drawn):
    for name, figure in figures.items():
        before = (
            [ax.get_position().bounds for ax in figure.axes],
            figure.canvas,
            figure.dpi,
            [ax.get_in_layout() for ax in figure.axes],
        )
        assert plots.to_svg(figure) == drawn[name], name
        after = (
            [ax.get_position().bounds for ax in figure.axes],
            figure.canvas,
            figure.dpi,
            [ax.get_in_layout() for ax in figure.axes],
        )
        assert after == before


def test_two_processes_give_the_same_bytes(drawn):
    """Also with another hash seed and another clock zone; this process is the other one. Neither needs pyplot."""
    env = {**os.environ, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    other = subprocess.run(
        [sys.executable, "-m", "tests.unit.plots.examples"], env=env, check=True, capture_output=True, text=True
    )
    assert other.stdout.splitlines() == [*(f"{name} {hash_of(text)}" for name, text in drawn.items()), "pyplot loaded: False"]


def test_the_svg_is_well_formed_and_fits_the_page(drawn):
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.attrib["viewBox"])
        assert "width" not in root.attrib
        assert "max-width" in root.attrib["style"]
        assert root.attrib["role"] == "img"
        assert "<!--" not in text
        assert "metadata" not in text
        assert not re.search(r"20\d\d-\d\d-\d\d", text)


def test_ids_are_unique_on_a_page_and_every_reference_has_a_target(drawn):
    page = "".join(drawn.values())
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page)
    assert targets
    assert set(targets) <= set(ids)


def test_rules_stay_inside_their_picture(drawn):
    for text in drawn.values():
        (rule,) = re.findall(r"<style[^>]*>([^<]*)", text)
        name = ElementTree.fromstring(text).attrib["id"]
        assert rule.startswith(f"#{name} *{{")


def test_a_prefix_may_be_given(figures):
    text = plots.to_svg(figures["curves"], prefix="catapult/figure-3.3")
    assert 'id="tcatapult-figure-3-3"' in text
    assert 'id="figure-3-3-axes_1"' in plots.to_svg(figures["curves"], prefix="figure-3-3")


def test_what_users_supply_is_escaped():
    rows = [{"x": 1, "y": 2, "who": "<script>alert(1)</script> -->"}, {"x": 2, "y": 3, "who": '$\\frac{ " id="'}]
    text = plots.to_svg(plots.curves(rows, "x", "y", by="who", title="<b>&"), title=None)
    assert "<script" not in text
    assert "<title>&lt;b&gt;&amp;</title>" in text
    ElementTree.fromstring(text)
    assert "<title>y against x</title>" in plots.to_svg(plots.curves(rows, "x", "y", band=None))
    assert "<title>told</title>" in plots.to_svg(plots.curves(rows, "x", "y"), title="told")


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_files_are_the_same_each_time(figures, tmp_path, suffix):
    first = plots.save(figures["curves"], tmp_path / "new" / f"a.{suffix}").read_bytes()
    assert plots.save(figures["curves"], tmp_path / f"b.{suffix}").read_bytes() == first
    assert first


def test_saving_accepts_axes_and_refuses_other_things(tmp_path):
    ax = plots.curves([{"x": 1, "y": 2}], "x", "y")
    assert ElementTree.parse(plots.save(ax, tmp_path / "a.svg")).getroot().attrib["width"].endswith("pt")
    with pytest.raises(ValueError, match=r"\.svg, \.pdf or \.png. Got 'a.gif'"):
        plots.save(ax, tmp_path / "a.gif")
    with pytest.raises(ValueError, match="Figure or Axes"):
        plots.to_svg("picture")  # type: ignore[arg-type]
