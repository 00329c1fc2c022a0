"""Losses and gradients of all replicas on a batch: as one vectorised program, or one replica after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from theodolite.interrupts import called_within, unbroken
from theodolite.problem.batches import Batch
from theodolite.problem.calling import Loss, ModelCall, main_output
from theodolite.training.fleets.data import FleetBatch
from theodolite.training.fleets.state import FleetState, Stack

# Linear layers of stacked replicas, arranged so that batched matrix products run at full speed.


class NarrowLinear(TorchFunctionMode):
    """Compute `linear` as (W xᵀ)ᵀ where it has no more outputs than samples.

    Batched products whose result has few columns (ten classes, say) run at a quarter of the speed of the transposed ones,
    in the forward and in the backward pass. The numbers are the same up to the order of summation.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.linear and not kwargs and args[0].ndim == args[1].ndim == 2 and len(args[1]) <= len(args[0]):
            inputs, weight, *bias = args
            outputs = torch.matmul(weight, inputs.t()).t()
            return outputs if not bias or bias[0] is None else outputs + bias[0]
        return function(*args, **(kwargs or {}))


# Common losses of all replicas at once, where that is faster than torch's own under vmap.


StackedLoss = Callable[[Tensor, Tensor], Tensor]  # outputs (R, B, ...), targets (R, B, ...) or (B, ...) -> (R,)


def has_short_cut(loss: Any) -> bool:
    """Whether `stacked_loss` knows the loss, for outputs and targets of fitting shapes."""
    if type(loss) is nn.MSELoss:
        return bool(loss.reduction == "mean")
    plain = type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean"
    return plain and loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index < 0


def stacked_loss(loss: Any, outputs: Tensor, targets: Tensor, *, shared: bool) -> StackedLoss | None:
    """A loss for stacked outputs with the numbers of `loss`, None where there is no short cut.

    `shared` says that the targets have no replica axis.

    >>> z, y = torch.zeros(5, 3, 4), torch.tensor([0, 1, 3])
    >>> stacked_loss(nn.CrossEntropyLoss(), z, y, shared=True)(z, y)[:2]      # log 4
    tensor([1.3863, 1.3863])
    """
    if not has_short_cut(loss):
        return None
    shape = targets.shape if shared else targets.shape[1:]
    if type(loss) is nn.MSELoss:
        return _squared_error if outputs.shape[1:] == shape else None
    labels = outputs.ndim == 3 and len(shape) == 1 and not targets.is_floating_point()
    return _cross_entropy if labels and int(targets.min()) >= 0 else None  # below 0 are labels to ignore


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes are moved away from the last axis: torch's log-softmax over a short last axis is some ten times slower."""
    logs = F.log_softmax(outputs.transpose(1, 2).contiguous(), dim=1)  # (R, C, B)
    index = targets.expand(len(outputs), -1)[:, None]  # (R, 1, B)
    return torch.gather(logs, 1, index).squeeze(1).mean(1).neg()


#: `(module, parameters, buffers, batch) -> (loss, gradients by name)` of one replica.
Gradient = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Tensor], Batch], tuple[Tensor, Mapping[str, Tensor]]]


class Gradients(dict[str, Tensor]):
    """Gradients (R, *shape) by name; parameters that enter no replica's loss are left out.

    `absent` names the rows whose loss a parameter did not enter, while it entered others' (layers skipped at random).
    """

    absent: dict[str, list[int]]

    def __init__(self, found: Mapping[str, Tensor], absent: Mapping[str, list[int]] | None = None) -> None:
        super().__init__(found)
        self.absent = dict(absent or {})

    def rows(self, rows: Tensor) -> Gradients:
        """Those of some replicas."""
        places = {row: place for place, row in enumerate(rows.tolist())}
        absent = {name: [places[row] for row in out if row in places] for name, out in self.absent.items()}
        return Gradients({name: g[rows] for name, g in self.items()}, {name: out for name, out in absent.items() if out})


class Route(ABC):
    """How a fleet computes its losses and gradients."""

    name: str

    def __init__(self, module: nn.Module, loss: Loss, gradient: Gradient | None) -> None:
        self.module, self.loss, self.gradient = module, loss, gradient
        self.call = ModelCall(module, loss)

    @abstractmethod
    def __call__(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Gradients]:
        """Losses (R,) and gradients."""

    def for_chunk(self) -> Route:
        """The same for one of several chunks that take turns."""
        return self

    @abstractmethod
    def evaluate(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Tensor]:
        """Losses (R,) and outputs (R, B, ...), without gradients."""

    @abstractmethod
    def outputs(self, state: FleetState, batch: FleetBatch) -> Tensor | None:
        """What the loss function is given (R, B, ...), without gradients; None where that is no tensor."""


class VmapRoute(Route):
    """All replicas at once: vmap over the forward pass, one ordinary backward pass through the stacked program."""

    name = "vmap"

    def __call__(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Gradients]:
        if self.gradient is not None:
            return self._own_gradient(state, batch)
        names, stacked = list(state.parameters), list(state.parameters.values())
        with unbroken(torch.enable_grad()):
            losses, _ = self._forward(state, batch)
            # Replica r's loss knows replica r's weights only: the gradient of the sum is the stack of gradients.
            gradients = torch.autograd.grad(losses, stacked, torch.ones_like(losses), allow_unused=True)
        found = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
        return losses.detach(), Gradients(found)

    def losses(self, state: FleetState, batch: FleetBatch) -> Tensor:
        """Losses (R,) with their graph, which leads to the parameters of `state` and beyond."""
        return self._forward(state, batch)[0]

    @called_within(torch.no_grad)
    def evaluate(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Tensor]:
        return self._forward(state, batch)

    @called_within(torch.no_grad)
    def outputs(self, state: FleetState, batch: FleetBatch) -> Tensor | None:
        plain = True

        def main(parameters: Stack, buffers: Stack, one: Batch) -> Tensor:
            nonlocal plain
            given = self.call.loss_input({**parameters, **buffers}, one, 0)
            plain = isinstance(given, Tensor)
            return main_output(given)

        found: Tensor = self._map(main, state, batch)
        return found if plain else None

    def _forward(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Tensor]:
        """Losses and outputs."""
        if not has_short_cut(self.loss):
            losses, outputs = self._map(lambda p, b, one: self.call({**p, **b}, one, 0).with_output, state, batch)
            return losses, outputs
        outputs = self._map(lambda p, b, one: main_output(self.call.loss_input({**p, **b}, one, 0)), state, batch)
        (*_, targets), (*_, dim) = batch.leaves, batch.dims
        quick = stacked_loss(self.loss, outputs, targets, shared=dim is None)
        if quick is None:
            assert self.loss is not None
            return vmap(self.loss, (0, dim))(outputs, targets), outputs
        return quick(outputs, targets), outputs

    def _own_gradient(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Gradients]:
        gradient = self.gradient
        assert gradient is not None
        detached = replace(state, parameters={name: p.detach() for name, p in state.parameters.items()})
        losses, gradients = self._map(lambda p, b, one: gradient(self.module, p, b, one), detached, batch)
        return losses.detach(), Gradients({name: g.detach() for name, g in gradients.items()})

    def _map(self, function: Callable[[Stack, Stack, Batch], Any], state: FleetState, batch: FleetBatch) -> Any:
        """`function` of parameters, buffers and batch, for all replicas."""

        def one(parameters: Stack, buffers: Stack, *leaves: Any) -> Any:
            with NarrowLinear():
                return function(parameters, buffers, batch.one(leaves))

        return vmap(one, in_dims=(0, 0, *batch.dims))(state.parameters, state.buffers, *batch.leaves)


class LoopRoute(Route):
    """One replica after the other, for models that vmap refuses (LSTM, dropout, ...) or that gain nothing from it.

    A model that draws random numbers gets those it would have alone: each replica has a random state of its own in `random`.
    With `apart` each replica is copied to one and the same place in memory for its turn, and its samples too: what a matrix
    kernel does cannot depend on the replica. The gradients are overwritten by the next call.
    """

    name = "loop"

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        gradient: Gradient | None,
        random: list[Tensor] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        super().__init__(module, loss, gradient)
        self.random, self.apart = random, apart
        self._bound: list[Tensor] = []
        self._models: list[nn.Module] = []
        self._gradients: dict[str, Tensor] = {}

    def __call__(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Gradients]:
        self._bind(state)
        losses, used = [], []
        for r, number in enumerate(state.ids):
            if self.random is not None:
                torch.set_rng_state(self.random[number])
            loss, gradients = self._one(state, r, batch.replica(r, copied=self.apart))
            if self.random is not None:
                self.random[number] = torch.get_rng_state()
            losses.append(loss.detach())
            for name, g in gradients.items():  # copied at once: the next replica's gradient finds warm memory
                self._gradients[name][r].copy_(g)
            used.append(set(gradients))
        found = {name: g for name, g in self._gradients.items() if any(name in own for own in used)}
        absent = {name: [r for r, own in enumerate(used) if name not in own] for name in found}
        return torch.stack(losses), Gradients(found, {name: rows for name, rows in absent.items() if rows})

    def for_chunk(self) -> LoopRoute:
        return LoopRoute(self.module, self.loss, self.gradient, self.random, apart=self.apart)

    @called_within(torch.no_grad)
    def evaluate(self, state: FleetState, batch: FleetBatch) -> tuple[Tensor, Tensor]:
        each = [self.call(tensors, one, 0) for tensors, one in self._each(state, batch)]
        return torch.stack([one.loss for one in each]), torch.stack([one.output for one in each])

    @called_within(torch.no_grad)
    def outputs(self, state: FleetState, batch: FleetBatch) -> Tensor | None:
        each = [self.call.loss_input(tensors, one, 0) for tensors, one in self._each(state, batch)]
        return torch.stack(each) if all(isinstance(one, Tensor) for one in each) else None

    def _row(self, state: FleetState, r: int) -> tuple[Stack, Stack]:
        """Parameters and buffers of one replica."""
        own = ({name: t.detach()[r] for name, t in stack.items()} for stack in (state.parameters, state.buffers))
        parameters, buffers = ({name: t.clone() for name, t in row.items()} if self.apart else row for row in own)
        return parameters, buffers

    def _each(self, state: FleetState, batch: FleetBatch) -> Iterator[tuple[Stack, Batch]]:
        """All tensors of one replica after the other, and its samples."""
        for r in range(state.replicas):
            parameters, buffers = self._row(state, r)
            yield {**parameters, **buffers}, batch.replica(r, copied=self.apart)

    def _bind(self, state: FleetState) -> None:
        """Modules that live on the rows of the stack, made anew when the stack is another."""
        tensors = [*state.parameters.values(), *state.buffers.values()]
        if len(tensors) == len(self._bound) and all(a is b for a, b in zip(tensors, self._bound, strict=True)):
            return
        self._bound = tensors
        if self.gradient is not None:
            self._models = []
        elif self.apart:
            self._models = [state.replica(0)] * state.replicas
        else:
            self._models = [state.bound_replica(r) for r in range(state.replicas)]
        self._gradients = {name: torch.empty_like(p, requires_grad=False) for name, p in state.parameters.items()}

    def _one(self, state: FleetState, r: int, one: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.gradient is not None:
            return self.gradient(self.module, *self._row(state, r), one)
        model = self._models[r]
        if self.apart:
            state.load(model, r)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with unbroken(torch.enable_grad()):
            loss = ModelCall(model, self.loss)({}, one, 0).loss
            each = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        if self.apart:
            state.keep_buffers(model, r)
        return loss, {name: g for name, g in zip(trained, each, strict=True) if g is not None}
