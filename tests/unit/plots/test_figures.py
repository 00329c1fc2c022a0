"""Whole figures: panels with letters, and SVG that is the same each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.unit.plots.examples import every_kind, hash_of
from theodolite import plots
from theodolite.plots.figures import _name


@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))])
def test_grids(count, shape):
    figure, axes = plots.panels(count, size=(2.0, 1.0))
    assert len(axes) == len(figure.axes) == count
    assert figure.get_size_inches().tolist() == [2.0 * shape[1], 1.0 * shape[0]]
    assert [ax.texts[0].get_text() for ax in axes] == [f"({letter})" for letter in "abcdefg"[:count]]


def test_options():
    figure, axes = plots.panels(3, columns=2, letters=False, share_y=True, title="All")
    assert not any(ax.texts for ax in axes)
    assert figure.get_suptitle() == "All"
    axes[0].set_ylim(0, 7)
    assert axes[2].get_ylim() == (0, 7)
    assert [_name(i) for i in (25, 26, 27, 52)] == ["z", "aa", "ab", "ba"]
    for bad in ({"count": 0}, {"count": 2, "columns": 0}):
        with pytest.raises(ValueError, match=r"must be (one of 1|a positive integer)"):
            plots.panels(**bad)


def test_drawings_go_into_panels():
    _, axes = plots.panels(2)
    rows = [{"x": 1, "y": 2}, {"x": 2, "y": 1}]
    assert plots.curves(rows, "x", "y", ax=axes[0]) is axes[0]
    plots.matrix([[1.0, 2.0]], ax=axes[1])
    assert plots.to_svg(axes[0]).startswith("<svg")


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
