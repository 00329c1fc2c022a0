"""The networks of the layer-wise experiments: inputs written in their span."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from theodolite.experiments.hessian.networks import Setup, Training, network_of, problem_of, training_of
from theodolite.linalg import overlap_curve, top_eigenpairs
from theodolite.operators import layer_hessians
from theodolite.runners.store import plain_row

#: Fewer samples than pixels, so that the span is smaller than the space.
FEW = Setup("F-20^2", epochs=1, samples=30, pixels="raw")


def test_inputs_in_their_span_have_the_same_outputs_and_fewer_weights():
    (whole, (x, _)), (inside, (z, _)) = network_of(FEW, 0), network_of(replace(FEW, span=True), 0)
    first = next(module for module in inside.modules() if isinstance(module, nn.Linear))
    assert first.weight.shape == (20, z.shape[1])
    assert first.in_features == z.shape[1] <= 30 < x.shape[1]
    torch.testing.assert_close(z @ z.T, x @ x.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(inside(z), whole(x), rtol=1e-10, atol=1e-10)


def test_the_first_layer_keeps_its_curvature_and_models_their_overlap():
    def pairs(setup, seed):
        return top_eigenpairs(layer_hessians(problem_of(setup, seed), ["fc1"])["fc1"], 8, tol=1e-10, progress=False)

    setups = (FEW, replace(FEW, span=True))
    whole, inside = ([pairs(setup, seed) for seed in (0, 1)] for setup in setups)
    for a, b in zip(whole, inside, strict=True):
        torch.testing.assert_close(a.values, b.values, rtol=1e-9, atol=1e-12)
    curves = [overlap_curve(a.vectors, b.vectors) for a, b in (whole, inside)]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("pixels", "low", "high"), [("raw", 0.0, 1.0), ("standard", -2.0, 3.0)])
def test_raw_pixels_are_not_centred(pixels, low, high):
    _, (x, _) = network_of(replace(FEW, pixels=pixels), 0)
    assert low <= float(x.min()) <= float(x.max()) <= high
    assert (float(x.min()) == 0.0) == (pixels == "raw")


def test_a_network_is_read_back_from_the_rows_of_its_training():
    setup = Setup("F-20^2-BN", epochs=1, samples=30)  # a batch norm also counts its batches, a number without a shape
    stored = [plain_row(Training().run(training_of(setup, 0).job))]
    (model, (x, _)), (again, _) = network_of(setup, 0), network_of(setup, 0, stored)
    assert torch.equal(model(x), again(x))


def test_what_is_looked_at_needs_no_training_of_its_own():
    assert training_of(FEW, 0).job == training_of(replace(FEW, samples=10, span=True), 0).job
    assert training_of(FEW, 0).job != training_of(FEW, 1).job
