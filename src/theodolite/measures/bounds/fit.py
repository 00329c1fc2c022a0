"""The posterior whose certificate is best: descent on the bound itself.

The bound `p(q, B)` is a function of the error rate q of the posterior and of `B = (KL + ...)/n`. Each step follows
`∂p/∂q · ∇q + ∂p/∂B · ∇B`, with the two slopes at a running error rate. The gradient of the divergence is written down, and the
variance of the prior is the best one for the present weights, so that neither needs a graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.interrupts import called_within
from theodolite.measures.bounds.blocks import Basis, Refresh, Start, blocks_in_basis, spread_out
from theodolite.measures.bounds.calculator import FEWEST, HIGHEST, budget_of, kl_inverse
from theodolite.measures.bounds.gibbs import smooth_error
from theodolite.measures.bounds.noisy_network import NoisyNetwork
from theodolite.measures.bounds.posterior import Block, GaussianPosterior, best_variances
from theodolite.problem import Problem
from theodolite.results import Row

Objective = Literal["kl", "pinsker", "quadratic", "catoni"]

#: What a fit minimises, as a function of the error rate and of B.
OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_inverse,
    "pinsker": lambda q, b: q + (b / 2).sqrt(),
    "quadratic": lambda q, b: ((q + b / 2).sqrt() + (b / 2).sqrt()).square(),
    "catoni": lambda q, b: -torch.expm1(-q - b) / (1 - math.exp(-1.0)),
}
#: What a mean moves in a step at most, in standard deviations of the prior.
SHORT = 0.1
#: Share of the new batch in the running error rate.
_NEWS = 0.05
#: Samples on which the first spread is chosen.
TRIED = 4000
#: Weights of curvature among which the first spread is chosen, in units of n.
STRENGTHS = tuple(10.0**e for e in (-3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5))

#: Variances of a prior that is centred at the mean.
FLAT = tuple(HIGHEST * 10.0**-k for k in range(7))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a posterior is fitted. `every` is how many epochs a basis is kept."""

    basis: Basis = "kronecker"
    refresh: Refresh = "iter"
    layer_scales: bool = True
    objective: Objective = "kl"
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    init_s: Start = "curvature"
    epochs: int = 20
    batch_size: int = 1000
    every: int = 5
    rate: float = 2e-3
    rate_of_spread: float = 2e-2
    delta: float = 0.025
    own: int = 50  # coordinates of a layer with variances of their own, for "low-rank"


class Fit:
    """A fit under way: leaves for mean and log standard deviation of each block, and where it is."""

    def __init__(self, network: NoisyNetwork, blocks: Sequence[Block], settings: Settings, seed: int) -> None:
        self.network, self.settings, self.seed = network, settings, seed
        self.problem: Problem = network.problem
        self.n = network.samples.count
        self.generator = torch.Generator().manual_seed(seed)
        self.first: dict[str, tuple[Tensor, Tensor]] = {}
        self.trace: list[Row] = []
        self.epoch = 0
        self.blocks = self._begin(blocks)
        self.error = self.error_of(self.blocks, self._common(best_variances(self.blocks)))
        self._make_leaves()

    # Beginning

    def _begin(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks in their basis, with the first spread that gives the best bound."""
        settings = self.settings
        turned = self._in_basis(self.problem, blocks)
        moved = best_variances([replace(b, log_std=torch.full_like(b.mean, -30.0)) for b in turned])
        still = min(moved.values()) < 1e-12  # the mean is where the prior is: its variance is free
        beginnings = [dict.fromkeys(moved, v) for v in FLAT] if still else [self._common(moved)]
        if settings.init_s != "curvature":
            return self._tied(spread_out(turned, settings.init_s, beginnings[len(beginnings) // 2], 0.0))
        tried = []
        for begin, strength in itertools.product(beginnings, STRENGTHS[::2] if still else STRENGTHS):
            found, own = turned, begin
            for _ in range(1 if still else 4):  # the best variance of the prior depends on the spread, and the spread on it
                found = self._tied(spread_out(turned, "curvature", own, strength * self.n))
                own = self._common(best_variances(found))
            tried.append((self.bound_of(found, own), found))
        return min(tried, key=lambda pair: pair[0])[1]

    def _in_basis(self, problem: Problem, blocks: Sequence[Block]) -> list[Block]:
        return blocks_in_basis(problem, blocks, self.settings.basis, self.settings.refresh, self.first, self.seed)

    def _common(self, variances: dict[str, float]) -> dict[str, float]:
        """One variance of the prior for all groups, where layers have none of their own."""
        if self.settings.layer_scales:
            return variances
        sizes = {group: sum(b.own(b.mean).numel() for b in self.blocks_of(group)) for group in variances}
        mean = sum(variances[g] * sizes[g] for g in sizes) / sum(sizes.values())
        return dict.fromkeys(variances, mean)

    def blocks_of(self, group: str) -> list[Block]:
        return [block for block in self.network.blocks.values() if block.group == group]

    def _tied(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks with the spread that their kind of basis allows."""
        return [replace(b, log_std=self._allowed(b, b.log_std)) for b in blocks]

    def _allowed(self, block: Block, log_std: Tensor) -> Tensor:
        free = self._free(block)
        if free is None:
            return log_std
        common = log_std[~free].mean() if bool((~free).any()) else log_std.mean()
        return torch.where(free, log_std, common)

    def _free(self, block: Block) -> Tensor | None:
        """Which coordinates have a spread of their own; None: all."""
        if self.settings.basis not in ("isotropic", "low-rank"):
            return None
        free = torch.zeros_like(block.mean, dtype=torch.bool)
        if self.settings.basis == "low-rank" and block.curvature is not None:
            top = block.curvature.flatten().topk(min(self.settings.own, block.size)).indices
            free.view(-1)[top] = True
        return free

    @called_within(torch.no_grad)
    def error_of(self, blocks: Sequence[Block], variances: Mapping[str, float]) -> float:
        """The smooth error at these blocks, on some samples."""
        self.network.set_blocks(blocks)
        values = {b.name: (b.mean, (2 * b.log_std).exp()) for b in blocks}
        errors, seen = 0.0, 0
        with self.problem.session(second=False):
            for rows, batch in self.network.samples.epoch(1000, torch.Generator().manual_seed(self.seed)):
                drawn = self.network(rows, batch, values, torch.Generator().manual_seed(self.seed), variances, open_last=True)
                errors += batch.size * float(smooth_error(drawn, batch.target, self.problem.loss_function))
                seen += batch.size
                if seen >= TRIED:
                    break
        return min(errors / seen, 1.0)

    def bound_of(self, blocks: Sequence[Block], variances: Mapping[str, float], penalty: float = 0.0) -> float:
        """The objective at these blocks; `penalty` is in nats."""
        kl = sum(block.nats(variances[block.group]) for block in blocks)
        return self._objective(self.error_of(blocks, variances), max(kl, 0.0) + penalty)

    def _budget(self, kl: float) -> float:
        return budget_of(kl, max(self.n, FEWEST), self.settings.delta)

    # Steps

    def _make_leaves(self) -> None:
        settings = self.settings
        self.means = {b.name: b.mean.clone().requires_grad_() for b in self.blocks}
        self.spreads = {b.name: b.log_std.clone() for b in self.blocks}
        self.free = {b.name: self._free(b) for b in self.blocks}
        groups = [{"params": [mean], "lr": settings.rate} for mean in self.means.values()]
        groups.append({"params": list(self.spreads.values()), "lr": settings.rate_of_spread})
        kinds: dict[str, Any] = {
            "adam": lambda g: torch.optim.Adam(g, betas=(0.9, 0.99), fused=True),
            "rmsprop": torch.optim.RMSprop,
            "sgd": lambda g: torch.optim.SGD(g, lr=settings.rate, momentum=0.9),
        }
        self.optimizer = kinds[settings.optimizer](groups)
        self.network.set_blocks(self.blocks)
        self.network.keep_inputs(settings.batch_size)

    def run(self, count: Callable[[int], None] = lambda n: None) -> None:
        """The epochs that remain."""
        while self.epoch < self.settings.epochs:
            self.take_epoch()
            count(1)

    def take_epoch(self) -> None:
        settings = self.settings
        if self._due():
            self._refresh()
        steps = math.ceil(self.n / settings.batch_size)
        with self.problem.session(second=False):
            for i, (rows, batch) in enumerate(self.network.samples.epoch(settings.batch_size, self.generator)):
                if i % max(10, steps // 10) == 0:
                    slopes = self._slopes()
                self._set_rates((self.epoch + i / steps) / settings.epochs)
                self._step(rows, batch, *slopes)
        self.epoch += 1
        kl = self._kl()
        self.trace.append({"epoch": self.epoch, "error": self.error, "kl": kl, "objective": self._objective(self.error, kl)})

    def _due(self) -> bool:
        """Whether the basis is to be made anew before this epoch."""
        settings = self.settings
        turning = settings.basis in ("kronecker", "low-rank") and settings.refresh != "once"
        return turning and self.epoch > 0 and self.epoch % settings.every == 0

    def _set_rates(self, done: float) -> None:
        factor = max(0.5 * (1 + math.cos(math.pi * done)), 0.01)
        for group, block in zip(self.optimizer.param_groups, self.blocks, strict=False):
            group["lr"] = factor * self._rate(block)
        self.optimizer.param_groups[-1]["lr"] = factor * self.settings.rate_of_spread

    def _rate(self, block: Block) -> float:
        """Of the mean. A step of Adam has the size of its rate: where the prior is narrow it must be smaller than that."""
        rate = self.settings.rate
        return rate if self.settings.optimizer == "sgd" else min(rate, SHORT * math.sqrt(self.scales[block.group]))

    def _step(self, rows: Tensor, batch: Any, by_error: float, by_nat: float) -> None:
        """One step on the bound: the smooth error by autograd, the divergence by its formula."""
        variances = {name: (2 * spread).exp_().requires_grad_() for name, spread in self.spreads.items()}
        values = {name: (mean, variances[name]) for name, mean in self.means.items()}
        self.optimizer.zero_grad()
        drawn = self.network(rows, batch, values, self.generator, self.scales, open_last=True)
        error = smooth_error(drawn, batch.target, self.problem.loss_function)
        (by_error * error).backward()
        for block in self.blocks:
            self._add_divergence(block, variances[block.name], by_nat)
        self.optimizer.step()
        self.error += _NEWS * (min(float(error.detach()), 1.0) - self.error)

    def _add_divergence(self, block: Block, variance: Tensor, by_nat: float) -> None:
        """`∂KL/∂mean = (mean − start)/λ` and `∂KL/∂log std = s/λ − 1` on top of the gradient of the error."""
        mean, scale = self.means[block.name], self.scales[block.group]
        assert mean.grad is not None
        mean.grad.add_(mean.detach(), alpha=by_nat / scale).sub_(block.start, alpha=by_nat / scale)
        slope = variance.grad if variance.grad is not None else torch.zeros_like(variance)
        slope.mul_(2.0).add_(by_nat / scale).mul_(variance.detach()).sub_(by_nat)
        if block.rank is not None:
            mean.grad[:, block.rank :] = 0.0
            slope[:, block.rank :] = 0.0
        free = self.free[block.name]
        if free is not None:  # one spread for all others
            slope = torch.where(free, slope, (slope * ~free).sum() / max(1, int((~free).sum())))
        self.spreads[block.name].grad = slope

    def _slopes(self) -> tuple[float, float]:
        """`∂p/∂q` and `∂p/∂KL` at the running error rate; the variances of the prior are renewed."""
        self.scales = self._common(best_variances(self.current()))
        q = torch.tensor(min(max(self.error, 1e-6), 1 - 1e-6), dtype=torch.float64, requires_grad=True)
        b = torch.tensor(self._budget(self._kl()), dtype=torch.float64, requires_grad=True)
        by_q, by_b = torch.autograd.grad(OBJECTIVES[self.settings.objective](q, b), [q, b])
        return float(by_q), float(by_b) / self.n

    def _refresh(self) -> None:
        """New bases at the present mean; spreads stay with the indices of their coordinates."""
        blocks = self.current()
        at_mean = self.problem.at({b.name: b.parameter(b.mean) for b in blocks})
        self.blocks = self._in_basis(at_mean, blocks)
        for block in self.blocks:
            self.means[block.name].detach().copy_(block.mean)
        self.network.set_blocks(self.blocks)
        self.network.keep_inputs(self.settings.batch_size)

    # Where it is

    def current(self) -> list[Block]:
        """The blocks with the present values."""
        return [replace(b, mean=self.means[b.name].detach(), log_std=self.spreads[b.name]) for b in self.blocks]

    def _kl(self) -> float:
        return max(0.0, sum(block.nats(self.scales[block.group]) for block in self.current()))

    def _objective(self, error: float, kl: float) -> float:
        q, b = (torch.tensor(v, dtype=torch.float64) for v in (error, self._budget(kl)))
        return float(OBJECTIVES[self.settings.objective](q, b))

    def state(self) -> dict[str, Any]:
        """All that a later `restore` needs to take the same epochs."""
        tensors = {
            "means": {name: mean.detach() for name, mean in self.means.items()},
            "spreads": self.spreads,
            "left": {b.name: b.left for b in self.blocks if b.left is not None},
            "right": {b.name: b.right for b in self.blocks if b.right is not None},
            "curvature": {b.name: b.curvature for b in self.blocks if b.curvature is not None},
            "starts": {b.name: b.start for b in self.blocks},
        }
        facts = {"epoch": self.epoch, "error": self.error, "trace": self.trace, "order": self.generator.get_state()}
        return {**tensors, **facts, "optimizer": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be where another fit of the same kind was."""
        self.blocks = [
            replace(
                b,
                start=state["starts"][b.name],
                **{name: state[name].get(b.name) for name in ("left", "right", "curvature")},
            )
            for b in self.blocks
        ]
        for name in self.means:
            self.means[name].detach().copy_(state["means"][name])
            self.spreads[name].copy_(state["spreads"][name])
        self.epoch, self.error, self.trace = state["epoch"], state["error"], list(state["trace"])
        self.generator.set_state(state["order"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.free = {b.name: self._free(b) for b in self.blocks}
        self.network.set_blocks(self.blocks)
        self.network.keep_inputs(self.settings.batch_size)

    def posterior(self) -> GaussianPosterior:
        blocks = tuple(replace(b, mean=b.mean.clone(), log_std=b.log_std.clone()) for b in self.current())
        variances = self._common(best_variances(blocks))
        one = not self.settings.layer_scales
        return GaussianPosterior(blocks=blocks, variances=variances, basis=self.settings.basis, one_variance=one, seed=self.seed)
