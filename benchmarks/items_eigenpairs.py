"""Eigenpairs: cost, error, missed copies, uneven batches, warm starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import peers
import theodolite as th
import truth
from harness import Row, Settings, one_shot, try_row
from networks import Task, digits_mlp, lenet5, sgd_step
from peers import Solved

Solver = Callable[[Task], Solved]


def solvers(k: int) -> dict[str, Solver]:
    return {
        "ours": lambda t: peers.solve_ours(t, k),
        "curvlinops + eigsh tol=1e-3": lambda t: peers.solve_curvlinops(t, k),
        "eigenthings Lanczos, default": lambda t: peers.solve_eigenthings(t, k),
        "eigenthings Lanczos, 30 steps": lambda t: peers.solve_eigenthings(t, k, max_iter=30),
        "eigenthings Lanczos, 60 steps": lambda t: peers.solve_eigenthings(t, k, max_iter=60),
        "pyhessian": lambda t: peers.solve_pyhessian(t, k),
    }


def run_solver(task: Task, solver: Solver, settings: Settings, row: Row) -> Solved:
    """Time a solver with its set-up and put down what it used."""
    timing, solved = one_shot(task.gradient, lambda: solver(task.copy()), settings, most=3)
    row.charge(timing)
    row.products = solved.products
    row.say(solved.note)
    row.details["values"] = [float(v) for v in solved.values]
    return solved


def lenet5_eigenpairs(settings: Settings) -> Iterator[Row]:
    """Top 10 eigenpairs of LeNet5 at initialisation to a residual of 1e-3, set-up included.

    Error: largest relative error of an eigenvalue, against ARPACK on float64 double backward.
    """
    k = settings.pick(10, 3)
    task = lenet5(settings.pick(1000, 100))
    true = {which: reference_values(task, k, which) for which in ("LA", "LM")}
    for who, solver in solvers(k).items():

        def fill(row: Row, solver: Solver = solver) -> None:
            solved = run_solver(task, solver, settings, row)
            row.error = truth.eigenvalue_error(solved.values, true[solved.which])

        yield try_row(Row("top eigenpairs", f"LeNet5, {len(task.batches[0][1])} samples, k={k}", who), fill)


def reference_values(task: Task, k: int, which: str) -> Tensor:
    """The extreme eigenvalues of a network too large for a dense matrix: ARPACK on plain double backward, float64."""
    from scipy.sparse.linalg import LinearOperator

    double = task.double()
    gradient = truth.gradient_graph(truth.total_loss(double), double.parameters)

    def matvec(x: object) -> object:
        v = torch.as_tensor(x).reshape(-1)
        parts = torch.autograd.grad(gradient, double.parameters, v, retain_graph=True)
        return truth.flat(parts, double.parameters).numpy()

    operator = LinearOperator((double.size, double.size), matvec=matvec, dtype="float64")
    return peers.eigsh(operator, k, tol=1e-5, which=which).values


def dense_eigenpairs(settings: Settings) -> Iterator[Row]:
    """Top 5 eigenpairs of a small float64 network, set-up included.

    Error: largest relative error of an eigenvalue, against the dense matrix.
    """
    k, task = 5, digits_mlp()
    matrix = truth.dense_hessian(task)
    true = {which: truth.top(matrix, k, which) for which in ("LA", "LM")}
    extra: dict[str, Solver] = {
        "curvlinops + eigsh tol=0": lambda t: peers.solve_curvlinops(t, k, tol=0),
        "eigenthings deflated power": lambda t: peers.solve_eigenthings_power(t, k),
        "pyhessian maxIter=1000 tol=1e-6": lambda t: peers.solve_pyhessian(t, k, max_iter=1000, tol=1e-6),
    }
    for who, solver in {**solvers(k), **extra}.items():

        def fill(row: Row, solver: Solver = solver) -> None:
            solved = run_solver(task, solver, settings, row)
            compare(solved, *true[solved.which], row)

        yield try_row(Row("top eigenpairs", f"{task.name}, P={task.size}, k={k}", who), fill)


def compare(solved: Solved, values: Tensor, vectors: Tensor, row: Row) -> None:
    """Error of the eigenvalues and overlap of the eigenspace with the true pairs."""
    row.error = truth.eigenvalue_error(solved.values, values)
    overlap = truth.subspace_overlap(solved.vectors, vectors)
    row.details["overlap"] = overlap
    row.say(f"subspace overlap {overlap:.6f}")


def gauss_newton(settings: Settings) -> Iterator[Row]:
    """Top 5 eigenpairs of the Gauss-Newton matrix, set-up included.

    Error: largest relative error of an eigenvalue, against the dense matrix.
    """
    k, task = 5, digits_mlp()
    values, vectors = truth.top(truth.dense_gauss_newton(task), k)
    contenders: dict[str, Solver] = {
        "ours": lambda t: peers.solve_ours(t, k, matrix="ggn"),
        "curvlinops + eigsh tol=1e-3": lambda t: peers.solve_curvlinops(t, k, matrix="ggn"),
        "eigenthings Lanczos, default": lambda t: peers.solve_eigenthings(t, k, matrix="ggn"),
        "eigenthings Lanczos, 30 steps": lambda t: peers.solve_eigenthings(t, k, max_iter=30, matrix="ggn"),
    }
    for who, solver in contenders.items():

        def fill(row: Row, solver: Solver = solver) -> None:
            compare(run_solver(task, solver, settings, row), values, vectors, row)

        yield try_row(Row("Gauss-Newton top eigenpairs", f"{task.name}, P={task.size}, k={k}", who), fill)


# Copies of eigenvalues

PLANTED = ((10.0, 3), (8.0, 2))  # eigenvalue, multiplicity


def planted_matrix(n: int = 300, seed: int = 0) -> Tensor:
    """A dense symmetric matrix whose two largest eigenvalues have multiplicities 3 and 2."""
    generator = torch.Generator().manual_seed(seed)
    top = [value for value, copies in PLANTED for _ in range(copies)]
    values = torch.cat([torch.tensor(top), torch.linspace(5.0, -2.0, n - len(top))]).double()
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return q @ torch.diag(values) @ q.T


def multiplicities(settings: Settings) -> Iterator[Row]:
    """Top 5 of a matrix with eigenvalues 10 (three times) and 8 (twice).

    Error: share of seeds with a wrong eigenspace (a value off by 1 %, or vectors that coincide).
    """
    k = sum(copies for _, copies in PLANTED)
    matrix = planted_matrix()
    true = torch.tensor([value for value, copies in PLANTED for _ in range(copies)]).double()

    def ours(seed: int) -> Solved:
        pairs = th.top_eigenpairs(matrix, k, seed=seed)
        note = "converged" if pairs.converged else f"NOT converged: {pairs.outcome.name}"
        return Solved(pairs.values, pairs.vectors, pairs.matvecs + peers.SYMMETRY_PROBE, note)

    contenders: dict[str, Callable[[int], Solved]] = {
        "ours": ours,
        "eigsh tol=1e-3": lambda seed: peers.eigsh(matrix.numpy(), k, tol=1e-3, seed=seed),
        "eigsh tol=0": lambda seed: peers.eigsh(matrix.numpy(), k, tol=0, seed=seed),
        **{
            f"eigenthings Lanczos, {steps or 'default'}{' steps' if steps else ''}": partial(
                lambda seed, steps: peers.lanczos(peers.eigenthings_matrix(matrix), k, steps, seed), steps=steps
            )
            for steps in (None, 30, 60)
        },
    }
    for who, solver in contenders.items():
        row = Row("multiplicities", "n=300, 10 x3, 8 x2, k=5", who)
        yield try_row(row, partial(_count_wrong, solver, true, settings.pick(20, 4)))


def _count_wrong(solver: Callable[[int], Solved], true: Tensor, seeds: int, row: Row) -> None:
    solved = [solver(seed) for seed in range(seeds)]
    wrong = [s for s in solved if truth.eigenvalue_error(s.values, true) > 0.01 or rank(s.vectors) < len(true)]
    row.error = len(wrong) / seeds
    row.products = sum(s.products for s in solved) / seeds
    shown = wrong[0] if wrong else solved[0]
    values = ", ".join(f"{float(v):.3f}" for v in shown.values.sort(descending=True).values)
    row.note = f"wrong in {len(wrong)} of {seeds}; e.g. {values}, rank {rank(shown.vectors)}"
    row.note += f" ({shown.note})" if shown.note else ""


def rank(vectors: Tensor) -> int:
    """How many directions the columns really hold: a ghost repeats one that is there already."""
    return int((torch.linalg.svdvals(vectors.double()) > 0.1).sum())


# Uneven batches


def uneven_batches(settings: Settings) -> Iterator[Row]:
    """Largest eigenvalue from batches of 128 + 128 + 44 samples. Error: relative bias against the full batch."""
    task = digits_mlp(batch_sizes=(128, 128, 44))
    true = truth.top(truth.dense_hessian(task), 1)[0]
    contenders: dict[str, Solver] = {
        "ours": lambda t: peers.solve_ours(t, 1, tol=1e-6),
        "curvlinops + eigsh tol=0": lambda t: peers.solve_curvlinops(t, 1, tol=0),
        "eigenthings Lanczos, 30 steps": lambda t: peers.solve_eigenthings(t, 1, max_iter=30),
        "pyhessian maxIter=1000 tol=1e-6": lambda t: peers.solve_pyhessian(t, 1, max_iter=1000, tol=1e-6),
    }
    for who, solver in contenders.items():

        def fill(row: Row, solver: Solver = solver) -> None:
            solved = run_solver(task, solver, settings, row)
            row.error = truth.eigenvalue_error(solved.values, true)
            row.say(f"found {float(solved.values[0]):.5f}, truth {float(true[0]):.5f}")

        yield try_row(Row("uneven batches", f"{task.name}, 128+128+44", who), fill)


# Along training


def warm_start(settings: Settings) -> Iterator[Row]:
    """Eigenpairs after one SGD step of rate 0.01, cold and from the pairs before the step.

    Error: largest relative error of an eigenvalue, against a cold run with tol=1e-5.
    """
    for task in (lenet5(settings.pick(1000, 100)), digits_mlp()):
        for k in (1, 3, 10):
            moving = task.copy()
            before = th.top_eigenpairs(th.hessian(peers.problem(moving)), k)
            sgd_step(moving, 0.01)
            true = th.top_eigenpairs(th.hessian(peers.problem(moving)), k, tol=1e-5).values
            for who, start in (("ours, cold", None), ("ours, warm", before.vectors)):
                row = Row("warm start", f"{task.name}, k={k}", who)
                yield try_row(row, partial(_tracked, moving, k, start, true, settings))


def _tracked(task: Task, k: int, start: Tensor | None, true: Tensor, settings: Settings, row: Row) -> None:
    def solve() -> th.linalg.Eigenpairs:
        return th.top_eigenpairs(th.hessian(peers.problem(task)), k, start=start)

    timing, pairs = one_shot(task.gradient, solve, settings, most=3)
    row.charge(timing)
    row.products, row.error = pairs.matvecs, truth.eigenvalue_error(pairs.values, true)
    row.say("converged" if pairs.converged else f"NOT converged: {pairs.outcome.name}")
