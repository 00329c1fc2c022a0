"""The style: safe colours, settings restored, no pyplot."""

from __future__ import annotations

import itertools

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tests.unit.plots.conftest import settings
from theodolite import plots
from theodolite.plots.style import GREY, LINES, new_axes

# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def seen(colour, eye: str = "normal") -> np.ndarray:
    """CIE L*a*b* of a colour as that eye sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    t = XYZ @ np.clip(EYES[eye] @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
def test_colours_can_be_told_apart(eye):
    """A difference of 2.3 is just visible; these are at least 15 apart, and far from the white page."""
    colours = [seen(c, eye) for c in plots.PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)) > 15
    assert min(np.linalg.norm(c - seen("white", eye)) for c in colours) > 30


def test_looks_differ_without_colour():
    for count in (7, 12, 40):
        shapes = {(look.marker, str(look.line)) for look in map(plots.look, range(count))}
        assert len(shapes) == count
    assert len({plots.look(i) for i in range(280)}) == 280
    assert len(set(plots.MARKERS)) == 8
    assert len(LINES) == 5


def test_many_numbers_get_an_ordered_colour_map():
    lightness = [seen(look.colour)[0] for look in plots.looks([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])]
    assert lightness == sorted(lightness)
    assert lightness[-1] < 85
    assert [look.colour for look in plots.looks(list("abcdef"))] == list(plots.PALETTE[:6])
    assert plots.looks(["a"], start=2)[0] == plots.look(2)


def test_the_sequential_map_reads_in_grey():
    light = [seen(matplotlib.colormaps[plots.SEQUENTIAL](v))[0] for v in np.linspace(0, 1, 20)]
    assert (np.diff(light) > 2).all()
    middle, *ends = (seen(matplotlib.colormaps[plots.DIVERGING](v), "deuteranopia") for v in (0.5, 0.02, 0.98))
    assert np.linalg.norm(ends[0] - ends[1]) > 40
    assert middle[0] > 95


def test_style_is_a_visit():
    before = settings()
    with plots.style():
        assert matplotlib.rcParams["axes.grid"] is True
        assert matplotlib.rcParams["font.size"] == 10
    assert settings() == before
    with pytest.raises(KeyError), plots.style():
        raise KeyError
    assert settings() == before


def test_a_users_settings_do_not_leak_in():
    rows = [{"x": 1, "y": 2}, {"x": 2, "y": 1}]
    plain = plots.to_svg(plots.curves(rows, "x", "y"))
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.linewidth": 9, "axes.grid": False}):
        assert plots.to_svg(plots.curves(rows, "x", "y")) == plain


def test_given_axes_are_returned_and_keep_their_look():
    ax = new_axes()
    ax.set_facecolor("yellow")
    assert plots.scatter([{"x": 1, "y": 2}], "x", "y", ax=ax) is ax
    assert ax.get_facecolor() == (1, 1, 0, 1)
    assert to_rgb(GREY)
