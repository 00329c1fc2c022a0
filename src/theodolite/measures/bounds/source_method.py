"""The posteriors of Wu, Zhu and others 2020 as printed: Algorithm 1 step by step, and the certificate of their section 6.

One drawn network per step, `w' = w + R (ξ · exp ς)`; plain steps on the surrogate loss plus `√(B/2)` in the mean w (in its own
coordinates), ς (in those of the basis R) and ρ = ½ log λ, one variance for all weights. `pac_bayes_bound` does better in fewer
steps; this is what its figures are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.arguments import checked, count, each, either, entry, fraction, instance, positive, whole
from theodolite.arguments import seed as a_seed
from theodolite.measures.bounds.blocks import FACTOR_SAMPLES, Basis, Refresh, blocks_in_basis, make_blocks, spread_out
from theodolite.measures.bounds.calculator import CEILING, PRECISION, bound_from_summary, grid_index, kl_inverse
from theodolite.measures.bounds.gibbs import smooth_error
from theodolite.measures.bounds.noisy_network import Drawn, Samples
from theodolite.measures.bounds.posterior import Block, GaussianPosterior
from theodolite.measures.bounds.priors import weights_of
from theodolite.problem import Problem
from theodolite.problem.accuracy import right_answers
from theodolite.problem.arguments import a_problem
from theodolite.progress import counting
from theodolite.results import Row

#: ρ begins at λ = exp(−6) and ends where j = 1.
FIRST_RHO = -3.0
LAST_RHO = 0.5 * math.log(CEILING) - 0.5 / PRECISION


@dataclass(frozen=True)
class Preset:
    """One of the five methods: its basis, how that is found again, and whether ever more rarely (the D of ITER(D))."""

    basis: Basis
    refresh: Refresh
    rarer: bool = False


PRESETS: dict[str, Preset] = {
    "BASE": Preset("standard", "once"),
    "APPR": Preset("kronecker", "once"),
    "ITER": Preset("kronecker", "iter"),
    "ITER(D)": Preset("kronecker", "iter", rarer=True),
    "ITER.M": Preset("kronecker", "weights"),
}


def _epochs(name: str, value: Any) -> list[float]:
    """Numbers of epochs, or none."""
    return [] if isinstance(value, list | tuple) and not value else each(whole)(name, value)


@dataclass(frozen=True)
class SourceFit:
    """The posterior, ρ on its way (before it is rounded to the grid), and a row for each epoch."""

    posterior: GaussianPosterior
    rho: float
    trace: tuple[Row, ...]


@checked(
    problem=a_problem,
    epochs=count,
    batch_size=count,
    rate=positive,
    decays=_epochs,
    every=count,
    delta=fraction,
    samples=count,
    seed=a_seed,
)
def source_posterior(
    problem: Problem,
    start: Mapping[str, Tensor],
    preset: str = "ITER",
    *,
    epochs: int = 2000,
    batch_size: int = 128,
    rate: float = 1e-3,
    decays: tuple[int, ...] = (400, 800, 1200, 1600),
    every: int = 10,
    optimizer: Literal["rmsprop", "adam", "sgd"] = "rmsprop",
    init_s: Literal["weights", "flat"] = "weights",
    delta: float = 0.025,
    samples: int = FACTOR_SAMPLES,
    seed: int = 0,
    progress: bool | None = False,
) -> SourceFit:
    """Algorithm 1 of the source: BASE, APPR, ITER, ITER(D) or ITER.M.

    Args:
        start: the untrained weights by name; the model of the problem holds the trained ones.
        decays: epochs at which the rate is multiplied by 0.1; for ITER(D) `every` is multiplied by 10 there.
        every: epochs for which a basis is kept.
        init_s: variances begin at the squares of the weights (as printed), or all at that of the prior.
        samples: from which bases are made.
    """
    method = entry("preset", preset, PRESETS)
    either("init_s", init_s, ("weights", "flat"))
    own = dict(zip(problem.names, problem.leaves(grad=False), strict=True))
    start = weights_of(start, own)
    steps = _Steps(problem, start, method, optimizer, rate, init_s, delta, samples, seed)
    with counting(preset, progress=progress, total=epochs) as counted:
        for epoch in range(epochs):
            passed = sum(epoch >= decay for decay in decays)
            kept = every * 10**passed if method.rarer else every
            if method.refresh != "once" and epoch > 0 and epoch % kept == 0:
                steps.refresh()
            steps.set_rate(rate * 0.1**passed)
            steps.epoch(batch_size)
            counted(1)
    posterior = GaussianPosterior(
        blocks=tuple(steps.current()), variances=steps.variances(), basis=preset, seed=seed
    )  # fmt: skip
    return SourceFit(posterior, float(steps.rho.detach()), tuple(steps.trace))


class _Steps:
    """Leaves: the mean `w` of each parameter in its own coordinates, ς in those of its basis, and ρ."""

    def __init__(
        self,
        problem: Problem,
        start: Mapping[str, Tensor],
        method: Preset,
        optimizer: str,
        rate: float,
        init_s: Any,
        delta: float,
        samples: int,
        seed: int,
    ) -> None:
        self.problem, self.method, self.delta, self.factor_samples, self.seed = problem, method, delta, samples, seed
        self.samples = Samples(problem)
        self.first: dict[str, tuple[Tensor, Tensor]] = {}
        self.generator = torch.Generator().manual_seed(seed)
        blocks = make_blocks(problem, start)
        variances = {b.group: math.exp(2 * FIRST_RHO) for b in blocks}
        self.blocks = spread_out(self._turned(problem, blocks), init_s, variances, 0.0)
        self.means = [b.parameter(b.mean).clone().requires_grad_() for b in self.blocks]
        self.starts = [b.parameter(b.start).clone() for b in self.blocks]
        self.spreads = [b.log_std.clone().requires_grad_() for b in self.blocks]
        self.rho = torch.tensor(FIRST_RHO, dtype=torch.float64, requires_grad=True)
        leaves = [*self.means, *self.spreads, self.rho]
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
        }  # fmt: skip
        self.optimizer = entry("optimizer", optimizer, kinds)(leaves, lr=rate)
        self.trace: list[Row] = []

    def _turned(self, problem: Problem, blocks: list[Block]) -> list[Block]:
        method = self.method
        if method.basis == "standard":
            return blocks
        return blocks_in_basis(problem, blocks, method.basis, method.refresh, self.first, self.seed, self.factor_samples)

    def refresh(self) -> None:
        """Bases at the present mean; ς stays with the indices of its coordinates."""
        weights = {b.name: w.detach() for b, w in zip(self.blocks, self.means, strict=True)}
        self.blocks = self._turned(self.problem.at(weights), self.current())

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def epoch(self, batch_size: int) -> None:
        losses = []
        with self.problem.session(second=False):
            for _, batch in self.samples.epoch(batch_size, self.generator):
                self.optimizer.zero_grad()
                loss = smooth_error(Drawn(self._outputs(batch)), batch.target, self.problem.loss_function)
                budget = source_budget(self.means, self.starts, self.spreads, self.rho, self.samples.count, self.delta)
                complexity = (budget / 2).sqrt()
                (loss + complexity).backward()
                self.optimizer.step()
                self.rho.detach().clamp_(max=LAST_RHO)
                losses.append(float(loss.detach()))
        row = {"loss": sum(losses) / len(losses), "complexity": float(complexity.detach()), "rho": float(self.rho.detach())}
        self.trace.append({"epoch": len(self.trace) + 1, **row})

    def _outputs(self, batch: Any) -> Tensor:
        drawn = []
        for block, mean, spread in zip(self.blocks, self.means, self.spreads, strict=True):
            noise = torch.randn(spread.shape, generator=self.generator, dtype=spread.dtype).to(spread.device)
            drawn.append(mean + block.parameter(noise * spread.exp()))
        return self.problem.output(self.problem.tensors(drawn), batch, 0, check=False)

    def current(self) -> list[Block]:
        found = []
        for block, mean, spread in zip(self.blocks, self.means, self.spreads, strict=True):
            found.append(replace(block, mean=block.coordinates(mean.detach()), log_std=spread.detach().clone()))
        return found

    def variances(self) -> dict[str, float]:
        return {block.group: math.exp(2 * float(self.rho.detach())) for block in self.blocks}


def source_budget(
    means: Sequence[Tensor], starts: Sequence[Tensor], spreads: Sequence[Tensor], rho: Tensor, n: int, delta: float
) -> Tensor:
    """`(KL + 2 log j + log(π² n / 6δ)) / (n − 1)` with λ = exp(2ρ), s = exp(2ς), j = b (log c − 2ρ); sums in float64.

    Its slopes: `(w − w₀)/λ`, `s/λ − 1` and `P − (Σs + ‖w − w₀‖²)/λ − 4/(log c − 2ρ)`, each over n − 1.
    """
    size = sum(mean.numel() for mean in means)
    spread = torch.stack([(2 * s).double().exp().sum() for s in spreads]).sum()
    distance = torch.stack([(w - w0).double().square().sum() for w, w0 in zip(means, starts, strict=True)]).sum()
    entropy = torch.stack([s.double().sum() for s in spreads]).sum()
    kl = 0.5 * ((spread + distance) * torch.exp(-2 * rho) - size + 2 * size * rho) - entropy
    index = PRECISION * (math.log(CEILING) - 2 * rho)
    return (kl + 2 * index.log() + math.log(math.pi**2 * n / (6 * delta))) / (n - 1)


@dataclass(frozen=True)
class SourceCertificate:
    """A row of the source's tables: the bound, the divergence, ē (`snn_error`), ρ on the grid, and the drawn error itself."""

    bound: float
    kl: float
    snn_error: float
    rho: float
    j: int
    drawn: float
    networks: int


@checked(problem=a_problem, fit=instance(SourceFit), networks=count, delta=fraction, delta_draws=fraction, seed=a_seed)
def source_certificate(
    problem: Problem,
    fit: SourceFit,
    *,
    networks: int = 50_000,
    delta: float = 0.025,
    delta_draws: float = 0.01,
    seed: int = 0,
    progress: bool | None = False,
) -> SourceCertificate:
    """The certificate of the source: whole networks drawn, ρ rounded to the better neighbour on the grid, j ≥ 1."""
    drawn = _drawn_networks(problem, fit.posterior, networks, seed, progress)
    ebar = float(kl_inverse(drawn, math.log(2 / delta_draws) / networks))
    n, index = problem.samples, grid_index(math.exp(2 * fit.rho))
    found = []
    for j in {max(1, math.floor(index)), max(1, math.ceil(index))}:
        rho = 0.5 * (math.log(CEILING) - j / PRECISION)
        variances = dict.fromkeys(fit.posterior.variances, math.exp(2 * rho))
        kl = replace(fit.posterior, variances=variances).kl()
        bound = bound_from_summary(ebar, kl, rho, n, delta)
        found.append(SourceCertificate(bound, kl, ebar, rho, j, drawn, networks))
    return min(found, key=lambda one: one.bound)


def _drawn_networks(problem: Problem, posterior: GaussianPosterior, networks: int, seed: int, progress: bool | None) -> float:
    """The mean error rate of whole networks on all samples."""
    samples, wrong = Samples(problem), 0
    with problem.session(second=False), torch.no_grad(), counting("networks", progress=progress, total=networks) as counted:
        for i in range(networks):
            weights = posterior.sample(seed + i)
            tensors = problem.tensors([weights[name] for name in problem.names])
            for _, batch in samples.epoch(2000):
                right = right_answers(problem.output(tensors, batch, 0, check=False), batch.target, problem.loss_function)
                assert right is not None
                wrong += int((~right).sum())
            counted(1)
    return wrong / (networks * samples.count)
