"""A training run as a function of its hyperparameters: flat weights, the batches in order, and what a step needs of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import about
from theodolite.errors import ArgumentError, NotRepeatableError
from theodolite.interrupts import unbroken, unbroken_context
from theodolite.measures.data_audit.discreteness import sample_keys
from theodolite.measures.stepsize.meta_gradients.hyperparameters import Hyperparameters, Units, read_optimizer
from theodolite.measures.stepsize.meta_gradients.update_rules import Rule
from theodolite.operators.autograd.graphs import graph_bytes
from theodolite.operators.autograd.operator import CHUNK, BlockRoute
from theodolite.operators.linear_stacks.products import StackPass
from theodolite.operators.linear_stacks.recognition import find_stack
from theodolite.problem import Batch, Problem, join_like
from theodolite.problem.batches import BatchParser, is_bare, read_data
from theodolite.problem.calling import ModelCall
from theodolite.problem.derivatives.exact_derivatives import ExactDerivatives
from theodolite.problem.derivatives.second_order import refuse_first_order_layers, second_order_kernels
from theodolite.training.fleets.state import stack_replicas
from theodolite.training.schedules import Feed, as_schedule

#: Products of the Hessian of a batch at the weights as they stand: rows (k, p) -> rows.
Products = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Slope:
    """The loss of one batch, its gradient (p,), and the products of its Hessian where they were asked for."""

    loss: float
    gradient: Tensor
    products: Products | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how it is scored: the arguments of a run, as the user gave them."""

    factory: Any
    optimizer: Any
    train: Any
    valid: Any
    loss: Any
    steps: int
    hyper: tuple[str, ...]
    settings: Mapping[str, Any]
    split: str
    schedule: Any = None
    knots: int = 5
    units: Units = "log"
    batch_size: int | None = None
    seed: int = 0
    target: str = "labels"


class Unrolled:
    """A model of one's own whose parameters are views of one flat vector, trained step by step.

    `vector` are the weights as they stand; whoever trains writes into it. `score` is the `Problem` that the result is scored on.
    Without `derivatives` nothing is refused that only these would get wrong.
    """

    def __init__(self, task: Task, *, double: bool = False, derivatives: bool = True) -> None:
        self.task, self.double = task, double
        self.model = stack_replicas(task.factory, [task.seed]).replica(0).train()
        loss = task.loss
        _refuse_precision(self.model)
        if double:
            self.model = self.model.double()
            loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
        parse = BatchParser.of(self.model, loss, task.target)
        with about("train"):
            self._feed = Feed(_held(task.train, parse), parse, batch_size=task.batch_size, shuffle=True, seed=task.seed)
            first = next(iter(self._feed.epoch(0)), None)
        if first is None:
            raise ValueError("train holds no batches.")
        self.problem = self._checked(
            Problem, self.model, loss, [self._placed(first)], mode="train", target=task.target, check=derivatives
        )
        if derivatives:
            self._refuse()
        data = task.train if task.split == "train" else task.valid
        with about(task.split):
            data = [batch.in_float64() for batch in read_data(data, parse)] if double else data
            self.score = Problem(self.model, loss, data, target=task.target, check=False)
        self.vector = self._flattened()
        self.start = self.vector.clone()
        self._call = ModelCall(self.model, self.problem.loss_function)
        self._stack = find_stack(self.problem)
        self._route = BlockRoute(self.problem, batched=None)
        recipe = read_optimizer(task.optimizer, task.settings, self.problem.parameters)
        layers = {name: layer.members(bias=True) for name, layer in self.problem.layers.items()}
        sizes = self.problem.selection.sizes
        self.hyper = Hyperparameters(
            task.hyper,
            recipe,
            sizes,
            layers,
            units=task.units,
            steps=task.steps,
            schedule=as_schedule(task.schedule),
            knots=task.knots,
            dtype=self.problem.dtype,
        )
        self.rule: Rule = self.hyper.rule

    @property
    def route(self) -> str:
        """How products of Hessians are made."""
        return "double backward" if self._stack is None else "closed form of a linear stack"

    @property
    def steps(self) -> int:
        return self.task.steps

    def fresh(self) -> tuple[Tensor, list[Tensor]]:
        """The weights back at their start, and the columns of the rule before the first step."""
        self.vector.copy_(self.start)
        return self.vector, [torch.zeros_like(self.vector) for _ in self.rule.columns]

    @unbroken_context
    def training(self) -> Iterator[None]:
        """The state in which the model is called; between the calls autograd is off."""
        with self.problem.session(second=False), second_order_kernels(), torch.no_grad():
            yield

    def batches(self, first: int = 0, last: int | None = None) -> Iterator[Batch]:
        """Those of the steps from `first` to before `last`, in the order of `th.train` with the same seed."""
        step, last = first, self.steps if last is None else last
        while step < last:
            epoch, place = divmod(step, len(self._feed))
            for batch in islice(self._feed.epoch(epoch), place, place + last - step):
                yield self._placed(batch)
                step += 1

    def _placed(self, batch: Batch) -> Batch:
        device = next(self.model.parameters()).device
        batch = batch.in_float64() if self.double else batch
        return batch if device.type == "cpu" else batch.to(device, None)

    # One batch at the weights as they stand, inside `training`

    def slope(self, batch: Batch, place: int, *, products: bool = False) -> Slope:
        """Loss and gradient; with `products` also those of the Hessian, which are good until the weights move."""
        if self._stack is not None and (run := self._stack.run(batch)) is not None:
            found = StackPass.of(run)
            gradient = found.gradient(torch.empty_like(self.vector))
            return Slope(float(run.loss), gradient, lambda rows: _in_chunks(found.product, rows))
        leaves = self.problem.parameters
        with unbroken(torch.enable_grad()):
            with ExactDerivatives():
                loss = self._call({}, batch, place).loss
            grads = torch.autograd.grad(loss, leaves, create_graph=products, allow_unused=True)
        gradient = join_like([None if g is None else g.detach() for g in grads], leaves)
        if not products:
            return Slope(float(loss.detach()), gradient)
        size = graph_bytes([g for g in grads if g is not None], without=leaves) if place == 0 else 0
        return Slope(float(loss.detach()), gradient, lambda rows: self._route.pull_back(grads, leaves, rows), size)

    def loss_of(self, vector: Tensor, batch: Batch, place: int) -> Tensor:
        """The loss of a batch at weights of its own, with its graph."""
        with unbroken(torch.enable_grad()), ExactDerivatives():
            return self._call(self.problem.tensors(self._split(vector)), batch, place).loss

    def score_of(self, vector: Tensor) -> Tensor:
        """The loss that is scored at weights of their own, with its graph."""
        total: Any = 0.0
        with self.score.session(), unbroken(torch.enable_grad()):
            tensors = self.score.tensors(self._split(vector))
            for i, share, batch in self.score.iterate():
                total = total + share * self.score.evaluate(tensors, batch, i).loss
        return total  # type: ignore[no-any-return]

    def _split(self, vector: Tensor) -> list[Tensor]:
        sizes, shapes = self.problem.selection.sizes, self.problem.selection.shapes
        return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]

    def _flattened(self) -> Tensor:
        """One vector that all measured parameters become views of."""
        vector = torch.cat([p.detach().reshape(-1) for p in self.problem.parameters])
        with unbroken(torch.no_grad()):
            for p, part in zip(self.problem.parameters, self._split(vector), strict=True):
                p.data = part
        return vector

    # What is refused

    def _checked(self, make: Callable[..., Problem], *args: Any, **options: Any) -> Problem:
        try:
            with about("train"):
                return make(*args, **options)
        except NotRepeatableError as error:
            raise NotRepeatableError(
                "A meta-gradient is the derivative of one fixed run, and this one draws random numbers. "
                f"{str(error).split(' Remedy')[0]} Remedy: let the factory build the model without them (nn.Dropout(0.0))."
            ) from error

    def _refuse(self) -> None:
        problem = self.problem
        refuse_first_order_layers(problem.model)
        before = {name: b.clone() for name, b in self.model.named_buffers()}
        batch = next(iter(problem.data))
        with problem.session(second=False):
            ModelCall(self.model, problem.loss_function)({}, batch, 0)
        moved = [name for name, b in self.model.named_buffers() if not torch.equal(b, before[name])]
        if moved:
            raise ValueError(
                f"{moved[0]} is a buffer that training changes, as BatchNorm's running averages are, and derivatives do not "
                "follow it. Remedy: GroupNorm or LayerNorm in its place, track_running_stats=False, or mode='smoothed'."
            )


def _refuse_precision(model: nn.Module) -> None:
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if kinds not in ({torch.float32}, {torch.float64}):
        raise ValueError(
            "factory: a meta-gradient needs all parameters in float32, or all in float64. Got "
            f"{', '.join(sorted(str(kind).removeprefix('torch.') for kind in kinds))}."
        )


def refuse_overlap(train: Problem, valid: Problem) -> None:
    """Raise where validation samples stand among the training samples."""
    shared = int(torch.isin(sample_keys(valid), sample_keys(train)).sum())
    if shared:
        raise ArgumentError(
            f"valid holds {shared} samples that are also in train: a rate chosen on them is chosen on the training data. Leave "
            "them out, or give split='train'."
        )


def _held(data: Any, parse: BatchParser) -> Any:
    """Tensors and lists as they are; the batches of a loader, read once, in the order they came."""
    if isinstance(data, list) or (isinstance(data, tuple) and data and is_bare(data[-1])):
        return data
    found = read_data(data, parse)
    if not found.held:
        raise ValueError("train is a loader too large to hold, and its order may change: give a list of batches.")
    return list(found)


def _in_chunks(product: Products, rows: Tensor) -> Tensor:
    parts = [product(chunk) for chunk in rows.split(CHUNK)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def log_norms(tangents: Tensor) -> Tensor:
    """The logarithm of the length of each row, (k,) in float64."""
    norms: Tensor = torch.linalg.vector_norm(tangents.flatten(1), dim=1)
    return norms.double().log()
