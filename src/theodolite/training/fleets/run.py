"""One training run of a fleet: the replicas in the stack, steps, frozen replicas, the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.interrupts import called_within, unbroken
from theodolite.training.fleets.data import FleetBatch, FleetFeed
from theodolite.training.fleets.optimizers import FleetOptimizer, State
from theodolite.training.fleets.routes import Gradients, Route
from theodolite.training.fleets.state import FleetState, Stack, laid_out_like, pick

# The replicas in the stack: weights, optimizer state, rates; frozen ones are held still or leave the stack.


@dataclass
class ReplicaStack:
    """All that belongs to a replica, stacked: `rate` is (R, G), one column for each of the `groups` of parameters.

    `rule` moves the replicas, with settings that may be their own; `count` (R,) are the steps taken. `missed` (R,) by name are
    the steps that left a parameter alone, because it did not enter the loss.
    """

    state: FleetState
    rule: FleetOptimizer
    memory: State
    rate: Tensor
    groups: tuple[tuple[str, ...], ...]
    count: Tensor
    missed: Stack

    def __post_init__(self) -> None:
        self._uneven = any(bool(t.any()) for t in self.missed.values())

    def rows(self, rows: Tensor | slice) -> ReplicaStack:
        """A copy of some replicas; of a slice, these in the same memory."""
        memory = {column: {name: pick(t, rows) for name, t in stack.items()} for column, stack in self.memory.items()}
        missed = {name: t[rows] for name, t in self.missed.items()}
        rule = self.rule.rows(rows) if hasattr(self.rule, "rows") else self.rule
        return ReplicaStack(self.state.rows(rows), rule, memory, self.rate[rows], self.groups, self.count[rows], missed)

    def _stacks(self) -> tuple[Stack, ...]:
        """What changes in training, by name."""
        return self.state.parameters, self.state.buffers, *self.memory.values(), self.missed, {"count": self.count}

    @called_within(torch.no_grad)
    def write(self, rows: Tensor, other: ReplicaStack) -> None:
        """Take over the replicas of `other` as the given rows."""
        for mine, theirs in zip(self._stacks(), other._stacks(), strict=True):
            for name, t in mine.items():
                t[rows] = theirs[name].detach()
        self._uneven |= other._uneven

    def lay_out_like(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep weights and optimizer state in the memory order in which the gradients come."""
        for stack in (self.state.parameters, *self.memory.values()):
            stack |= {name: laid_out_like(stack[name], g) for name, g in gradients.items() if stack[name].ndim == g.ndim}

    @called_within(torch.no_grad)
    def step(self, gradients: Gradients, factor: float | Tensor) -> None:
        """One step of the optimizer; `factor` on the rates is one for all or (R,)."""
        uneven = self._uneven or gradients.absent or len(gradients) < len(self.state.parameters)
        for rate, names in zip(self._rates(factor), self.groups, strict=True):
            if uneven:
                self._uneven_step(gradients, rate, names)
                continue
            own = gradients if len(self.groups) == 1 else {name: gradients[name] for name in names}
            self.rule.step(self.state.parameters, own, self.memory, rate, self.count)
        self.count += 1

    def _rates(self, factor: float | Tensor) -> tuple[Tensor, ...]:
        """The rates (R,) of each group."""
        if isinstance(factor, Tensor):
            return (self.rate * factor[:, None]).unbind(1)
        return (self.rate if factor == 1.0 else self.rate * factor).unbind(1)

    def _uneven_step(self, gradients: Gradients, rate: Tensor, names: tuple[str, ...]) -> None:
        """As torch does it: a parameter without gradient stays as it is, and its own steps are counted."""
        self._uneven = True
        for name in names:
            p = self.state.parameters[name]
            if name not in gradients:
                self.missed[name] += 1
                continue
            rows = torch.tensor(gradients.absent.get(name, []), dtype=torch.long, device=p.device)
            stacks = [p, *(stack[name] for stack in self.memory.values())]
            before = [t.detach()[rows] for t in stacks]
            own_count = self.count - self.missed[name]
            self.rule.step(self.state.parameters, {name: gradients[name]}, self.memory, rate, own_count)
            for t, old in zip(stacks, before, strict=True):
                t[rows] = old
            self.missed[name][rows] += 1


def same_bits_without(
    replicas: ReplicaStack,
    kept: Tensor,
    route: Route,
    batches: Iterable[FleetBatch],
    factor: float | Tensor,
) -> bool:
    """Whether the kept replicas take bitwise the same steps when the others leave the stack.

    Matrix kernels may sum in another order when a matrix starts at another address; that is tried, not assumed.
    """
    for batch in batches:
        if not equal_bits(replicas, route, batch):
            return False
        together, apart = replicas.rows(torch.arange(len(replicas.rate), device=kept.device)), replicas.rows(kept)
        losses, gradients = route(together.state, batch)
        fewer_losses, fewer = route(apart.state, batch.rows(kept))
        same = all(torch.equal(g[kept], fewer[name]) for name, g in gradients.items())
        if not same or not torch.equal(losses[kept], fewer_losses):
            return False
        together.step(gradients, factor)
        apart.step(fewer, factor[kept] if isinstance(factor, Tensor) else factor)
        if not all(torch.equal(p[kept], apart.state.parameters[name]) for name, p in together.state.parameters.items()):
            return False
    return True


def equal_bits(replicas: ReplicaStack, route: Route, batch: FleetBatch, draws: int = 6) -> bool:
    """Whether replicas that are equal and see equal data get bitwise equal losses, gradients and buffers wherever they stand.

    Some kernels round the last few numbers of a stack in another way than the rest (BatchNorm over vectors does), and that
    shows for some numbers only: it is tried with the weights of the first replica and with several others near them.
    """
    same = torch.zeros(len(replicas.rate), dtype=torch.long, device=replicas.rate.device)
    samples, generator = batch.rows(same), torch.Generator().manual_seed(0)
    for draw in range(draws):
        state = replicas.state.rows(same)
        if draw:
            with unbroken(torch.no_grad()):
                for p in state.parameters.values():
                    noise = torch.randn(p.shape[1:], generator=generator, dtype=p.dtype).to(p.device)
                    p += 0.1 * (p.abs().mean() + 0.1) * noise
        losses, gradients = route(state, samples)
        if not all(
            torch.equal(t.nan_to_num(), t[:1].nan_to_num().expand_as(t))
            for t in (losses, *gradients.values(), *state.buffers.values())
        ):
            return False
    return True


#: `(step, losses (R,)) -> bool, or bool (R,)`: which replicas stop. Frozen replicas, and those of other chunks, have loss NaN.
Stop = Callable[[int, Tensor], Tensor | bool]

#: Frozen replicas leave the stack once they are this share of it.
DROP_SHARE = 0.25


@dataclass(frozen=True)
class Rules:
    """When a replica is frozen.

    Its loss is not finite or above `blow_up` times its first, at most `until` times its first, or `stop` says so.
    """

    blow_up: float
    until: float | None
    stop: Stop | None


class FleetRun:
    """Takes the steps of one call of `Fleet.train`.

    `whole` are the replicas trained together, all of the fleet or a chunk of it; `live` are those in the stack: all at first,
    later without those that were frozen and dropped. Frozen replicas still in the stack are set back after each step, which
    leaves their neighbours alone. `fleet` is the size of the whole fleet.
    """

    def __init__(
        self,
        whole: ReplicaStack,
        feed: FleetFeed,
        route: Route,
        rules: Rules,
        steps: int,
        lost: Tensor,
        fleet: int,
    ) -> None:
        self.whole, self.live, self.feed, self.route, self.rules = whole, whole, feed, route, rules
        replicas, device = len(whole.rate), whole.rate.device
        self.first, self.fleet = whole.state.ids[0], fleet
        self.table = torch.full((steps, replicas), torch.nan, dtype=whole.rate.dtype, device=device)
        self.diverged_at: list[int | None] = [0 if each else None for each in lost.tolist()]
        self.stopped_at: list[int | None] = [None] * replicas
        self.resting = lost.to(device, copy=True)  # of the live ones
        self.frozen: tuple[Tensor, ReplicaStack] | None = None  # rows of the live ones, and what they were
        if bool(lost.any()):
            self._hold()
        self.upper = torch.full((replicas,), torch.inf, device=device)
        self.lower = torch.full((replicas,), -torch.inf, device=device)
        self.may_drop = True

    @property
    def rows(self) -> Tensor | None:
        """Places of the live replicas among those trained together, None for all."""
        return None if self.live is self.whole else torch.tensor(self._places(), device=self.live.rate.device)

    def _places(self) -> list[int]:
        return [number - self.first for number in self.live.state.ids]

    @property
    def over(self) -> bool:
        return bool(self.resting.all())

    def step(self, step: int, epoch: int, place: int, factor: float | Tensor) -> None:
        """Losses, gradients, who is frozen, and the optimizer's step for the others."""
        rows = self.rows
        batch = self.feed.batch(epoch, place, rows)
        losses, gradients = self.route(self.live.state, batch)
        self.table[step, slice(None) if rows is None else rows] = losses
        if step == 0:
            self._set_limits(losses)
        fine = (losses < self.upper) & (losses > self.lower) | self.resting
        if self.rules.stop is not None:
            fine &= ~self._asked_to_stop(step)
        if not bool(fine.all()):
            self._freeze(step, losses, ~fine)
            if self.over:
                return
            gradients = self._drop(gradients, epoch, factor)
        self.live.step(gradients, self._own(factor))
        if self.frozen is not None:
            self.live.write(*self.frozen)

    def _own(self, factor: float | Tensor) -> float | Tensor:
        """The factors of the live replicas."""
        return factor[list(self.live.state.ids)].to(self.live.rate) if isinstance(factor, Tensor) else factor

    def _set_limits(self, losses: Tensor) -> None:
        first = losses.abs()
        known = torch.isfinite(first) & (first > 0)
        self.upper = torch.where(known, self.rules.blow_up * first, torch.inf)
        if self.rules.until is not None:
            self.lower = torch.where(known, self.rules.until * first, 0.0)

    def _asked_to_stop(self, step: int) -> Tensor:
        assert self.rules.stop is not None
        ids = list(self.live.state.ids)
        losses = self.table.new_full((self.fleet,), torch.nan)
        losses[ids] = self.table[step, self._places()].masked_fill(self.resting, torch.nan)
        verdict = torch.as_tensor(self.rules.stop(step, losses), device=losses.device)
        return verdict.expand(len(losses))[ids] & ~self.resting

    def _freeze(self, step: int, losses: Tensor, now: Tensor) -> None:
        places = self._places()
        for row in now.nonzero()[:, 0].tolist():
            lost = not bool(losses[row] < self.upper[row])
            (self.diverged_at if lost else self.stopped_at)[places[row]] = step
        self.resting |= now
        self._hold()

    def _hold(self) -> None:
        rows = self.resting.nonzero()[:, 0]
        self.frozen = rows, self.live.rows(rows)

    def _drop(self, gradients: Gradients, epoch: int, factor: float | Tensor) -> Gradients:
        """Let the frozen replicas leave the stack, where the others do not notice; returns the gradients of those who stay."""
        if not self.may_drop or int(self.resting.sum()) < DROP_SHARE * len(self.resting):
            return gradients
        kept = (~self.resting).nonzero()[:, 0]
        sizes = {self.feed.batch(epoch, place, self.rows).size: place for place in (0, self.feed.batches - 1)}
        batches = (self.feed.batch(epoch, place, self.rows) for place in sizes.values())
        if self.route.name != "loop" and not same_bits_without(self.live, kept, self.route, batches, self._own(factor)):
            self.may_drop = False
            return gradients
        self.sync()
        self.live = self.live.rows(kept)
        self.upper, self.lower, self.resting = self.upper[kept], self.lower[kept], self.resting[kept]
        self.frozen = None
        return gradients.rows(kept)

    def sync(self) -> None:
        """Bring the whole fleet up to date."""
        rows = self.rows
        if rows is not None:
            self.whole.write(rows, self.live)

    def losses(self, steps: int) -> Tensor:
        """(R, T): inf from divergence on, the last value after a stop."""
        table = self.table[:steps].T.contiguous()
        for r, (lost, done) in enumerate(zip(self.diverged_at, self.stopped_at, strict=True)):
            if lost is not None:
                table[r, lost:] = torch.inf
            elif done is not None:
                table[r, done:] = table[r, done].clone()
        return table.cpu()
