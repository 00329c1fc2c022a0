"""Spectral density and trace at equal numbers of products, on a network small enough for dense truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor

import peers
import theodolite as th
import truth
from harness import Row, Settings, one_shot, try_row
from networks import Task, digits_mlp

PROBES, STEPS = 8, 40


def distance(points: Tensor, weights: Tensor, spectrum: Tensor) -> float:
    """Wasserstein-1 distance of a weighted set of points to the true spectrum, relative to the spectrum's range."""
    weights = weights.double().clamp(min=0.0)
    reach = float(spectrum.max() - spectrum.min())
    return float(wasserstein_distance(spectrum.numpy(), points.double().numpy(), v_weights=weights.numpy())) / reach


# Each takes a task and a seed and returns the distance of each form of its answer, and the products it made.

Spectrum = Callable[[Task, int], tuple[dict[str, tuple[Tensor, Tensor]], int]]


def ours_density(task: Task, seed: int) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    operator = th.hessian(peers.problem(task))
    d = th.spectral_density(operator, probes=PROBES, steps=STEPS, seed=seed)
    return {"nodes": (d.nodes, d.weights), "grid": (d.grid, d.density)}, d.matvecs + peers.SYMMETRY_PROBE


def curvlinops_density(task: Task, seed: int) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    from curvlinops import lanczos_approximate_spectrum

    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (SciPy's own start for the boundaries)
    operator = peers.curvlinops_hessian(task)
    with peers.counted_curvlinops(operator) as made:
        grid, density = lanczos_approximate_spectrum(operator, ncv=STEPS, num_repeats=PROBES)
    return {"grid": (grid, density)}, sum(made)


def eigenthings_density(task: Task, seed: int) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    import hessian_eigenthings as he

    # Run i starts from seed + i, so neighbouring seeds would share probes.
    d = he.spectral_density(peers.eigenthings_hessian(task), num_runs=PROBES, lanczos_steps=STEPS, seed=1000 * seed)
    nodes, weights = d.raw_eigenvalues.flatten(), d.raw_weights.flatten()
    real = ~nodes.isnan()
    return {"nodes": (nodes[real], weights[real]), "grid": (d.grid, d.density)}, PROBES * STEPS


def pyhessian_density(task: Task, seed: int) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    torch.manual_seed(seed)
    with peers.default_dtype(task), peers.counted_pyhessian() as made:
        nodes, weights = peers.pyhessian_object(task).density(iter=STEPS, n_v=PROBES)
    return {"nodes": (torch.tensor(nodes).flatten(), torch.tensor(weights).flatten())}, len(made)


def density(settings: Settings) -> Iterator[Row]:
    """Spectral density with 8 probes of 40 steps, set-up included; as quadrature nodes, and smoothed on a grid.

    Error: Wasserstein-1 distance to the true spectrum over its range, mean over seeds.
    """
    task = digits_mlp()
    spectrum = torch.linalg.eigvalsh(truth.dense_hessian(task))
    contenders: dict[str, tuple[Spectrum, tuple[str, ...]]] = {
        "ours": (ours_density, ("nodes", "grid")),
        "curvlinops": (curvlinops_density, ("grid",)),
        "eigenthings": (eigenthings_density, ("nodes", "grid")),
        "pyhessian": (pyhessian_density, ("nodes",)),
    }
    for who, (estimate, forms) in contenders.items():
        measured = [Row("spectral density", f"{task.name}, P={task.size}", f"{who}, {form}") for form in forms]
        yield from _density_rows(task, estimate, forms, spectrum, measured, settings)


def _density_rows(
    task: Task, estimate: Spectrum, forms: tuple[str, ...], spectrum: Tensor, rows: list[Row], settings: Settings
) -> list[Row]:
    """All forms of one answer come from the same runs; each form has its row."""
    seeds = settings.pick(10, 2)

    def fill(row: Row) -> None:
        timing, (_, products) = one_shot(task.gradient, lambda: estimate(task.copy(), 0), settings, most=3)
        answers = [estimate(task.copy(), seed)[0] for seed in range(seeds)]
        for form, each in zip(forms, rows, strict=True):
            distances = [distance(*answer[form], spectrum) for answer in answers]
            each.charge(timing)
            each.details["distances"] = distances
            each.error, each.products = float(np.mean(distances)), products
            each.say(f"standard deviation over {seeds} seeds {np.std(distances, ddof=1):.1e}")

    try_row(rows[0], fill)
    for other in rows[1:]:
        other.note = other.note or rows[0].note
    return rows


# Trace: each takes a task and a seed and returns the estimate and the products it made

Trace = Callable[[Task, int], tuple[float, int]]


def ours_trace(task: Task, seed: int, *, method: str) -> tuple[float, int]:
    estimate = th.trace(th.hessian(peers.problem(task)), matvecs=99, method=method, seed=seed)
    return estimate.value, estimate.matvecs + peers.SYMMETRY_PROBE


def curvlinops_trace(task: Task, seed: int, *, method: str) -> tuple[float, int]:
    import curvlinops

    torch.manual_seed(seed)
    operator = peers.curvlinops_hessian(task)
    count = 99 if method == "hutchpp_trace" else 100
    with peers.counted_curvlinops(operator) as made:
        value = getattr(curvlinops, method)(operator, num_matvecs=count)
    return float(value), sum(made)


def eigenthings_trace(task: Task, seed: int, *, method: str) -> tuple[float, int]:
    import hessian_eigenthings as he

    return float(he.trace(peers.eigenthings_hessian(task), num_matvecs=99, method=method, seed=seed).estimate), 99


def pyhessian_trace(task: Task, seed: int) -> tuple[float, int]:
    torch.manual_seed(seed)
    with peers.default_dtype(task):
        terms = peers.pyhessian_object(task).trace(maxIter=100)
    return float(np.mean(terms)), len(terms)


TRACES: dict[str, Trace] = {
    "ours, hutch++": partial(ours_trace, method="hutch++"),
    "ours, xtrace": partial(ours_trace, method="xtrace"),
    "ours, hutchinson": partial(ours_trace, method="hutchinson"),
    "curvlinops, hutch++": partial(curvlinops_trace, method="hutchpp_trace"),
    "curvlinops, xtrace": partial(curvlinops_trace, method="xtrace"),
    "curvlinops, hutchinson": partial(curvlinops_trace, method="hutchinson_trace"),
    "eigenthings, hutch++": partial(eigenthings_trace, method="hutch++"),
    "eigenthings, hutchinson": partial(eigenthings_trace, method="hutchinson"),
    "pyhessian, hutchinson": pyhessian_trace,
}


def trace(settings: Settings) -> Iterator[Row]:
    """Trace from about 100 products, set-up included.

    Error: root mean square relative error over seeds, against the dense matrix.
    """
    task = digits_mlp()
    true = float(truth.dense_hessian(task).trace())
    seeds = settings.pick(50, 3)
    for who, estimate in TRACES.items():

        def fill(row: Row, estimate: Trace = estimate) -> None:
            timing, _ = one_shot(task.gradient, lambda: estimate(task.copy(), 0), settings, most=3)
            row.charge(timing)
            answers = [estimate(task.copy(), seed) for seed in range(seeds)]
            errors = np.array([value / true - 1.0 for value, _ in answers])
            row.error = float(np.sqrt(np.mean(errors**2)))
            row.products = sum(products for _, products in answers) / seeds
            row.say(f"largest of {seeds} seeds {np.abs(errors).max():.1e}")

        yield try_row(Row("trace", f"{task.name}, P={task.size}", who), fill)
