"""The report: planted directions, known spectra, honest error bars."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from tests.unit.measures.features.cases import Tokens, cnn, mlp, numbers
from theodolite.data.generators import rank_k_target
from theodolite.measures.features import FeatureReport, agop, agop_alignment, feature_report, input_gradients


@pytest.mark.parametrize("shape", [(40, 5), (3, 5), (200, 30), (4, 30)])  # more and fewer gradients than coordinates
def test_the_numbers_are_those_of_the_dense_matrix(shape: tuple[int, int]) -> None:
    model, x = mlp(outputs=2, inputs=shape[1]), numbers(*shape)
    g, found = agop(model, x), feature_report(model, x)
    values, vectors = torch.linalg.eigh(g)
    r = len(found.values)
    torch.testing.assert_close(found.values, values.flip(0)[:r].clamp_min(0), rtol=1e-9, atol=1e-12)
    assert float((found.vectors[:, 0] @ vectors[:, -1]).abs()) == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(r).double(), rtol=0.0, atol=1e-9)
    assert found.effective_rank == pytest.approx(float(g.trace() ** 2 / g.square().sum()), rel=1e-9)
    assert found.top_share == pytest.approx(float(values[-1] / g.trace()), rel=1e-9)
    assert found.identity == pytest.approx(agop_alignment(g, torch.eye(shape[1])), rel=1e-9)
    covariance = torch.cov(x.T, correction=0)
    assert found.covariance == pytest.approx(agop_alignment(g, covariance), rel=1e-9)
    torch.testing.assert_close(found.diagonal, g.diagonal())
    assert (found.samples, found.outputs, found.dim) == (shape[0], 2, shape[1])


@pytest.mark.parametrize("shape", [(300, 30), (12, 60)])
def test_large_matrices_by_iteration(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    from theodolite.measures.features import report

    model, x = mlp(inputs=shape[1]).float(), numbers(*shape).float()
    exact = feature_report(model, x)
    monkeypatch.setattr(report, "DENSE", 10)
    iterated = feature_report(model, x)
    torch.testing.assert_close(iterated.values[:5], exact.values[:5], rtol=1e-3, atol=1e-6)
    assert iterated.values.dtype == iterated.vectors.dtype == torch.float32
    assert iterated.top_share == pytest.approx(exact.top_share, rel=1e-3)


@pytest.mark.parametrize("low", [False, True])
def test_alignment_with_a_reference(low: bool) -> None:
    x = numbers(500, 20)
    target = rank_k_target("rank-4", 20)
    reference = input_gradients(target, x) if low else target.egop
    found = feature_report(target, x, reference)
    assert found.reference == pytest.approx(agop_alignment(agop(target, x), reference), rel=1e-9)
    assert found.chance == pytest.approx(agop_alignment(torch.eye(20), reference), rel=1e-9)
    assert found.reference_error > 0 or low
    assert "alignment with the reference" in found.sentence()
    assert {row["quantity"] for row in found.rows()} >= {"effective rank", "alignment with the reference", "eigenvalue 1"}
    with pytest.raises(ValueError, match="20 and 3 coordinates"):
        feature_report(target, x, torch.eye(3))


def test_planted_inputs_are_named() -> None:
    model = mlp(inputs=20)
    with torch.no_grad():
        model[0].weight[:, [i for i in range(20) if i not in (3, 11)]] = 0.0  # type: ignore[index]
    found = feature_report(model, numbers(50, 20))
    assert sorted(i for i, share in found.coordinates if share > 0) == [3, 11]
    assert found.unused == [i for i in range(20) if i not in (3, 11)]
    assert found.effective_rank <= 2
    assert "18 coordinates have no effect" in found.sentence()


def test_the_error_bar_is_that_of_fresh_samples() -> None:
    """Over 60 samples of 200 points the median error bar is the true spread, within a factor of 1.6."""
    target = rank_k_target("rank-3", 12)
    found = [feature_report(target, numbers(200, 12, seed=100 + i)) for i in range(60)]
    for name in ("effective_rank", "top_share"):
        spread = float(torch.tensor([getattr(f, name) for f in found]).std())
        bar = float(torch.tensor([getattr(f, f"{name}_error") for f in found]).median())
        assert spread / 1.6 < bar < 1.6 * spread, (name, spread, bar)


def test_one_sample_has_no_error_bar() -> None:
    found = feature_report(mlp(), numbers(1, 5))
    assert (found.effective_rank_error, found.reference, found.covariance) == (0.0, None, None)


def test_tokens_images_and_problems() -> None:
    ids = torch.randint(0, 11, (8, 4), generator=torch.Generator().manual_seed(0))
    tokens = feature_report(Tokens(), ids, at="embedding")
    assert (tokens.dim, tokens.samples) == (6, 32)
    torch.testing.assert_close(tokens.values, torch.linalg.eigvalsh(agop(Tokens(), ids, at="embedding")).flip(0))
    assert "features of embedding" in tokens.sentence()
    x = numbers(6, 2, 4, 4)
    problem = th.Problem(cnn(), nn.CrossEntropyLoss(), [(x[:5], torch.zeros(5).long()), (x[5:], torch.zeros(1).long())])
    assert feature_report(problem).trace == pytest.approx(float(agop(problem).trace()))


def test_projections_are_called_estimates() -> None:
    found = feature_report(mlp(outputs=5), numbers(9, 5), projections=2)
    assert found.outcome is th.results.Outcome.ESTIMATED
    assert found.trace == pytest.approx(float(agop(mlp(outputs=5), numbers(9, 5), projections=2).trace()))


def test_a_constant_model_has_no_features() -> None:
    def constant(x: Tensor) -> Tensor:
        return 0 * x

    with pytest.raises(ValueError, match="do not depend on its inputs"):
        feature_report(constant, numbers(3, 2))


def test_it_saves_and_loads(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = feature_report(mlp(), numbers(9, 5))
    found.save(tmp_path / "features")
    again = FeatureReport.load(tmp_path / "features")
    assert again.rows() == found.rows()
    assert torch.equal(again.vectors, found.vectors)
