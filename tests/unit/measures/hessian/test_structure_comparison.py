"""Two models compared: the measured overlap, its error, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.measures.hessian import compare_layers

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(60, 7, generator=generator), torch.arange(60) % 4


def problem(seed: int, pair: tuple[Tensor, Tensor] | None = None) -> th.Problem:
    torch.manual_seed(seed)
    return th.Problem(nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4)), LOSS, pair or samples())


def dense_space(p: th.Problem, name: str, k: int) -> Tensor:
    return torch.linalg.eigh(th.layer_hessians(p, name)[name].to_dense())[1].flip(1)[:, :k]


@pytest.mark.parametrize("tol", [1e-2, 1e-6])
def test_the_overlap_is_that_of_the_exact_blocks_within_its_error(tol):
    problems = {"a": problem(0), "b": problem(1)}
    found = th.compare(problems, k=6, tol=tol, progress=False)
    assert {pair.layer for pair in found.pairs} == {"0", "2"}
    for pair in found.pairs:
        assert len(pair.overlap) == len(pair.errors) == 6
        for k in range(1, 7):
            truth = th.subspace_overlap(*(dense_space(p, pair.layer, k) for p in problems.values()))
            assert abs(float(pair.overlap[k - 1]) - truth) <= float(pair.errors[k - 1]) + 1e-12
        if tol == 1e-6:
            assert float(pair.errors[-1]) < 1  # the gap behind the last is known
            assert float(pair.errors[:3].max()) < 1e-3


def test_the_error_is_what_the_residuals_leave_open():
    """Vectors tilted by hand: the estimate covers the change of the overlap, and grows with the tilt."""
    a, b = (th.hessian_structure(problem(seed), "0", k=6, tol=1e-10)["0"] for seed in (0, 1))
    block = th.layer_hessians(problem(0), "0")["0"].to_dense()
    from dataclasses import replace

    seen = []
    for size in (1e-4, 1e-3, 1e-2):
        noise = torch.randn(a.pairs.vectors.shape, generator=torch.Generator().manual_seed(1))
        tilted = torch.linalg.qr(a.pairs.vectors + size * noise)[0]
        values, turn = torch.linalg.eigh(tilted.T @ block @ tilted)
        tilted, values = tilted @ turn.flip(1), values.flip(0)
        residuals = (block @ tilted - tilted * values).norm(dim=0)
        worse = replace(a, pairs=replace(a.pairs, vectors=tilted, values=values, residuals=residuals))
        true, found = compare_layers(a, b, k=5), compare_layers(worse, b, k=5)
        assert bool(((found.overlap - true.overlap).abs() <= found.errors).all())
        seen.append(float(found.errors[2]))
    assert 0 < seen[0] < seen[1] < seen[2]


def test_a_degenerate_end_has_no_subspace():
    """Zero weights: c − 1 equal eigenvalues, so that the first k are any of them."""
    model = nn.Linear(8, 6)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    p = th.Problem(model, LOSS, (torch.rand(50, 8, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 6))
    a, b = (th.hessian_structure(p, k=4, seed=seed)["(model)"] for seed in (0, 1))
    assert torch.equal(compare_layers(a, b, k=3).errors, torch.ones(3))


def test_the_last_layer_has_no_permuted_prediction():
    found = th.compare({"a": problem(0), "b": problem(1)}, k=4, progress=False)
    hidden, last = found.pairs
    assert (hidden.last, last.last) == (False, True)
    assert "in no common order" in str(hidden)
    assert "in no common order" not in str(last)
    assert f"predicted {float(last.predicted[-1]):.3g})" in str(last)
    assert {row["curve"] for row in last.rows()} == {"measured", "predicted"}
    assert len({row["curve"] for row in hidden.rows()}) == 3
    k = 3
    assert float(hidden.permuted[k - 1]) == pytest.approx(k / 6 * hidden.input_dot, rel=0.05)  # rank-one inputs: the law


def test_pairs_of_the_same_models_show_their_spread():
    found = th.compare({"a": problem(0), "b": problem(1), "c": problem(2)}, "0", k=6, progress=False)
    each = [float(pair.overlap[5]) for pair in found.pairs]
    assert f"({min(each):.2g} to {max(each):.2g} in 3 pairs)" in found.findings[0].sentence
    two = th.compare({"a": problem(0), "b": problem(1)}, "0", k=6, progress=False)
    assert "pairs" not in two.findings[0].sentence


def test_what_cannot_be_compared_is_refused():
    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(7, 4))

        def forward(self, x: Tensor) -> Tensor:
            return next(iter(self.children()))(x)

    with pytest.raises(ValueError, match="no layer in common to compare: x has a; y has b"):
        th.compare({"x": th.Problem(Named("a"), LOSS, samples()), "y": th.Problem(Named("b"), LOSS, samples())}, k=3)
    x, y = samples()
    with pytest.raises(ValueError, match=r"same data\. That of b differs from that of a"):
        th.compare({"a": problem(0), "b": problem(1, (x + 0.1, y))}, k=3)
    wide = th.Problem(nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 4)), LOSS, samples())
    with pytest.raises(ValueError, match=r"0 must have the same size in both models\. Its weight is 6×7 in a and 8×7 in b"):
        th.compare({"a": problem(0), "b": wide}, k=3, progress=False)


def test_the_page_says_what_was_compared(tmp_path):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 4)) for _ in range(2)]
    problems = {name: th.Problem(model, LOSS, samples()) for name, model in zip("ab", models, strict=True)}
    found = th.compare(problems, k=4, tol=1e-4, progress=False)
    assert "1: not compared, no Kronecker form: LayerNorm" in str(found)
    page = found.to_html(tmp_path / "index.html", facts={"checkpoints": "run0, run1"}).read_text()
    for text in (
        "Sequential, 88 parameters",
        "samples",
        "directions per layer",
        "0.0001",
        "run0, run1",
        "1 not compared",
        "LayerNorm",
    ):
        assert text in page
