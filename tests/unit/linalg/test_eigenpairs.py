"""Eigenpairs are right, or say that they are not."""

from __future__ import annotations

import copy
import dataclasses
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

import theodolite as th
from theodolite.linalg.certificate import RISK, Chain
from theodolite.operators import DiagonalOperator
from theodolite.results import Outcome
from theodolite.testing import random_symmetric


def expected(eigenvalues: torch.Tensor, k: int, which: str) -> torch.Tensor:
    if which == "magnitude":
        return eigenvalues[eigenvalues.abs().argsort(descending=True)][:k]
    ordered = eigenvalues.sort(descending=True).values
    return ordered[:k] if which == "largest" else ordered[-k:]


def check(matrix: torch.Tensor, eigenvalues: torch.Tensor, pairs: th.linalg.Eigenpairs, k: int, which: str) -> None:
    scale = float(eigenvalues.abs().max())
    assert pairs.converged
    assert pairs.outcome is Outcome.CONVERGED
    truth = expected(eigenvalues, k, which)
    got = pairs.values
    if which == "magnitude":
        got, truth = got.abs(), truth.abs()
    assert float((got - truth).abs().max()) <= pairs.tol * scale * (1 + 1e-9)
    assert torch.equal(got, got.sort(descending=True).values)
    gram = pairs.vectors.T @ pairs.vectors
    assert float((gram - torch.eye(k, dtype=torch.float64)).abs().max()) < 1e-10
    recomputed = (matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    torch.testing.assert_close(pairs.residuals, recomputed, rtol=1e-6, atol=1e-11 * scale)
    assert float(recomputed.max()) <= pairs.tol * scale * (1 + 1e-6)


def spectrum(kind: str, n: int, generator: torch.Generator) -> torch.Tensor:
    base = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "indefinite":
        return 2 * base
    if kind == "top of multiplicity 5":
        return torch.cat([torch.full((5,), 7.0, dtype=torch.float64), 0.2 * base[5:]])
    if kind == "copies below the top":
        values = torch.arange(1, n + 1, dtype=torch.float64) ** -1
        values[2:5], values[6:9] = values[2], values[6]
        return values
    if kind == "cluster 1e-6 apart":
        cluster = 3 + 1e-6 * torch.arange(5, dtype=torch.float64)
        return torch.cat([cluster, base[5:].abs() ** 3 / 10])
    if kind == "both ends doubled":
        return torch.cat([torch.tensor([4.0, 4.0, -4.0, -4.0, 2.0, 2.0], dtype=torch.float64), 0.1 * base[6:]])
    return torch.cat([torch.tensor([50.0, 20.0, 10.0], dtype=torch.float64), 0.1 * base[3:]])  # outliers


KINDS = ["indefinite", "top of multiplicity 5", "copies below the top", "cluster 1e-6 apart", "both ends doubled", "outliers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-3, 1e-8])
def test_values_multiplicities_and_residuals(kind, which, tol):
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        n, k = (37, 90, 160, 250, 300, 400)[seed], (1, 3, 4, 6, 8, 11)[seed]
        values = spectrum(kind, n, generator)
        if which == "smallest":
            values = -values
        matrix = random_symmetric(values, seed)
        check(matrix, values, th.top_eigenpairs(matrix, k, which=which, tol=tol, seed=seed), k, which)


@given(seed=st.integers(0, 10_000), n=st.integers(2, 60), k=st.integers(1, 12), copies=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_any_small_matrix(seed, n, k, copies):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    values[: min(copies, n)] = values.max()
    matrix = random_symmetric(values, seed)
    k = min(k, n)
    check(matrix, values, th.top_eigenpairs(matrix, k, tol=1e-6, seed=seed), k, "largest")


def test_degenerate_matrices():
    for matrix in (torch.zeros(8, 8).double(), torch.eye(8).double(), torch.ones(8, 8).double(), torch.tensor([[2.0]]).double()):
        k = min(3, len(matrix))
        pairs = th.top_eigenpairs(matrix, k)
        assert pairs.converged
        torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(matrix).flip(0)[:k], atol=1e-12, rtol=0)


def test_all_eigenpairs_of_a_matrix():
    values = torch.randn(30).double()
    matrix = random_symmetric(values)
    pairs = th.top_eigenpairs(matrix, 30, tol=1e-10)
    torch.testing.assert_close(pairs.values, values.sort(descending=True).values)
    assert pairs.miss_probability == 0.0


def test_restarts_with_a_small_basis(monkeypatch):
    from theodolite.linalg import eigenpairs

    monkeypatch.setattr(eigenpairs, "BASIS_BYTES", 16 * 200 * 20)  # room for 20 vectors of 200
    values = torch.cat([torch.tensor([3.0, 2.0, 2.0, 1.5]), torch.rand(196)]).double()
    matrix = random_symmetric(values)
    pairs = th.top_eigenpairs(matrix, 4, tol=1e-6)
    assert pairs.matvecs > 20
    check(matrix, values, pairs, 4, "largest")


def test_too_small_a_budget_is_admitted():
    matrix = random_symmetric(torch.linspace(0, 1, 300).double())
    pairs = th.top_eigenpairs(matrix, 10, tol=1e-6, max_matvecs=15)
    assert not pairs.converged
    assert pairs.outcome is Outcome.MAX_MATVECS
    assert pairs.matvecs <= 15
    assert "not converged" in str(pairs)
    recomputed = (matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    torch.testing.assert_close(pairs.residuals, recomputed, rtol=1e-6, atol=1e-12)


def test_a_budget_that_ends_during_verification_is_admitted():
    matrix = random_symmetric(torch.cat([torch.tensor([9.0, 5.0]).double(), torch.rand(198).double()]))
    needed = th.top_eigenpairs(matrix, 2).matvecs
    pairs = th.top_eigenpairs(matrix, 2, max_matvecs=needed - 1)
    assert pairs.outcome is Outcome.UNVERIFIED
    assert not pairs.converged


def test_single_precision_stops_at_its_rounding():
    matrix = random_symmetric(torch.cat([torch.tensor([9.0, 5.0]).double(), torch.rand(98).double()]))
    pairs = th.top_eigenpairs(matrix.float(), 2, tol=1e-14)
    assert pairs.outcome in (Outcome.PRECISION, Outcome.MAX_MATVECS)
    assert abs(float(pairs.values[0]) - 9.0) < 1e-4


def test_pairs_below_the_resolution_are_flagged():
    matrix = random_symmetric(torch.cat([torch.tensor([10.0, 1.0]), torch.full((40,), 1e-6)]).double())
    pairs = th.top_eigenpairs(matrix, 4, tol=1e-3)
    assert pairs.unresolved.tolist() == [False, False, True, True]
    assert "below the resolution" in str(pairs)


def test_operators_of_other_libraries_are_accepted():
    import numpy as np
    import scipy.sparse

    values = torch.tensor([5.0, 2.0, 2.0, -1.0, 0.5]).double()
    matrix = random_symmetric(values)
    for source in (matrix.numpy(), scipy.sparse.csr_array(matrix.numpy()), scipy.sparse.linalg.aslinearoperator(matrix.numpy())):
        got = th.top_eigenpairs(source, 3)
        np.testing.assert_allclose(got.values.numpy(), [5, 2, 2], atol=1e-2)


def test_arpack_agrees():
    from scipy.sparse.linalg import eigsh

    matrix = random_symmetric(torch.randn(200).double() ** 3)
    ours = th.top_eigenpairs(matrix, 6, tol=1e-9)
    theirs = eigsh(th.operators.as_operator(matrix).to_scipy(), k=6, which="LA", tol=0, return_eigenvectors=False)
    torch.testing.assert_close(ours.values, torch.as_tensor(sorted(theirs, reverse=True)), rtol=1e-8, atol=1e-8)


# Warm starts


def digits_problems(seed: int, activation: type[nn.Module], steps: int = 60, lr: float = 0.01) -> tuple[th.Problem, th.Problem]:
    """A small network on digits after so many steps, and the same after one full-batch SGD step more."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16.0), torch.tensor(data.target)
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 10)]
    model = nn.Sequential(*layers).double()
    trainer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        trainer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        trainer.step()
    model.zero_grad()
    stepped = copy.deepcopy(model)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=lr)
    nn.functional.cross_entropy(stepped(x), y).backward()
    optimizer.step()
    return tuple(th.Problem(m, nn.CrossEntropyLoss(), (x, y)) for m in (model, stepped))


@pytest.mark.parametrize(("k", "limit"), [(1, 8), (2, 8), (3, 8), (10, None)])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("steps", [0, 60])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_warm_start_after_one_step_saves_products(k, limit, seed, activation, steps):
    before, after = digits_problems(seed, activation, steps)
    start = th.top_eigenpairs(th.hessian(before), k)
    cold = th.top_eigenpairs(th.hessian(after), k)
    warm = th.top_eigenpairs(th.hessian(after), k, start=start)
    assert warm.outcome in (Outcome.TRUSTED, Outcome.CONVERGED)
    assert warm.converged == (warm.miss_probability <= RISK)
    assert float(warm.residuals.max()) <= warm.tol * warm.scale
    assert warm.matvecs <= (limit or 0.7 * cold.matvecs)
    assert float((warm.values - cold.values).abs().max()) <= 2e-3 * cold.scale


def risen(value: float, top: list[float], seed: int, verify: str) -> tuple[th.linalg.Eigenpairs, bool]:
    """Warm pairs where a value of the bulk rose to `value` since the verified start, and whether they lack it."""
    bulk = 2 * torch.rand(2000, generator=torch.Generator().manual_seed(seed)).double() - 1
    values, k = torch.cat([torch.tensor(top).double(), bulk]), len(top)
    start = th.top_eigenpairs(DiagonalOperator(values), k, seed=seed)
    values[k + seed] = value
    pairs = th.top_eigenpairs(DiagonalOperator(values), k, start=start, verify=verify, seed=seed + 1000)
    truth = values.sort(descending=True).values[:k]
    return pairs, float((pairs.values - truth).abs().max()) > 1e-2 * value


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("top", [[5.0], [5.0, 4.0, 3.0], [2.0, 1.9, 1.8, 1.7, 1.6]])
@pytest.mark.parametrize("above", [1.05, 1.2, 1.5, 3.0, 10.0])
def test_a_value_that_rose_from_the_bulk_is_never_missed_by_pairs_that_converged(top, above, runs):
    for seed in range(runs):
        pairs, lacks = risen(above * top[-1], top, seed, "auto")
        assert not (lacks and pairs.converged)
        assert pairs.converged == (pairs.miss_probability <= RISK)
        certified, lacks = risen(above * top[-1], top, seed, "full")
        assert certified.converged
        assert not lacks


def test_a_trusted_start_says_so_and_the_solve_after_it_certifies():
    """Trust is not inherited: a value that a short look has missed is found from there."""
    seed = next(seed for seed in range(40) if risen(3.15, [5.0, 4.0, 3.0], seed, "auto")[1])
    pairs, _ = risen(3.15, [5.0, 4.0, 3.0], seed, "auto")
    assert not pairs.converged
    assert not pairs.outcome.good
    assert "not converged (residuals are below tol, but the start was trusted" in pairs.sentence()
    values = torch.cat([torch.tensor([5.0, 4.0, 3.15, 3.0]), torch.linspace(-1, 1, 1999)]).double()
    again = th.top_eigenpairs(DiagonalOperator(values), 3, start=pairs)
    assert again.converged
    assert again.values.tolist() == pytest.approx([5.0, 4.0, 3.15], abs=5e-3)


def test_a_start_at_the_wrong_eigenvectors_is_not_believed():
    """Exact eigenvectors of smaller eigenvalues have residual zero; the search must still find the top."""
    values = torch.cat([torch.tensor([10.0, 9.0, 8.0, 4.0, 3.5, 3.0]), torch.linspace(-0.5, 0.5, 294)]).double()
    matrix = random_symmetric(values)
    vectors = torch.linalg.eigh(matrix).eigenvectors.flip(1)
    for k in (1, 3):
        pairs = th.top_eigenpairs(matrix, k, start=vectors[:, 3 : 3 + k])
        check(matrix, values, pairs, k, "largest")
        check(matrix, values, th.top_eigenpairs(matrix, k, start=vectors[:, 3 : 3 + k], verify="full"), k, "largest")


@pytest.mark.parametrize("start", ["one random", "three random", "one noisy eigenvector"])
def test_a_start_that_is_no_warm_one_is_verified_in_full(start):
    """Copies of the top value must be found whatever the start was: a hint is not an answer."""
    values = torch.cat([torch.tensor([3.0, 3.0, 3.0, 2.5, 2.4]), torch.linspace(0, 1, 295)]).double()
    matrix = random_symmetric(values)
    draw = torch.randn(300, 3, generator=torch.Generator().manual_seed(4)).double()
    noisy = torch.linalg.eigh(matrix).eigenvectors[:, -1:] + 1e-3 * draw[:, :1]
    columns = {"one random": draw[:, :1], "three random": draw, "one noisy eigenvector": noisy}[start]
    for seed in range(5):
        pairs = th.top_eigenpairs(matrix, 3, start=columns, seed=seed)
        assert pairs.converged
        assert pairs.miss_probability <= RISK
        check(matrix, values, pairs, 3, "largest")


@pytest.mark.parametrize(
    ("top", "k", "given", "edge"),
    [
        ([5.0, 5.0, 4.0, 3.0], 3, [0, 2, 3], 2.0),
        ([5.0, 4.0, 4.0, 3.9], 3, [0, 1, 3], 3.5),
        ([5.0, 5.0, 5.0, 5.0, 5.0, 4.0, 3.9], 5, [0, 1, 2, 3, 5], 3.5),
    ],
)
def test_columns_that_lack_a_copy_are_not_believed(top, k, given, edge):
    """Another solver may have missed a copy; its vectors are exact and still not the answer."""
    values = torch.cat([torch.tensor(top), torch.linspace(0, edge, 400)]).double()
    for seed in range(5):
        matrix = random_symmetric(values, seed=seed)
        vectors = torch.linalg.eigh(matrix).eigenvectors.flip(1)[:, given]
        check(matrix, values, th.top_eigenpairs(matrix, k, start=vectors, seed=seed), k, "largest")


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_a_start_from_the_wrong_part_of_the_spectrum_is_verified_in_full(which):
    values = torch.cat([torch.tensor([5.0, 5.0, 5.0, 4.0, 3.5, -6.0, -6.0]), torch.linspace(-1, 1, 300)]).double()
    matrix = random_symmetric(values)
    inner = torch.linalg.eigh(matrix).eigenvectors[:, 100:106]
    other = th.top_eigenpairs(matrix, 4, which="smallest" if which == "largest" else "largest")
    rough = th.top_eigenpairs(matrix, 4, which=which, tol=0.3)
    for start in (inner, other, rough, dataclasses.replace(rough, tol=1e-3, vectors=inner)):
        check(matrix, values, th.top_eigenpairs(matrix, 4, which=which, start=start), 4, which)


def test_neighbours_point_where_residuals_do_not():
    """A wanted vector mixed with one of a close value: its neighbour mends it in a step, its residual does not."""
    values = torch.cat([torch.tensor([10.0, 9.8]), torch.linspace(-4, 4, 298)]).double()
    matrix = random_symmetric(values)
    vectors = torch.linalg.eigh(matrix).eigenvectors.flip(1)
    noise = 1e-2 * torch.randn(300, 1, generator=torch.Generator().manual_seed(0)).double()
    mixed = vectors[:, :1] + 0.3 * vectors[:, 1:2] + noise
    known = th.top_eigenpairs(matrix, 1)
    from_result = th.top_eigenpairs(matrix, 1, start=dataclasses.replace(known, vectors=mixed))
    from_columns = th.top_eigenpairs(matrix, 1, start=mixed)
    assert known.nearby_values[0] == pytest.approx(9.8, abs=0.05)
    assert from_result.matvecs < from_columns.matvecs
    assert float(from_result.values[0]) == pytest.approx(10.0, abs=1e-4)


def test_equal_calls_cost_the_same_whether_an_earlier_result_lives_or_not():
    """Bare columns are verified, wherever they come from; only an `Eigenpairs` says that it was."""
    before, after = digits_problems(0, nn.ReLU)
    op = th.hessian(after)
    pairs = th.top_eigenpairs(th.hessian(before), 3)
    warm = th.top_eigenpairs(op, 3, start=pairs).matvecs
    columns = pairs.vectors.clone()
    while_it_lives = th.top_eigenpairs(op, 3, start=columns)
    del pairs
    gc.collect()
    afterwards = th.top_eigenpairs(op, 3, start=columns)
    assert while_it_lives.matvecs == afterwards.matvecs > warm
    assert while_it_lives.miss_probability == afterwards.miss_probability <= RISK
    assert torch.equal(while_it_lives.values, afterwards.values)


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_the_most_extreme_pairs_are_a_verified_start_of_a_smaller_solve(which):
    values = torch.cat([torch.tensor([9.0, 8.0, 7.0, -8.5, -7.5, -7.2]), torch.linspace(-1, 1, 200)]).double()
    matrix = random_symmetric(values)
    start = th.top_eigenpairs(matrix, 3, which=which).most_extreme(1)
    pairs = th.top_eigenpairs(matrix, 1, which=which, start=start)
    assert pairs.outcome in (Outcome.TRUSTED, Outcome.CONVERGED)
    assert float(pairs.values[0]) == pytest.approx(float(expected(values, 1, which)[0]), rel=1e-3)
    assert pairs.matvecs < th.top_eigenpairs(matrix, 1, which=which, start=start.vectors).matvecs


def test_warm_starts_follow_a_training_run():
    """Step after step, each solve started from the last, still right at the end; never two trusted ones in a row."""
    matrices = [random_symmetric(torch.cat([torch.tensor([9.0, 8.5, 8.0, 7.7]), torch.linspace(-1, 1, 196)]).double())]
    drift = random_symmetric(torch.randn(200, generator=torch.Generator().manual_seed(1)).double(), seed=5)
    matrices += [matrices[0] + 0.05 * step * drift for step in range(1, 20)]
    pairs = th.top_eigenpairs(matrices[0], 2)
    for matrix in matrices[1:]:
        before, pairs = pairs, th.top_eigenpairs(matrix, 2, start=pairs)
        assert pairs.converged or before.converged
        assert pairs.outcome in (Outcome.TRUSTED, Outcome.CONVERGED)
        truth = torch.linalg.eigvalsh(matrix).flip(0)[:2]
        assert float((pairs.values - truth).abs().max()) <= 1e-3 * pairs.scale


def test_the_cost_counts_the_matrix_and_the_basis():
    matrix = random_symmetric(torch.linspace(0, 1, 200).double())
    pairs = th.top_eigenpairs(matrix, 2)
    assert pairs.cost.peak_bytes >= 8 * (200 * 200 + 2 * 200 * pairs.matvecs)


def test_full_verification_bounds_the_miss_probability():
    matrix = random_symmetric(torch.cat([torch.tensor([5.0, 5.0]), torch.rand(98)]).double())
    cold = th.top_eigenpairs(matrix, 2)
    assert cold.miss_probability <= RISK
    warm = th.top_eigenpairs(matrix, 2, start=cold, verify="full")
    assert warm.miss_probability <= RISK


def test_the_miss_probability_is_a_bound():
    """With an eigenvalue present, its absence is certified at level p in at most a share p of all chains."""
    n, top = 200, 1.5
    values = torch.cat([torch.tensor([top]), torch.linspace(-1, 1, n - 1)]).double()
    probabilities = []
    for seed in range(600):
        q = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        q /= q.norm()
        chain, basis = Chain(n), []
        for _ in range(7):
            basis.append(q)
            w = values * q
            alpha = float(w @ q)
            for b in basis:
                w = w - (w @ b) * b
            chain.extend(alpha, float(w.norm()))
            q = w / w.norm()
        probabilities.append(chain.miss_probability(top))
    p = torch.tensor(probabilities)
    for level in (0.02, 0.1, 0.3):
        assert float((p <= level).double().mean()) <= level + 3 * (level / 600) ** 0.5
    assert float((p <= 0.3).double().mean()) > 0.02  # and it is not vacuous


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be a positive integer"),
        ({"k": 9}, "k must be at most"),
        ({"which": "LM"}, "which must be one of"),
        ({"tol": 0.0}, "tol must be a number above 0"),
        ({"max_matvecs": 0}, "max_matvecs"),
        ({"verify": "no"}, "verify must be"),
        ({"start": torch.zeros(3, 1)}, "start must have 5 rows"),
        ({"start": torch.full((5, 1), float("nan"))}, "start holds NaN"),
        ({"start": "random"}, "start must be a tensor"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        th.top_eigenpairs(torch.eye(5).double(), **{"k": 2, **arguments})


def test_a_matrix_that_is_not_symmetric_is_refused():
    with pytest.raises(ValueError, match="symmetric"):
        th.top_eigenpairs(torch.triu(torch.ones(4, 4)).double(), 1)
