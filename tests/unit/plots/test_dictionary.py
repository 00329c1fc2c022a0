"""Pictures of dictionaries: every atom in its place, error bars as given, and what is left out is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite import plots
from theodolite.plots.axes_style import notes

RNG = np.random.default_rng(0)
CHOICE = [
    {"n_components": p, "sparsity": k, "hidden_error": 1 / k + abs(p - 20) / 100, "stderr": 0.05, "reconstruction": 1 / p / k}
    for k in (2, 4)
    for p in (40, 10, 20)
]


def test_a_mosaic_holds_every_atom_scaled_by_its_largest_entry():
    atoms = RNG.normal(size=(5, 12))
    image = plots.plot_atoms(torch.tensor(atoms), (3, 4), columns=3).images[0].get_array()
    assert image.shape == (3 + 1 + 3, 4 + 1 + 4 + 1 + 4)
    np.testing.assert_allclose(image[:3, 5:9], (atoms[1] / np.abs(atoms[1]).max()).reshape(3, 4))
    np.testing.assert_allclose(image[4:, :4], (atoms[3] / np.abs(atoms[3]).max()).reshape(3, 4))
    assert np.isnan(np.ma.filled(image[3], np.nan)).all()


def test_order_count_and_what_is_not_shown():
    atoms = RNG.normal(size=(5, 4))
    ax = plots.plot_atoms(atoms, (2, 2), order=[4, 0, 2], count=2, columns=2, title="used most")
    np.testing.assert_allclose(ax.images[0].get_array()[:, :2].ravel(), atoms[4] / np.abs(atoms[4]).max())
    assert notes(ax) == ["2 of 5 atoms"]
    assert ax.get_title(loc="left") == "used most"


def test_colour_images_have_grey_for_zero():
    image = plots.plot_atoms(np.array([[0.0, 0, 0, 2.0, -2.0, 0]]), (1, 2, 3)).images[0].get_array()
    np.testing.assert_allclose(image, [[[0.5, 0.5, 0.5], [1.0, 0.0, 0.5]]])


def test_curves_without_a_shape_are_numbered_and_named():
    atoms = RNG.normal(size=(3, 5))
    ax = plots.plot_atoms(atoms, order=[2, 0, 1], feature_names=["a", "b$", "c", "d", "a very long name of a feature"])
    assert len(ax.lines) == 3
    np.testing.assert_allclose(ax.lines[1].get_ydata(), -1 + 0.45 * atoms[0] / np.abs(atoms[0]).max())
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["2", "0", "1"]
    assert [tick.get_text() for tick in ax.get_xticklabels()][-1] == "a very long nam…"
    assert "<svg" in plots.to_svg(ax)


def test_many_curves_are_cut_and_zero_atoms_drawn():
    ax = plots.plot_atoms(np.vstack([np.zeros(30), RNG.normal(size=(19, 30))]))
    assert len(ax.lines) == 12
    assert notes(ax) == ["12 of 20 atoms"]
    assert np.isfinite(ax.lines[0].get_ydata()).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patch_shape": (2, 3)}, "with 4 numbers in all"),
        ({"patch_shape": (4,)}, "patch_shape"),
        ({"patch_shape": (1, 2, 2)}, "patch_shape"),
        ({"count": 0}, "count must be a positive integer"),
        ({"patch_shape": (2, 2), "columns": 0}, "columns"),
    ],
)
def test_what_cannot_be_drawn(arguments, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_atoms(np.eye(4), **arguments)


def test_the_choice_has_bars_a_ring_at_the_lowest_and_reconstruction_beside():
    left, right = plots.plot_dictionary_choice(CHOICE).axes
    first = left.containers[0]
    np.testing.assert_allclose(first.lines[0].get_xdata(), [10, 20, 40])
    np.testing.assert_allclose(first.lines[0].get_ydata(), [0.6, 0.5, 0.7])
    bars = first.lines[2][0].get_segments()
    np.testing.assert_allclose([bar[1, 1] - bar[0, 1] for bar in bars], 0.1)
    ring = next(line for line in left.lines if line.get_label() == "_chosen")
    assert ring.get_xydata().tolist() == [[20.0, 0.25]]
    np.testing.assert_allclose(right.containers[1].lines[0].get_ydata(), [1 / 40, 1 / 80, 1 / 160])
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["2", "4"]
    assert right.get_legend().get_title().get_text() == "sparsity"


def test_a_size_that_failed_is_left_out_and_said():
    broken = [{**CHOICE[0], "hidden_error": float("nan")}, *CHOICE[1:]]
    left = plots.plot_dictionary_choice(broken).axes[0]
    assert "1 of 6 values not finite" in notes(left)
    assert len(left.containers[0].lines[0].get_xdata()) == 2


def test_learning_curves_and_usage():
    rows = [{"objective": o, "epoch": e, "loss": 1 / e} for o in ("masked", "reconstruction") for e in (1, 2, 3)]
    ax = plots.plot_learning_curve(rows, by="objective")
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1, 0.5, 1 / 3]] * 2
    usage = [{"objective": "masked", "share": s} for s in (0.0, 0.0, 0.2, 0.4)]
    ax = plots.plot_atom_usage(usage, by="objective")
    assert notes(ax) == ["masked: 2 of 4 atoms used by no signal"]
    assert sum(ax.patches[0].get_data().values) == 4
    assert notes(plots.plot_atom_usage([{"share": 0.5}])) == ["0 of 1 atoms used by no signal"]
