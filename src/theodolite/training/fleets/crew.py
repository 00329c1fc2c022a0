"""The replicas in the stack: weights, optimizer state, rates; frozen ones are held still or leave the stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.training.fleets.data import FleetBatch
from theodolite.training.fleets.optimizers import FleetOptimizer, State
from theodolite.training.fleets.routes import Gradients, Route
from theodolite.training.fleets.state import FleetState, Stack, laid_out_like, pick


@dataclass
class Crew:
    """All that belongs to a replica, stacked: `rate` and `count` (steps taken) are (R,).

    `missed` (R,) by name are the steps that left a parameter alone, because it did not enter the loss.
    """

    state: FleetState
    memory: State
    rate: Tensor
    count: Tensor
    missed: Stack

    def __post_init__(self) -> None:
        self._uneven = any(bool(t.any()) for t in self.missed.values())

    def rows(self, rows: Tensor) -> Crew:
        """A copy of some replicas."""
        memory = {column: {name: pick(t, rows) for name, t in stack.items()} for column, stack in self.memory.items()}
        missed = {name: t[rows] for name, t in self.missed.items()}
        return Crew(self.state.rows(rows), memory, self.rate[rows], self.count[rows], missed)

    def chunk(self, rows: slice) -> Crew:
        """Neighbouring replicas, in the same memory."""
        memory = {column: {name: t[rows] for name, t in stack.items()} for column, stack in self.memory.items()}
        missed = {name: t[rows] for name, t in self.missed.items()}
        return Crew(self.state.chunk(rows), memory, self.rate[rows], self.count[rows], missed)

    def copy(self) -> Crew:
        return self.rows(torch.arange(len(self.rate), device=self.rate.device))

    def write(self, rows: Tensor, other: Crew) -> None:
        """Take over the replicas of `other` as the given rows."""
        self.state.write(rows, other.state)
        for column, stack in self.memory.items():
            for name, t in stack.items():
                t[rows] = other.memory[column][name]
        self.count[rows] = other.count
        for name, t in self.missed.items():
            t[rows] = other.missed[name]
        self._uneven |= other._uneven

    def lay_out_like(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep weights and optimizer state in the memory order in which the gradients come."""
        for stack in (self.state.parameters, *self.memory.values()):
            stack |= {name: laid_out_like(stack[name], g) for name, g in gradients.items()}

    @torch.no_grad()
    def step(self, rule: FleetOptimizer, gradients: Gradients, factor: float | Tensor) -> None:
        """One step of the optimizer; `factor` on the rates is one for all or (R,)."""
        rate = self.rate if isinstance(factor, float) and factor == 1.0 else self.rate * factor
        if self._uneven or gradients.absent or len(gradients) < len(self.state.parameters):
            self._uneven_step(rule, gradients, rate)
        else:
            rule.step(self.state.parameters, gradients, self.memory, rate, self.count)
        self.count += 1

    def _uneven_step(self, rule: FleetOptimizer, gradients: Gradients, rate: Tensor) -> None:
        """As torch does it: a parameter without gradient stays as it is, and its own steps are counted."""
        self._uneven = True
        for name, p in self.state.parameters.items():
            if name not in gradients:
                self.missed[name] += 1
                continue
            rows = torch.tensor(gradients.absent.get(name, []), dtype=torch.long, device=p.device)
            stacks = [p, *(stack[name] for stack in self.memory.values())]
            before = [t.detach()[rows] for t in stacks]
            rule.step(self.state.parameters, {name: gradients[name]}, self.memory, rate, self.count - self.missed[name])
            for t, old in zip(stacks, before, strict=True):
                t[rows] = old
            self.missed[name][rows] += 1


def same_bits_without(
    crew: Crew, kept: Tensor, route: Route, rule: FleetOptimizer, batches: Iterable[FleetBatch], factor: float | Tensor
) -> bool:
    """Whether the kept replicas take bitwise the same steps when the others leave the stack.

    Matrix kernels may sum in another order when a matrix starts at another address; that is tried, not assumed.
    """
    for batch in batches:
        if not equal_bits(crew, route, batch):
            return False
        together, apart = crew.copy(), crew.rows(kept)
        losses, gradients = route(together.state, batch)
        fewer_losses, fewer = route(apart.state, batch.rows(kept))
        if not _equal(losses[kept], fewer_losses) or not all(_equal(g[kept], fewer[name]) for name, g in gradients.items()):
            return False
        together.step(rule, gradients, factor)
        apart.step(rule, fewer, factor[kept] if isinstance(factor, Tensor) else factor)
        if not all(_equal(p[kept], apart.state.parameters[name]) for name, p in together.state.parameters.items()):
            return False
    return True


def equal_bits(crew: Crew, route: Route, batch: FleetBatch, draws: int = 6) -> bool:
    """Whether replicas that are equal and see equal data get bitwise equal losses, gradients and buffers wherever they stand.

    Some kernels round the last few numbers of a stack in another way than the rest (BatchNorm over vectors does), and that
    shows for some numbers only: it is tried with the weights of the first replica and with several others near them.
    """
    same = torch.zeros(len(crew.rate), dtype=torch.long, device=crew.rate.device)
    samples, generator = batch.rows(same), torch.Generator().manual_seed(0)
    for draw in range(draws):
        state = crew.state.rows(same)
        if draw:
            with torch.no_grad():
                for p in state.parameters.values():
                    noise = torch.randn(p.shape[1:], generator=generator, dtype=p.dtype).to(p.device)
                    p += 0.1 * (p.abs().mean() + 0.1) * noise
        losses, gradients = route(state, samples)
        if not all(
            _equal(t.nan_to_num(), t[:1].nan_to_num().expand_as(t))
            for t in (losses, *gradients.values(), *state.buffers.values())
        ):
            return False
    return True


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b))
