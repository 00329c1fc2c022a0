"""`Problem`: all that knows how to call the user's model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from theodolite.arguments import a_text, about, checked, count, integer, one_of, whole
from theodolite.errors import ArgumentError, BatchCoupledError, DerivativeWarning, NonFiniteError
from theodolite.interrupts import unbroken, unbroken_context
from theodolite.problem.arguments import a_loss, a_model, a_module, a_plain_function, a_tensor
from theodolite.problem.batches import HOLD_BYTES, Batch, BatchParser, Data, generators_of, join_trees, read_data
from theodolite.problem.calling import Evaluation, KeepFloat64, Loss, ModelCall, OutputChoice, copy_model, probe, unwrap
from theodolite.problem.calling.probe import jackknife_error, refuse_unseen_dependence
from theodolite.problem.calling.stand_ins import LossOfParameters, bound, users_own
from theodolite.problem.derivatives.difference_probe import NOT_THE_GRADIENT, gradient_gap, refuse_wrong_products
from theodolite.problem.derivatives.second_order import (
    first_order,
    plain_second_order_errors,
    refuse_special_gradients,
    second_order,
)
from theodolite.problem.parameters import Layer, Selection, Selector, join_like, select_parameters, split_like
from theodolite.problem.state_guard import left_as_found, random_states_kept
from theodolite.problem.weighting import BatchWeight, Weighting, coupling, establish_weighting
from theodolite.progress import TimeLimit

Mode = Literal["eval", "train"] | None
_HALF = (torch.bfloat16, torch.float16)


class Problem:
    """A model, a loss, parameters and data behind one face.

    The objective is the mean of `loss` over the data: each batch weighs what its loss divides by (samples,
    elements, labels that are not ignored, class weights), so uneven batches are exact; `reduction="sum"` keeps
    the sum. The model is left as found, always.

    Args:
        model: any `nn.Module`, also inside `torch.compile` or a data-parallel wrapper. It may return nested tuples, mappings and
            dataclasses. What the loss reads of them is the output that is measured, several tensors as one.
        loss: `(output, target) -> scalar`, or None for models that return `.loss` (Hugging Face). It is given all that the model
            returns where it takes that, else the `.logits` or the first floating tensor.
        data: `(inputs, targets)`, a mapping, a list of batches or a `DataLoader`; a batch is a pair or a mapping. Inputs in a
            mapping become keywords of the model, or its one argument where it takes a mapping. Arrays of NumPy and tables of
            pandas stand wherever tensors do, a table with the target among its columns too; names are kept.
        params: None (all that require grad), a glob or list of globs on names, parameters of the model, or a predicate `(name,
            parameter) -> bool`.
        mode: `"eval"`, `"train"` or None (as found), entered for each computation.
        batch_weight: overrides what a batch weighs: a function of the batch or one number per batch.
        target: key of the target in mapping batches, or its column in a table.
        check: probe before anything is measured that two evaluations agree, that batches can be weighed against each other, and
            that autograd's derivatives are those of the loss: on a few samples along one direction, or with `"full"` on every
            batch along several. False: measured as it is.
        hold_bytes: data up to this size is read once and held.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> problem = Problem(model, torch.nn.MSELoss(), (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
    >>> problem.size, problem.names
    (1, ('weight',))
    """

    @checked(
        model=a_model, loss=a_loss, mode=one_of("eval", "train", None), target=a_text, check=one_of(True, False, "full"),
        hold_bytes=whole,
    )  # fmt: skip
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        params: Selector = None,
        mode: Mode = "eval",
        batch_weight: BatchWeight = None,
        target: str = "labels",
        check: bool | Literal["full"] = True,
        hold_bytes: int = HOLD_BYTES,
    ) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ValueError(
                "model is compiled by torch.jit, which takes no other parameters. Pass the nn.Module it was made from."
            )
        self.model = unwrap(model)
        probe.refuse_self_changing_layers(self.model)
        self.loss_function = bound(loss, self.model)
        self.mode = mode
        probe.refuse_waiting_layers(self)
        self.selection: Selection = select_parameters(self.model, params)
        refuse_special_gradients(self.model, self.parameters)
        self.device = self._one_device()
        self._set_precision()
        self._widened = False  # a float64 copy of a model in half precision, on the data of that
        self._call = ModelCall(self.model, self.loss_function)
        parse = BatchParser.of(self.model, loss, target, allow_empty=True, dtype=self.dtype, forward=self.model.forward)
        self._parse, self._batch_weight = parse, batch_weight
        self._weighting: Weighting | None = None
        self._coupled: str | None = None
        self._constant: set[int] = set()  # batches that were shown to be constant in the measured parameters
        self.time_limit = TimeLimit()  # of all that is computed on this problem and its copies
        self.elsewhere: dict[str, Tensor] = {}  # values that stand in for parameters of the model, by name; see `at`
        with random_states_kept(generators=generators_of(data)):
            self.data: Data = read_data(data, parse, hold_bytes=hold_bytes)
        probe.refuse_all_ignored(self)
        self._check_products = False
        self.gradient_note: str | None = None  # how autograd's gradient differs from the slope of the loss
        if check:
            self.check_derivatives(full=check == "full")
            self._weigh_early()

    # Facts

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the measured parameters, in the order of the flat vector."""
        return self.selection.names

    @property
    def size(self) -> int:
        """Number of measured parameters."""
        return self.selection.size

    @property
    def layers(self) -> dict[str, Layer]:
        """Modules that own measured parameters directly, by module name."""
        return self.selection.layers

    @property
    def samples(self) -> int:
        return sum(self.data.sizes)

    @property
    def loss_takes_structure(self) -> bool:
        """Whether the loss is given all that the model returns (a tuple, a mapping) and not one tensor."""
        self.output_choice()
        return self._call.takes_structure

    def output_choice(self) -> OutputChoice:
        """Which of the tensors that the model returns are measured; to be asked before anything listens to its calls."""
        if not self._call.settled:
            with self.session(second=False):
                batch = self.placed(next(iter(self.data)))
                self._call.output(self.tensors(self.leaves(grad=False)), batch, 0)
        return self._call.choice.copy()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers should know about how they are computed."""
        half = "half-precision parameters are measured through a float32 copy" if self.half_precision else None
        reads = isinstance(self.loss_function, LossOfParameters) and self.loss_function.used
        penalty = "the loss reads the model's parameters: that part is measured too" if reads else None
        return tuple(note for note in (half, self._call.note, penalty, self.gradient_note) if note is not None)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The measured parameters themselves, in the order of the flat vector."""
        available = dict(self.model.named_parameters())
        return [available[key] for key in self.selection.keys]

    @property
    def vector(self) -> Tensor:
        """The measured parameters as one flat vector (a copy)."""
        return torch.cat([leaf.to(self.dtype).reshape(-1) for leaf in self.leaves(grad=False)])

    @checked(vector=a_tensor)
    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as named tensors of the parameters' shapes."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector must have shape ({self.size},). Got {tuple(vector.shape)}.")
        return dict(zip(self.names, split_like(vector, self.parameters), strict=True))

    # Computing

    def loss(self) -> float:
        """The objective at the current parameters."""
        total = 0.0
        with self.session(second=False):
            tensors = self.tensors(self.leaves(grad=False))
            for i, share, batch in self.iterate():
                total += share * float(self.evaluate(tensors, batch, i).loss.detach().double())
        return total

    def gradient(self) -> Tensor:
        """The gradient of the objective as a flat vector, accumulated in float64."""
        return self.loss_and_gradient()[1]

    def loss_and_gradient(self) -> tuple[float, Tensor]:
        """The objective and its gradient from one pass over the data."""
        value = 0.0
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        with self.session(second=False):
            leaves = self.leaves()
            tensors = self.tensors(leaves)
            for i, share, batch in self.iterate():
                loss = self.evaluate(tensors, batch, i).loss
                grads = self.gradients_of(loss, leaves, batch, i)
                value += share * float(loss.detach().double())
                total += share * join_like(grads, leaves).double()
        return value, total.to(self.dtype)

    def leaves(self, *, grad: bool = True) -> list[Tensor]:
        """Stand-ins for the measured parameters: same values, own graph, nothing of the model touched."""
        named = zip(self.selection.keys, self.parameters, strict=True)
        return [self._stand_in(self.elsewhere.get(key, p)).requires_grad_(grad) for key, p in named]

    def tensors(self, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        """All a functional call needs: the leaves, the other parameters and copies of the buffers."""
        fixed = {k: self._stand_in(self.elsewhere.get(k, p)) for k, p in self.model.named_parameters()}
        buffers = {k: self._stand_in(b).clone() for k, b in self.model.named_buffers()}
        return {**fixed, **buffers, **dict(zip(self.selection.keys, leaves, strict=True))}

    def evaluate(self, tensors: dict[str, Tensor], batch: Batch, index: int) -> Evaluation:
        """One batch through the model, inside a `session`."""
        self.time_limit.check()
        result = self._call(tensors, batch, index)
        if not bool(torch.isfinite(result.loss)):
            raise NonFiniteError(probe.first_bad_tensor(tensors, batch, result, index))
        return result

    def gradients_of(
        self, loss: Tensor, leaves: Sequence[Tensor], batch: Batch, index: int, *, create_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """The gradients of a batch's loss, None where it does not depend on a leaf, inside a `session`."""
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True)
        if all(g is None for g in grads) and index not in self._constant:
            refuse_unseen_dependence(self, batch, index)
            self._constant.add(index)
        return grads

    def output(self, tensors: dict[str, Tensor], batch: Batch, index: int, *, check: bool = True) -> Tensor:
        """The model's output for one batch, inside a `session`; the loss is not called. `check`: refuse NaN and inf."""
        output = self._call.output(tensors, batch, index)
        if check and not bool(torch.isfinite(output).all()):
            raise NonFiniteError(f"The model's output for batch {index} holds NaN or inf.")
        return output

    def live_loss(self, batch: Batch) -> Tensor:
        """The loss of one batch on the model itself as it stands, with its graph: that of a training step."""
        self.time_limit.check()
        return self._call({}, self.placed(batch), 0).loss

    def raw_loss(self, tensors: dict[str, Tensor], batch: Batch) -> float:
        """The loss of one batch as it comes, NaN included."""
        return float(self._call(tensors, self.placed(batch), 0).loss.detach())

    def raw_output(self, tensors: dict[str, Tensor], batch: Batch) -> Any:
        """What the loss function is given for one batch."""
        return self._call.loss_input(tensors, self.placed(batch), 0)

    def losses_of(self, joint: Any, alone: Sequence[Any], batches: Sequence[Batch]) -> list[float]:
        """The loss function on the outputs of two batches, joined and alone."""
        assert self.loss_function is not None
        targets = [self.placed(b).target for b in batches]
        whole = join_trees(*targets, sizes=[b.size for b in batches], shared=False)
        pairs = [(joint, whole), *zip(alone, targets, strict=True)]
        return [float(self.loss_function(output, target).detach()) for output, target in pairs]

    @unbroken_context
    def session(self, *, second: bool = True) -> Iterator[None]:
        """The state in which the model is called: its mode, exact arithmetic, twice differentiable if `second`."""
        precision = KeepFloat64() if self._all_float64 else nullcontext()
        with (
            left_as_found(self.model, self.mode, users_own(self.loss_function)),
            torch.autocast(self.device.type, enabled=False),
            second_order() if second else first_order(),
            precision,
        ):
            yield

    def iterate(self) -> Iterator[tuple[int, float, Batch]]:
        """(index, share, batch): the objective is the sum of share times batch loss."""
        for i, (share, batch) in enumerate(zip(self.weighting.shares, self.data, strict=True)):
            if share > 0.0:
                yield i, share, self.placed(batch)

    @property
    def num_weighted_batches(self) -> int:
        """How many batches count: one whose labels are all ignored weighs nothing and is passed over."""
        return sum(share > 0.0 for share in self.weighting.shares)

    def placed(self, batch: Batch) -> Batch:
        """A batch where the parameters are, in a precision the model computes in."""
        moved = batch.to(self.device, self.dtype)
        return moved.in_float64() if self._widened else moved

    @property
    def weighting(self) -> Weighting:
        """What each batch weighs, and by which rule; found out once."""
        if self._weighting is None:
            self._weighting = establish_weighting(self, self._batch_weight)
        return self._weighting

    # Probes

    def check_derivatives(self, *, full: bool = False) -> None:
        """The probes of the model and the loss that `check` asks for; products are looked at with the first one."""
        self._check_products = True
        self.check_repeatable()
        self._compare_gradient(full=full)
        if full:
            self.check_products(full=True)

    def _weigh_early(self) -> None:
        """Find out what batches weigh, which every number needs, before the first of them; not where data are read anew."""
        if self.data.held:
            with suppress(NonFiniteError):  # the number that meets it says where it is
                self._weighting = establish_weighting(self, self._batch_weight)

    def check_repeatable(self) -> None:
        """Evaluate one batch twice; raise where the numbers differ."""
        probe.check_repeatable(self)

    def _compare_gradient(self, *, full: bool) -> None:
        """Say so, once and in the notes of every result, where autograd's gradient is not the slope of the loss."""
        gap = gradient_gap(self, full=full)
        if gap is not None:
            self.gradient_note = NOT_THE_GRADIENT.format(derivative=gap.derivative, difference=gap.difference)
            warnings.warn(f"{self.gradient_note[0].upper()}{self.gradient_note[1:]}.", DerivativeWarning, stacklevel=4)

    def check_products(self, *, full: bool = False) -> None:
        """Raise where double backward is not the derivative of the gradient; looked at once.

        Not where autograd's gradient is known to be another thing than the slope of the loss.
        """
        if self._check_products and self.gradient_note is None:
            with plain_second_order_errors():
                refuse_wrong_products(self, full=full)
        self._check_products = False

    def refuse_batch_coupling(self, quantity: str) -> None:
        """Raise if outputs of one sample depend on the others (BatchNorm in train mode)."""
        probe.refuse_batch_coupling(self, quantity)

    @property
    def coupled(self) -> str:
        """Why the batches must not be cut into parts (samples that belong together); empty where they may. Found out once."""
        if self._coupled is None:
            quiet = self._copy()
            quiet.mode = "eval"
            self._coupled = coupling(quiet, self._batch_weight)
        return self._coupled

    def refuse_cutting(self, quantity: str) -> None:
        """Raise if batches must not be cut into parts."""
        if self.coupled:
            raise BatchCoupledError(
                f"{quantity} takes parts of the batches, but {self.coupled}. Remedy: give the data in the batches of training."
            )

    @checked(count=count)
    def few(self, count: int) -> Batch:
        """The first samples of the first batch, or all of it where it must not be cut."""
        batch = next(iter(self.data))
        return batch.part(slice(0, count)) if batch.size > count and not self.coupled else batch

    @checked(quantity=a_plain_function, groups=partial(integer, least=2), population=count)
    def sampling_error(self, quantity: Callable[[Problem], float], *, groups: int = 5, population: int | None = None) -> float:
        """Standard error of `quantity(problem)` from the data being a sample, by the delete-a-group jackknife.

        `population` is the size of the whole data set, if this is a subset of a finite one.
        """
        self.refuse_cutting("The error by leaving samples out")
        return jackknife_error(self, quantity, groups=groups, population=population)

    def batch_of(self, inputs: Any, name: str = "inputs") -> Batch:
        """Inputs without targets as a batch: a tensor, a tuple of arguments or a mapping."""
        parse = BatchParser.of(self.model, self.loss_function, "", own_loss=False, dtype=self.dtype)
        with about(name):
            return parse((inputs, None), 0)

    def limited(self, limit: TimeLimit) -> Problem:
        """The same problem, of which nothing is computed once the time is over."""
        other = copy.copy(self)
        other.time_limit = limit
        return other

    def with_batches(self, batches: list[Batch]) -> Problem:
        """The same problem on other batches."""
        if self._batch_weight is not None and not callable(self._batch_weight):
            raise ValueError("Other batches need a batch_weight that is a function of the batch, not a list of numbers.")
        other = self._copy()
        other.data = Data(batches, None, self._parse)
        return other

    def on(self, data: Any) -> Problem:
        """The same problem on other data of the user's, in any form that the constructor takes."""
        other = self._copy()
        with random_states_kept(generators=generators_of(data)):
            other.data = read_data(data, self._parse)
        return other

    def at(self, weights: Mapping[str, Tensor]) -> Problem:
        """The same problem with other values for parameters of the model, by name; the model keeps its own."""
        other = self._copy()
        other.elsewhere = {**self.elsewhere, **weights}
        return other

    def with_model(self, model: nn.Module, loss: Loss = None) -> Problem:
        """The same problem on another model of the same architecture (and another loss, where one is given)."""
        other = self._copy()
        other.model = unwrap(a_module("model", model))
        if missing := set(self.names).difference(name for name, _ in other.model.named_parameters()):
            raise ArgumentError(f"model must be of the architecture of this problem's: it has no parameter {min(missing)}.")
        other.elsewhere = self.elsewhere if other.model is self.model else {}
        own = self.loss_function
        other._set_loss(loss or own, self._call.for_model(other.model, own) if loss is None else ModelCall(other.model, loss))
        other._set_precision()
        other._widened = (self._widened or self.half_precision) and other._all_float64
        return other

    def copied(self) -> Problem:
        """The same problem on a copy of the model."""
        return self.with_model(self._copied_model())

    def copied_to_train(self) -> Problem:
        """The same problem on a copy whose weights may move: half precision in float64, where small steps do not get lost.

        The data are not copied: they are widened batch by batch where they are used.
        """
        return self._wide() if self.half_precision else self.copied()

    def _copied_model(self) -> nn.Module:
        model = copy_model(self.model)
        with unbroken(torch.no_grad()):
            for name, p in model.named_parameters():
                if name in self.elsewhere:
                    p.copy_(self.elsewhere[name])
        return model

    def _copy(self) -> Problem:
        """The same problem, ready for other batches or another model: what was found out about these is left behind."""
        other = copy.copy(self)
        other._weighting, other._constant = None, set()
        other._call = self._call.for_model(self.model, self.loss_function)
        return other

    def in_float64(self, batches: list[Batch] | None = None) -> Problem:
        """The same problem on a float64 copy of the model and the data, or of some batches."""
        double = self._wide()
        double.data = Data([batch.in_float64() for batch in batches or self.data], None, self._parse)
        return double

    def _wide(self) -> Problem:
        """The same problem on a float64 copy of the model."""
        with unbroken(nullcontext()):  # torch converts modules in contexts of its own, which Ctrl-C must not break off
            double, loss = self.with_model(self._copied_model().double()), self.loss_function
            if isinstance(loss, LossOfParameters | nn.Module):
                wide = loss.widened() if isinstance(loss, LossOfParameters) else copy.deepcopy(loss).double()
                double._set_loss(wide, self._call.for_model(double.model, wide))
        return double

    # Inner parts

    def _set_loss(self, loss: Loss, call: ModelCall) -> None:
        self.loss_function, self._call = loss, call

    def _set_precision(self) -> None:
        measured = {p.dtype for p in self.parameters}
        every = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        self.half_precision = not every.isdisjoint(_HALF)
        self.dtype = torch.float64 if torch.float64 in measured else torch.float32
        self._all_float64 = every == {torch.float64}

    def _stand_in(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone() if tensor.is_inference() else tensor.detach()
        return tensor.float() if self.half_precision and tensor.dtype in _HALF else tensor

    def _one_device(self) -> torch.device:
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise ValueError(
                f"The measured parameters lie on several devices ({', '.join(map(str, devices))}); move the model to one."
            )
        return devices.pop()

    def __repr__(self) -> str:
        loss = type(users_own(self.loss_function)).__name__ if self.loss_function is not None else "own loss"
        facts = f"{type(self.model).__name__}, {self.size} parameters, {loss}, {len(self.data)} batches"
        return f"<Problem: {facts}, mode={self.mode!r}>"
