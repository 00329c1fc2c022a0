"""Pictures of certificates: where posteriors are wide, of few layers and of many."""

from __future__ import annotations

import pytest
import torch

from theodolite import plots
from theodolite.measures.bounds import Block, GaussianPosterior, risk_certificate


def posterior(layers: int, **known) -> GaussianPosterior:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4 + i) for i in range(layers)]
    values = [{"log_std": torch.randn(s, generator=generator), "curvature": torch.rand(s, generator=generator)} for s in shapes]
    blocks = tuple(
        Block(f"{i}.weight", str(i), shape, torch.zeros(shape), start=torch.zeros(shape), **{**value, **known})
        for i, (shape, value) in enumerate(zip(shapes, values, strict=True))
    )
    return GaussianPosterior(blocks=blocks, variances={b.group: 0.1 for b in blocks}, basis="any")


@pytest.mark.parametrize("layers", [2, 14])
def test_of_many_layers_the_largest_are_shown(layers):
    ax = plots.plot_posterior(posterior(layers), most=40)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == [str(i) for i in range(layers)][-8:]
    (said,) = [text.get_text() for text in ax.texts if "coordinates" in text.get_text()]
    assert ("of the 8 largest of 14 layers" in said) == (layers == 14)


def test_a_posterior_without_curvature_has_no_picture():
    with pytest.raises(ValueError, match="no picture of a posterior without known curvature"):
        plots.plot_posterior(posterior(2, curvature=None))


def test_rates_that_are_not_known_are_left_out():
    ax = plots.plot_certificate(risk_certificate(1200, 60_000, 4000.0, 60_000))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["drawn weights", "drawn weights"]
