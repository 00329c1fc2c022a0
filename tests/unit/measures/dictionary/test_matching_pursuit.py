"""Matching pursuit against scikit-learn, a plain loop, exhaustive search, and in the cases where pursuits go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import orthogonal_mp_gram
from torch import Tensor

import theodolite as th
from theodolite.measures.dictionary import exhaustive_codes, pursue


def random_problem(n: int, p: int, d: int, seed: int = 0, *, unit: bool = True) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    D = torch.randn(p, d, dtype=torch.float64, generator=g)
    D = D / D.norm(dim=1, keepdim=True) if unit else D * (0.2 + torch.rand(p, 1, dtype=torch.float64, generator=g))
    return torch.randn(n, d, dtype=torch.float64, generator=g), D


def one_by_one(y: Tensor, D: Tensor, k: int, *, normalized: bool = False) -> tuple[Tensor, bool]:
    """The textbook loop for one signal, and whether every choice was clear (no tie, something left to explain)."""
    chosen: list[int] = []
    left, clear = y, True
    for _ in range(k):
        score = (D @ left).abs() / (D.norm(dim=1) if normalized else 1.0)
        score[chosen] = -1
        first, second = score.topk(2).values if len(D) > 1 else (score[0], -score[0])
        clear &= bool(first > 1e-8 * y.norm()) and bool(second < first * (1 - 1e-8))
        chosen.append(int(score.argmax()))
        x = torch.linalg.lstsq(D[chosen].T, y).solution
        left = y - x @ D[chosen]
    return torch.zeros(len(D), dtype=y.dtype).index_put((torch.tensor(chosen),), x), clear


@pytest.mark.parametrize(
    ("n", "p", "d", "k"), [(200, 60, 30, 5), (200, 400, 50, 4), (7, 30, 20, 20), (300, 12, 40, 12), (50, 300, 16, 1)]
)
def test_check_03_equals_scikit_learn(n: int, p: int, d: int, k: int) -> None:
    Y, D = random_problem(n, p, d)
    ours = th.orthogonal_matching_pursuit(Y, D, k)
    theirs = orthogonal_mp_gram((D @ D.T).numpy(), (D @ Y.T).numpy(), n_nonzero_coefs=k).T.reshape(n, p)
    assert ours.shape == (n, p)
    assert (ours - torch.from_numpy(theirs)).abs().max() < 1e-10


@given(seed=st.integers(0, 10**6), p=st.integers(2, 25), d=st.integers(2, 15), normalized=st.booleans(), masked=st.booleans())
@settings(max_examples=60, deadline=None)
def test_check_03_batched_equals_the_loop(seed: int, p: int, d: int, normalized: bool, masked: bool) -> None:
    Y, D = random_problem(6, p, d, seed, unit=False)
    g = torch.Generator().manual_seed(seed + 1)
    seen = torch.rand(6, d, generator=g) < 0.8 if masked else torch.ones(6, d, dtype=torch.bool)
    k = min(p, 3, int(seen.sum(1).min()))
    if k < 1:
        return
    selection = "normalized" if normalized else "raw"
    codes = th.orthogonal_matching_pursuit(Y, D, k, visible=seen if masked else None, selection=selection)
    for y, row, code in zip(Y, seen, codes, strict=True):
        wanted, clear = one_by_one(y[row], D[:, row], k, normalized=normalized)
        residual = y[row] - code @ D[:, row]
        scale = float(wanted.abs().max())
        assert not clear or (code - wanted).abs().max() < 1e-8 * max(scale, 1)
        assert (D[code != 0][:, row] @ residual).abs().max() < 1e-8 * max(scale, 1)


def test_check_03_residual_is_orthogonal_and_shrinks_and_the_support_has_k_atoms() -> None:
    Y, D = random_problem(100, 80, 40)
    lengths = []
    for k in range(1, 8):
        code = th.orthogonal_matching_pursuit(Y, D, k)
        residual = Y - code @ D
        assert ((code != 0).sum(1) == k).all()
        assert ((residual @ D.T)[code != 0]).abs().max() < 1e-10
        lengths.append(residual.norm(dim=1))
    assert (torch.stack(lengths).diff(dim=0) <= 0).all()


def test_check_03_orthonormal_atoms_are_recovered_exactly() -> None:
    basis = torch.linalg.qr(random_problem(30, 30, 30)[0])[0]
    code = torch.zeros(5, 30, dtype=torch.float64)
    code[:, [3, 8, 21]] = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert torch.allclose(th.orthogonal_matching_pursuit(code @ basis, basis, 3), code, atol=1e-12)


def test_check_04_both_selections_agree_on_unit_atoms() -> None:
    Y, D = random_problem(100, 70, 30)
    raw, normalized = (th.orthogonal_matching_pursuit(Y, D, 4, selection=s) for s in ("raw", "normalized"))
    assert torch.equal(raw != 0, normalized != 0)
    assert torch.allclose(raw, normalized, atol=1e-12)


def test_equals_exhaustive_search_where_pursuit_is_provably_exact() -> None:
    """Coherence below 1/(2k − 1) and no noise: pursuit finds the only k-sparse code there is."""
    g = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, generator=g))[0]
    D = basis[:12] + 0.03 * torch.randn(12, 16, dtype=torch.float64, generator=g)
    D = D / D.norm(dim=1, keepdim=True)
    assert th.dictionary.coherence(D) < 1 / 3
    code = torch.zeros(40, 12, dtype=torch.float64)
    for row in code:
        row[torch.randperm(12, generator=g)[:2]] = torch.randn(2, dtype=torch.float64, generator=g)
    found = th.orthogonal_matching_pursuit(code @ D, D, 2)
    assert torch.allclose(found, exhaustive_codes(code @ D, D, 2), atol=1e-10)
    assert torch.allclose(found, code, atol=1e-10)


def test_one_atom_always_equals_exhaustive_search() -> None:
    Y, D = random_problem(50, 40, 10)
    assert torch.allclose(th.orthogonal_matching_pursuit(Y, D, 1), exhaustive_codes(Y, D, 1), atol=1e-12)


def test_shared_and_single_masks_agree_and_hidden_values_do_not_matter() -> None:
    Y, D = random_problem(20, 30, 15)
    seen = torch.arange(15) % 4 != 0
    shared = th.orthogonal_matching_pursuit(Y, D, 3, visible=seen)
    assert torch.allclose(shared, th.orthogonal_matching_pursuit(Y, D, 3, visible=seen.expand(20, 15)), atol=1e-12)
    assert torch.allclose(shared, th.orthogonal_matching_pursuit(Y[:, seen], D[:, seen], 3), atol=1e-12)
    spoilt = torch.where(seen, Y, torch.nan)
    assert torch.allclose(shared, th.orthogonal_matching_pursuit(spoilt, D, 3, visible=seen.expand(20, 15)), atol=1e-12)


def test_many_signals_are_cut_into_parts_without_a_trace() -> None:
    Y, D = random_problem(1500, 600, 12)
    whole = th.orthogonal_matching_pursuit(Y, D, 3)
    assert torch.allclose(whole[700:720], th.orthogonal_matching_pursuit(Y[700:720], D, 3), atol=1e-10)


def test_several_dictionaries_at_once() -> None:
    from theodolite.measures.dictionary.matching_pursuit import pursue_runs

    problems = [random_problem(20, 25, 10, seed) for seed in range(3)]
    together = pursue_runs(torch.stack([y for y, _ in problems]), torch.stack([d for _, d in problems]), 4)
    for run, (y, d) in enumerate(problems):
        assert torch.equal(together.support[run], pursue(y, d, 4).support)
        assert torch.allclose(together.values[run], pursue(y, d, 4).values, atol=1e-12)


class TestDegenerate:
    def test_zero_signals_have_zero_codes(self) -> None:
        Y, D = random_problem(4, 9, 6)
        Y[2] = 0
        assert not th.orthogonal_matching_pursuit(Y, D, 3)[2].any()
        assert (pursue(Y, D, 3).support[2] == -1).all()

    def test_twin_atoms_go_to_the_first_and_are_not_both_taken(self) -> None:
        Y, D = random_problem(40, 10, 8)
        twins = torch.cat([D, D, -D])
        codes = th.orthogonal_matching_pursuit(Y, twins, 4)
        assert torch.allclose(codes[:, :10], th.orthogonal_matching_pursuit(Y, D, 4), atol=1e-10)
        assert not codes[:, 10:].any()

    def test_exact_ties_take_the_lowest_number(self) -> None:
        codes = th.orthogonal_matching_pursuit(torch.ones(1, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64), 2)
        assert codes.tolist() == [[1.0, 1.0, 0.0, 0.0]]

    def test_zero_atoms_are_never_taken(self) -> None:
        Y, D = random_problem(10, 6, 8)
        D[1] = 0
        for selection in ("raw", "normalized"):
            assert not th.orthogonal_matching_pursuit(Y, D, 6, selection=selection)[:, 1].any()

    def test_stops_when_the_signal_is_explained(self) -> None:
        _, D = random_problem(1, 20, 15)
        found = pursue(2 * D[[4, 7]], D, 5)
        assert (found.support >= 0).sum(1).tolist() == [1, 1]
        assert torch.allclose(found.reconstruct(D), 2 * D[[4, 7]])

    def test_atoms_that_span_too_little(self) -> None:
        """Six atoms in a plane of eight dimensions: two explain all that can be."""
        g = torch.Generator().manual_seed(0)
        plane = torch.randn(2, 8, dtype=torch.float64, generator=g)
        D = torch.randn(6, 2, dtype=torch.float64, generator=g) @ plane
        Y = torch.randn(5, 8, dtype=torch.float64, generator=g)
        codes = th.orthogonal_matching_pursuit(Y, D, 5)
        assert ((codes != 0).sum(1) == 2).all()
        best = Y @ torch.linalg.pinv(plane) @ plane
        assert torch.allclose(codes @ D, best, atol=1e-10)

    def test_nearly_parallel_atoms_are_fitted_to_the_last_digits(self) -> None:
        g = torch.Generator().manual_seed(1)
        D = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=g))[0][:6]
        D = torch.cat([D, D[:1] + 1e-5 * D[1:2]])
        Y = 3 * D[6:] + D[:1] + D[2:3]
        residual = Y - th.orthogonal_matching_pursuit(Y, D, 4) @ D
        assert residual.norm() < 1e-9

    def test_tolerance_stops_signal_by_signal(self) -> None:
        Y, D = random_problem(200, 60, 20)
        codes = th.orthogonal_matching_pursuit(Y, D, 20, tolerance=4.0)
        left = (Y - codes @ D).square().sum(1)
        assert (left <= 4.0).all()
        counts = (codes != 0).sum(1)
        assert len(counts.unique()) > 2
        for count in counts.unique().tolist():
            if count > 1:
                earlier = th.orthogonal_matching_pursuit(Y, D, count - 1)
                assert ((Y - earlier @ D).square().sum(1)[counts == count] > 4.0).all()

    def test_signals_without_a_visible_coordinate(self) -> None:
        Y, D = random_problem(3, 9, 6)
        seen = torch.ones(3, 6, dtype=torch.bool)
        seen[1] = False
        codes = th.orthogonal_matching_pursuit(Y, D, 2, visible=seen)
        assert not codes[1].any()
        assert codes[0].any()


def test_single_precision_and_arrays_and_single_signals() -> None:
    Y, D = random_problem(30, 20, 10)
    double = th.orthogonal_matching_pursuit(Y, D, 3)
    single = th.orthogonal_matching_pursuit(Y.float(), D.float(), 3)
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), double, atol=1e-4)
    array = th.orthogonal_matching_pursuit(Y.numpy(), D.numpy(), 3)
    assert isinstance(array, np.ndarray)
    assert np.allclose(array, double.numpy(), atol=1e-12)
    assert torch.allclose(th.orthogonal_matching_pursuit(Y[0], D, 3), double[0], atol=1e-12)
    assert th.orthogonal_matching_pursuit(Y[:0], D, 3).shape == (0, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must be a whole number"),
        ({"k": 2.5}, "k must be a whole number"),
        ({"k": 21}, "at most the number of atoms, 20"),
        ({"k": 15}, "coordinates, 10"),
        ({"visible": torch.arange(10) < 4, "k": 5}, "coordinates, 4"),
        ({"visible": torch.ones(10)}, "visible must be booleans"),
        ({"visible": torch.ones(9, dtype=torch.bool)}, "visible must be booleans"),
        ({"selection": "cosine"}, "'raw' or 'normalized'"),
        ({"tolerance": -1.0}, "tolerance must be at least 0"),
        ({"dictionary": torch.zeros(10, 20)}, "transposing"),
        ({"dictionary": torch.full((20, 10), torch.nan)}, "dictionary has NaN"),
        ({"signals": torch.full((3, 10), torch.nan)}, "visible=~isnan"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    Y, D = random_problem(3, 20, 10)
    arguments: dict[str, object] = {"signals": Y, "dictionary": D, "k": 3, **change}
    with pytest.raises(ValueError, match=message):
        th.orthogonal_matching_pursuit(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("selection", ["raw", "normalized"])
def test_codes_scale_with_signals_and_atoms(dtype: torch.dtype, selection: str) -> None:
    Y, D = (part.to(dtype) for part in random_problem(20, 30, 12))
    codes = th.orthogonal_matching_pursuit(Y, D, 4, selection=selection)
    far = 300 if dtype == torch.float64 else 35
    for power in (-far, -far // 2, -3, 3, far // 2, far):
        factor = 2.0 ** round(power * 3.32)
        assert torch.allclose(th.orthogonal_matching_pursuit(Y * factor, D, 4, selection=selection) / factor, codes, atol=1e-5)
        shrunk = th.orthogonal_matching_pursuit(Y, D / factor, 4, selection=selection)
        assert torch.allclose(shrunk / factor, codes, atol=1e-5)


def test_tolerance_is_in_the_units_of_the_signals() -> None:
    Y, D = random_problem(50, 60, 20)
    codes = th.orthogonal_matching_pursuit(Y, D, 20, tolerance=4.0)
    assert torch.allclose(th.orthogonal_matching_pursuit(1e-100 * Y, D, 20, tolerance=4e-200) * 1e100, codes)


def test_a_spanned_atom_is_passed_over_and_the_next_is_taken() -> None:
    a, b, c = torch.linalg.qr(random_problem(3, 3, 8)[1].T)[0].T
    D = torch.stack([1e9 * a, 1e9 * (a + 1e-8 * b), c])
    codes = th.orthogonal_matching_pursuit(a + b + 3 * c, D, 3)
    assert codes[2].item() == pytest.approx(3)


def test_residuals_stay_orthogonal_to_three_atoms_that_nearly_coincide() -> None:
    g = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64, generator=g))[0]
    D = torch.stack([basis[0], basis[0] + 1e-5 * basis[1], basis[0] + 1e-5 * basis[2], basis[5]])
    Y = basis[:1] + basis[1:2] + 2 * basis[2:3]
    code = th.orthogonal_matching_pursuit(Y, D, 3)
    assert int((code != 0).sum()) == 3
    assert ((Y - code @ D) @ D.T).abs().max() < 1e-10


@pytest.mark.parametrize("form", ["list", "frame", "reversed", "big-endian", "integers", "fortran", "readonly", "grad"])
def test_every_form_of_numbers_is_read_exactly(form: str) -> None:
    import pandas

    Y, D = (part.numpy() for part in random_problem(6, 9, 5))
    wanted = th.orthogonal_matching_pursuit(Y, D, 2)
    if form == "integers":
        Y = np.rint(10 * Y)
        wanted = th.orthogonal_matching_pursuit(Y, D, 2)
    if form == "readonly":
        Y.flags.writeable = False
    forms = {
        "list": lambda x: x.tolist(),
        "frame": pandas.DataFrame,
        "reversed": lambda x: x[::-1].copy()[::-1],
        "big-endian": lambda x: x.astype(">f8"),
        "integers": lambda x: x.astype(int),
        "fortran": np.asfortranarray,
        "readonly": lambda x: x,
        "grad": lambda x: torch.from_numpy(x).requires_grad_(),
    }
    found = th.orthogonal_matching_pursuit(forms[form](Y), D, 2)
    assert np.array_equal(np.asarray(found), wanted)
