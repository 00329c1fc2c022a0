"""Which route a fleet takes: tried on the first batch. The same model and sizes always take the same route."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from theodolite.arguments import either
from theodolite.interrupts import unbroken, unbroken_context
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.calling import Loss
from theodolite.problem.derivatives.second_order import quiet_vmap
from theodolite.problem.state_guard import cuda_devices, random_states_kept
from theodolite.problem.tensors import bytes_of
from theodolite.training.fleets.data import FleetBatch
from theodolite.training.fleets.routes import Gradient, Gradients, LoopRoute, Route, VmapRoute
from theodolite.training.fleets.run import ReplicaStack, equal_bits
from theodolite.training.fleets.state import FleetState

RouteName = Literal["auto", "vmap", "loop"]

#: Multiplications in the convolutions of one replica's forward pass above which one replica after the other is faster. Measured
#: with 16 replicas: vmap is 2.6 times faster at 0.7e6, 1.4 times at 3e6, and slower (0.9) at 7.7e6. A stopwatch would
#: do better on some machine, but the route decides the last bits, and those must not depend on who else uses the cores.
CONVOLUTION_WORK = 5e6


@dataclass(frozen=True)
class Choice:
    """A route, the replicas that fit into memory at once, and why it is not vmap, or not for all at once, where it is not.

    `sample_bytes` is what one replica keeps of one sample in a training step.
    """

    route: Route
    chunk: int
    sample_bytes: int
    notes: tuple[str, ...] = ()


def choose_route(
    want: RouteName,
    replicas: ReplicaStack,
    loss: Loss,
    gradient: Gradient | None,
    batch: Callable[[slice], FleetBatch],
    *,
    random: Callable[[], list[Tensor]],
    memory: float,
    bitwise: bool,
) -> Choice:
    """The route for `batch`, a function of the replicas; `random` are their random states. No number of the replicas changes."""
    either("route", want, ("auto", "vmap", "loop"))
    state, module, everyone = replicas.state, replicas.state.module, replicas.state.replicas
    own = batch(slice(0, 1))
    first = torch.zeros(1, dtype=torch.long, device=state.device)
    alone = LoopRoute(module, loss, gradient)
    with random_states_kept(cuda_devices(module)), _convolution_work(module) as work:
        before = torch.get_rng_state()
        single = alone(state.rows(first), own)  # a model that refuses the data says so here, in plain words
        draws = not torch.equal(before, torch.get_rng_state())
    single = single[0], Gradients({name: g.clone() for name, g in single[1].items()})  # the next pass overwrites them
    with random_states_kept(cuda_devices(module)):
        activations = _kept_bytes(alone, state.rows(first), own)
    samples, weights = bytes_of(own.leaves), 2 * bytes_of(single[1])  # gradients, and as much for the optimizer's work
    each = (activations + samples) // own.size

    def by_loop(why: str, states: list[Tensor] | None = None) -> Choice:
        chunk, notes = _chunk(everyone, memory, samples + weights)
        return Choice(LoopRoute(module, loss, gradient, states, apart=bitwise), chunk, each, (why, *notes))

    if draws:
        if want == "vmap":
            raise ValueError("route='vmap' cannot run a model that draws random numbers (dropout, ...); use route='loop'.")
        return by_loop("the model draws random numbers: each replica runs alone", random())
    if want == "loop" or (want == "auto" and everyone == 1):
        return by_loop("route='loop' was asked for" if want == "loop" else "there is one replica only")
    if want == "auto" and sum(work) > CONVOLUTION_WORK:
        return by_loop("large convolutions are faster one replica after the other")
    vmap = VmapRoute(module, loss, gradient)
    chunk, notes = _chunk(everyone, memory, activations + samples + weights)
    trouble = _trouble(vmap, replicas, chunk, batch(slice(0, chunk)), single, bitwise)
    if trouble and want == "vmap":
        raise ValueError(f"route='vmap' does not work for this model: {trouble}. Use route='auto' or 'loop'.")
    return by_loop(f"vmap does not run this model: {trouble}") if trouble else Choice(vmap, chunk, each, notes)


def _chunk(replicas: int, memory: float, each: int) -> tuple[int, tuple[str, ...]]:
    """Replicas at once, in chunks of about equal size."""
    fitting = replicas if memory >= replicas * each else max(1, int(memory // each))
    chunks = -(-replicas // fitting)
    if chunks == 1:
        return replicas, ()
    note = (
        f"{replicas} replicas take turns in {chunks} chunks: one needs some {each / 2**20:.3g} MiB, {memory / 2**20:.3g} are "
        "allowed"
    )
    return -(-replicas // chunks), (note,)


def _kept_bytes(loop: LoopRoute, state: FleetState, batch: FleetBatch) -> int:
    """Bytes of what one replica keeps for its backward pass; 0 for models with derivatives inside, where torch cannot tell."""
    kept: dict[int, int] = {}  # by address: the same tensor may be kept by several operations

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    try:
        with unbroken(torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)):
            loop(state, batch)
    except Exception:  # torch.func refuses the hooks; without them the same pass has just run
        return 0
    return sum(kept.values())


@unbroken_context
def _convolution_work(module: nn.Module) -> Iterator[list[int]]:
    """Multiplications of each call of a convolution."""
    work: list[int] = []

    def note(call: Call) -> None:
        assert isinstance(call.module, _ConvNd)
        work.append(call.output.numel() * call.module.weight[0].numel())

    convolutions = {name: part for name, part in module.named_modules() if isinstance(part, _ConvNd)}
    with Hooks(convolutions, note, in_copies=True):
        yield work


def _trouble(
    route: VmapRoute, replicas: ReplicaStack, chunk: int, batch: FleetBatch, single: tuple[Tensor, Gradients], bitwise: bool
) -> str:
    """Why vmap cannot be used; empty if it gives the numbers of a replica alone."""
    some = replicas.rows(slice(0, chunk))
    try:
        with quiet_vmap():
            buffers = {name: t.clone() for name, t in some.state.buffers.items()}  # this pass must leave no trace
            losses, gradients = route(replace(some.state, buffers=buffers), batch)
            if bitwise and not equal_bits(some, route, batch):
                return "replicas that see equal data do not stay bitwise equal"
            replicas.lay_out_like(gradients)
    except Exception as error:  # vmap raises many kinds
        cause = error.__cause__ or error
        return " ".join(str(cause).split())[:200] or type(cause).__name__
    loss, alone = single  # (1,), (1, *shape)
    if set(gradients) != set(alone):
        return "it finds gradients of other parameters than a replica alone"
    # The gradient is compared as a whole: a part that is zero but for rounding has no relative error.
    ours, theirs = (torch.cat([g[name][0].flatten() for name in alone]) for g in (gradients, alone))
    tolerance = torch.finfo(loss.dtype).eps ** 0.5
    floor = tolerance * max(1.0, float(loss.abs()))  # a gradient far below this is rounding
    worst = max(_distance(losses[:1], loss, floor), _distance(ours, theirs, floor))
    return f"its numbers differ from those of a replica alone by {worst:.1g}" if worst > tolerance else ""


def _distance(a: Tensor, b: Tensor, floor: float) -> float:
    if not bool(torch.isfinite(b).all()):
        return 0.0  # this replica diverges at once; nothing to compare
    return float((a - b).norm() / b.norm().clamp_min(floor))
