"""Spikes, the split of the loss along the kernel, the match table, and critical rates of batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import theodolite as th
from theodolite.measures.dynamics import (
    Proportion,
    batch_critical_rates,
    catapult_count,
    match_table,
    spike_events,
    split_loss,
    split_loss_by_curvature,
)
from theodolite.models.ntk import ntk_cnn, ntk_fcn
from theodolite.monitors.rates.critical_rate import EdgeProbe
from theodolite.operators import as_operator


def network(outputs: int) -> nn.Module:
    return ntk_fcn(5, 8, 2, outputs, seed=1).double()


def problem_of(outputs: int, n: int = 12) -> th.Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return th.Problem(network(outputs), nn.MSELoss(), (x, y))


def residual_of(problem: th.Problem) -> torch.Tensor:
    [batch] = list(problem.data)
    with torch.no_grad():
        return problem.model(*batch.args) - batch.target


# The split


@pytest.mark.parametrize("outputs", [1, 3])
def test_check_01_the_loss_is_the_sum_of_its_parts(outputs):
    problem = problem_of(outputs)
    kernel, residual = th.tangent_kernel(problem), residual_of(problem)
    split = split_loss(kernel, residual, ranks=(1, 2, 3), outputs=outputs)
    vectors = torch.linalg.eigh(kernel)[1].flip(-1)
    for s in (1, 2, 3):
        projector = vectors[:, : s * outputs] @ vectors[:, : s * outputs].T
        assert (projector @ projector - projector).abs().max() < 1e-10
        assert split.top[s] == pytest.approx(float((projector @ residual.reshape(-1)).square().mean()), abs=1e-12)
        assert abs(split.total - split.top[s] - split.rest[s]) < 1e-10
    assert split.total == pytest.approx(problem.loss(), abs=1e-12)


def test_the_split_of_an_operator_is_that_of_its_matrix():
    problem = problem_of(2)
    kernel, residual = th.tangent_kernel(problem), residual_of(problem)
    dense, by_products = (split_loss(k, residual, ranks=(1, 2), outputs=2) for k in (kernel, as_operator(kernel)))
    for s in (1, 2):
        assert by_products.top[s] == pytest.approx(dense.top[s], abs=1e-6)
        assert by_products.rest[s] == pytest.approx(dense.rest[s], abs=1e-6)


@pytest.mark.parametrize("outputs", [1, 3])
def test_for_squared_losses_curvature_gives_the_split_of_the_kernel(outputs):
    problem = problem_of(outputs)
    by_kernel = split_loss(th.tangent_kernel(problem), residual_of(problem), ranks=(1, 2), outputs=outputs)
    pairs = th.top_eigenpairs(th.gauss_newton(problem), 2 * outputs, tol=1e-11)
    loss, gradient = problem.loss_and_gradient()
    found = split_loss_by_curvature(pairs.values, pairs.vectors, gradient, loss, ranks=(1, 2), outputs=outputs)
    for s in (1, 2):
        assert found.top[s] == pytest.approx(by_kernel.top[s], rel=1e-9)
        assert found.rest[s] == pytest.approx(by_kernel.rest[s], rel=1e-9)


def test_for_cross_entropy_the_split_is_the_fall_of_the_quadratic_model():
    torch.manual_seed(0)
    x, y = torch.randn(9, 5).double(), torch.arange(9) % 3
    problem = th.Problem(network(3), nn.CrossEntropyLoss(), (x, y))
    matrix = th.gauss_newton(problem) @ torch.eye(problem.size, dtype=torch.float64)
    values, vectors = (t.flip(-1) for t in torch.linalg.eigh(matrix))
    loss, gradient = problem.loss_and_gradient()
    found = split_loss_by_curvature(values[:2], vectors[:, :2], gradient, loss)
    basis = vectors[:, :2]
    step = -basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ gradient)  # Newton within the eigenspace
    fall = -float(gradient @ step + 0.5 * step @ matrix @ step)
    assert found.top[2] == pytest.approx(fall, rel=1e-9)
    assert found.rest[2] == pytest.approx(loss - fall, rel=1e-9)


def test_a_flat_direction_holds_nothing():
    found = split_loss_by_curvature(torch.tensor([2.0, 0.0]), torch.eye(2), torch.tensor([2.0, 0.0]), 1.5)
    assert found.top == {1: 1.0, 2: 1.0}


@pytest.mark.parametrize("ranks", [(), (0,), (13,)])
def test_ranks_beyond_the_kernel_are_refused(ranks):
    problem = problem_of(1)
    with pytest.raises(ValueError, match="ranks"):
        split_loss(th.tangent_kernel(problem), residual_of(problem), ranks=ranks)


def test_a_kernel_of_other_samples_is_refused():
    with pytest.raises(ValueError, match="3 × 3"):
        split_loss(torch.eye(4), torch.zeros(3))
    with pytest.raises(ValueError, match="to fit the gradient"):
        split_loss_by_curvature(torch.ones(2), torch.eye(3), torch.ones(3), 1.0)


# Spikes


def test_a_spike_is_found_with_its_kernel():
    losses = [1.0, 0.9, 0.8, 3.0, 9.0, 2.0, 0.85, 0.7, 0.6]
    kernel = [5.0, None, 5.1, 5.0, 4.0, 3.0, None, 2.5, 2.5]
    [event] = spike_events(losses, kernel=kernel)
    assert (event.start, event.peak, event.end) == (3, 4, 7)  # 0.85 is still above 1.05 × 0.8
    assert event.before == 0.8
    assert event.height == pytest.approx(9.0 / 0.8)
    assert (event.kernel_before, event.kernel_after, event.kernel_fell) == (5.1, 2.5, True)


def test_a_rise_that_stays_has_no_end_and_a_second_rise_is_another_spike():
    losses = [1.0] * 5 + [2.0] * 30 + [8.0] + [2.0] * 5
    first, second = spike_events(losses, window=20)
    assert (first.start, first.end, first.kernel_fell) == (5, None, None)
    assert (second.start, second.peak, second.end, second.before) == (35, 35, 36, 2.0)


def test_a_loss_that_is_no_number_ends_a_run_as_a_spike():
    [event] = spike_events([1.0, 2.0, math.nan])
    assert (event.peak, event.end, event.height) == (2, None, math.inf)


def test_noise_at_convergence_is_no_spike():
    losses = [1.0, 1e-9, 3e-9, 1e-9]
    assert spike_events(losses) == ()
    assert len(spike_events(losses, slack=0.0)) == 1
    assert spike_events([]) == spike_events([0.0, 0.0]) == ()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60))
def test_spikes_are_ordered_apart_and_higher_than_what_they_left(losses):
    events = spike_events(losses, slack=0.0)
    for event in events:
        assert event.start <= event.peak < (len(losses) if event.end is None else event.end)
        assert losses[event.peak] > 1.2 * event.before
        if event.end is not None:
            assert losses[event.end] <= 1.05 * event.before
    starts = [event.start for event in events]
    assert starts == sorted(set(starts))
    assert not any(a.end is not None and b.start < a.end for a, b in itertools.pairwise(events))


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40))
def test_a_falling_loss_has_no_spike(losses):
    assert spike_events(sorted(losses, reverse=True)) == ()


@pytest.mark.parametrize("wrong", [{"rise": 1.0}, {"recovered": 1.5}, {"window": 0}, {"kernel": [1.0]}])
def test_wrong_settings_of_spikes_are_refused(wrong):
    with pytest.raises(ValueError, match="Got"):
        spike_events([1.0, 2.0], **wrong)


# The match table


def test_the_table_counts_each_case_and_leaves_out_what_was_not_sampled():
    exceeded = [True, True, False, False, None, True]
    losses = [1.0, 2.0, 1.0, 3.0, 2.0, 1.0, None]
    table = match_table(exceeded, losses)
    assert (table.both, table.only_exceeded, table.only_up, table.neither, table.unsampled) == (1, 1, 1, 1, 2)
    assert table.match_rate == Proportion(1, 2)
    assert table.base_rate == Proportion(2, 4)
    assert (table.up_given_exceeded, table.up_given_not) == (Proportion(1, 2), Proportion(1, 2))
    assert "50.0" in table.sentence()
    assert [row["steps"] for row in table.rows()] == [2, 4, 2, 2]


def test_a_small_rise_may_be_left_out_and_nan_is_a_rise():
    assert match_table([True], [1.0, 1.0 + 1e-9]).both == 1
    assert match_table([True], [1.0, 1.0 + 1e-9], slack=1e-6).both == 0
    assert match_table([False], [1.0, math.nan]).only_up == 1
    assert "never rose" in match_table([True], up=[False]).sentence()


def test_the_error_is_the_wilson_half_width():
    z, hits, count = 1.0, 3, 10
    share = hits / count
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    assert Proportion(hits, count).error == pytest.approx(half)
    assert Proportion(0, 10).error > 0
    assert math.isnan(Proportion(0, 0).value)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_the_shares_follow_from_each_other(cases):
    table = match_table([e for e, _ in cases], up=[u for _, u in cases])
    assert table.steps == len(cases)
    hits = table.match_rate.hits
    assert hits == table.up_given_exceeded.hits
    assert table.match_rate.count == hits + table.up_given_not.hits


@pytest.mark.parametrize("wrong", [{}, {"losses": [1.0], "up": [True]}, {"losses": [1.0]}, {"up": [True, False]}])
def test_wrong_tables_are_refused(wrong):
    with pytest.raises(ValueError, match=r"Give losses|losses must|up must"):
        match_table([True], **wrong)


def test_catapults_are_counted_up_to_the_best_step():
    assert catapult_count([True, None, False, True, True]) == 3
    assert catapult_count([True, None, False, True, True], best_step=3) == 1
    assert catapult_count(torch.tensor([True, False]).tolist(), best_step=0) == 0


# Critical rates of batches


def test_batches_cut_from_one_kernel_agree_with_their_own_gauss_newton_matrices():
    problem = problem_of(2, n=10)
    kernel, products = (
        batch_critical_rates(problem, batch_size=4, batches=6, by=by, seed=3) for by in ("kernel", "gauss_newton")
    )
    assert kernel.by == "kernel"
    assert torch.allclose(kernel.rates, products.rates, rtol=2e-3)
    one = batch_critical_rates(problem, batch_size=10, batches=1)
    assert one.median == pytest.approx(th.critical_learning_rate(problem, by="gauss_newton", tol=1e-9).value, rel=1e-8)


def test_large_batches_are_measured_by_products_with_the_same_kernel(monkeypatch):
    from theodolite.measures.dynamics import critical

    problem = problem_of(1)
    dense = batch_critical_rates(problem, batch_size=8, batches=5)
    monkeypatch.setattr(critical, "DENSE_ROWS", 4)
    assert torch.allclose(batch_critical_rates(problem, batch_size=8, batches=5).rates, dense.rates, rtol=1e-5)


@pytest.mark.parametrize("uneven", [False, True])
def test_samples_of_several_batches_are_drawn_by_their_number(uneven):
    whole = problem_of(1)
    [batch] = list(whole.data)
    cuts = [slice(0, 5), slice(5, 8), slice(8, 12)] if uneven else [slice(0, 6), slice(6, 12)]
    parts = th.Problem(whole.model, nn.MSELoss(), [(batch.args[0][c], batch.target[c]) for c in cuts])
    for by in ("kernel", "gauss_newton"):
        both = [batch_critical_rates(p, batch_size=3, batches=4, by=by).rates for p in (whole, parts)]
        assert torch.allclose(both[0], both[1], rtol=1e-3)
    assert batch_critical_rates(parts).batch_size == (5 if uneven else 6)


def test_the_law_of_the_optimizer_sets_the_rates():
    problem = problem_of(1)
    parameters = list(problem.model.parameters())
    plain = batch_critical_rates(problem, batch_size=4, batches=5).rates
    momentum = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)
    assert torch.allclose(batch_critical_rates(problem, optimizer=momentum, batch_size=4, batches=5).rates, 1.5 * plain)
    decay = torch.optim.SGD(parameters, lr=1.0, weight_decay=0.3)
    assert torch.allclose(batch_critical_rates(problem, optimizer=decay, batch_size=4, batches=5).rates, 2 / (2 / plain + 0.3))
    adam = batch_critical_rates(problem, optimizer=torch.optim.Adam(parameters, lr=1.0), batch_size=4, batches=5)
    assert adam.by == "gauss_newton"
    with pytest.raises(ValueError, match="no Adam"):
        batch_critical_rates(problem, optimizer=torch.optim.Adam(parameters, lr=1.0), batch_size=4, by="kernel")


def test_the_share_below_the_rate_is_that_of_the_batches():
    problem = problem_of(1)
    middle = batch_critical_rates(problem, batch_size=4).median
    found = batch_critical_rates(problem, optimizer=torch.optim.SGD(problem.model.parameters(), lr=middle), batch_size=4)
    assert found.below == pytest.approx(0.5, abs=0.01)
    assert 0.03 < found.below_error < 0.04  # √(0.25 / 200)
    assert "of the batches" in found.sentence()
    assert batch_critical_rates(problem, batch_size=4).below is None


def test_cross_entropy_goes_batch_by_batch():
    torch.manual_seed(0)
    problem = th.Problem(network(3), nn.CrossEntropyLoss(), (torch.randn(8, 5).double(), torch.arange(8) % 3))
    found = batch_critical_rates(problem, batch_size=8, batches=2)
    assert found.by == "gauss_newton"
    assert found.median == pytest.approx(th.critical_learning_rate(problem, by="gauss_newton").value, rel=1e-3)


def test_wrong_requests_for_batches_are_refused():
    problem = problem_of(1)
    with pytest.raises(ValueError, match="batch_size="):
        batch_critical_rates(problem)
    with pytest.raises(ValueError, match="from 1 to the number of samples, 12"):
        batch_critical_rates(problem, batch_size=13)
    with pytest.raises(ValueError, match="by must be"):
        batch_critical_rates(problem, batch_size=2, by="nothing")
    with pytest.raises(TypeError, match="Problem"):
        batch_critical_rates(problem.model, batch_size=2)


# Acceptance checks on initial networks


def test_check_03_the_kernel_gives_the_edge_of_a_wide_network():
    torch.manual_seed(0)
    x, y = torch.randn(64, 20).double(), torch.randn(64, 1).double()
    problem = th.Problem(ntk_fcn(20, 1024, 2, seed=0).double(), nn.MSELoss(), (x, y))
    kernel = torch.linalg.eigvalsh(th.tangent_kernel(problem))[-1]
    gauss_newton = th.top_eigenpairs(th.gauss_newton(problem), 1, tol=1e-10).values[0]
    assert float(gauss_newton) == pytest.approx(2 / 64 * float(kernel), rel=1e-8)
    by_hessian = th.critical_learning_rate(problem).value
    assert by_hessian == pytest.approx(64 / float(kernel), rel=0.1)


def test_check_04_critical_rates_of_gaussian_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 100, generator=generator)
    torch.manual_seed(0)
    shallow = th.Problem(ntk_fcn(100, 1024, 2, seed=0), nn.MSELoss(), (x, torch.zeros(2000, 1)))
    whole = th.critical_learning_rate(shallow, by="gauss_newton", tol=1e-3).value
    assert whole == pytest.approx(6.15, abs=0.3)
    rate = torch.optim.SGD(shallow.model.parameters(), lr=whole / 2)
    shares = {b: batch_critical_rates(shallow, optimizer=rate, batch_size=b).below for b in (5, 10)}
    assert 0.5 <= shares[5] <= 0.8
    assert shares[10] < 0.02  # larger batches have larger rates still
    # One initial network of width 256 differs from the next (6.2 to 9.3 over eight): the mean of four is compared, 8.2.
    deep = [th.Problem(ntk_fcn(100, 256, 4, seed=s), nn.MSELoss(), (x[:1000], torch.zeros(1000, 1))) for s in range(4)]
    rates = [th.critical_learning_rate(problem, by="gauss_newton", tol=1e-2).value for problem in deep]
    assert sum(rates) / len(rates) == pytest.approx(7.4, abs=1.0)


def test_check_02_routes_to_the_kernel_agree():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, 4).double()
    for model, tolerance in ((ntk_fcn(48, 16, 3, 2, seed=0).double(), 1e-10), (ntk_cnn((3, 4, 4), 4, 3, seed=0).double(), 1e-6)):
        jacobian = torch.stack(
            [
                torch.cat([g.reshape(-1) for g in torch.autograd.grad(output, list(model.parameters()))])
                for output in [model(sample[None])[0, k] for sample in x for k in range(model(x).shape[1])]
            ]
        )
        kernel = th.tangent_kernel(model, x)
        assert (kernel - jacobian @ jacobian.T).abs().max() < 1e-10 * kernel.abs().max()
        identity = torch.eye(len(kernel), dtype=torch.float64)
        products = th.tangent_kernel_operator(model, x) @ identity
        assert (kernel - products).abs().max() < tolerance * kernel.abs().max()


def test_check_05_a_linear_model_rises_exactly_above_the_critical_rate_of_its_batch():
    """The residual lies along u₁: one step multiplies it by 1 − 2ηλ₁/b."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(x @ x.T)
        critical = 6 / float(values[-1])
        rate = critical * float(torch.empty(1).uniform_(0.5, 1.5, generator=generator))
        residual = vectors[:, -1]
        step = rate * 2 / 6 * x.T @ residual
        after = residual - x @ step
        assert (float(after @ after) > float(residual @ residual)) == (rate > critical)


def test_check_19_several_outputs_share_one_edge():
    """With a mean over points and outputs a linear model is stable up to 3n/λ₁(K), found here by bisection."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 3, bias=False).double()
    predicted = 30 / float(torch.linalg.eigvalsh(th.tangent_kernel(model, x))[-1])

    def grows(rate: float) -> bool:
        weight = torch.zeros(3, 4, dtype=torch.float64)
        losses = []
        for _ in range(1000):
            residual = x @ weight.T - y
            losses.append(float(residual.square().mean()))
            weight = weight - rate * 2 / 30 * residual.T @ x
        return not losses[-1] <= losses[500] * (1 + 1e-9)

    low, high = 0.5 * predicted, 2.0 * predicted
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if grows(middle) else (middle, high)
    assert low == pytest.approx(predicted, rel=0.01)
    assert EdgeProbe(th.Problem(model, nn.MSELoss(), (x, y))).measure() == pytest.approx(predicted, rel=1e-9)
