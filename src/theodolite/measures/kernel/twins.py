"""Taylor twins: the first and second order expansions of a network in its weights, as modules that train like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.measures.kernel.expansion import Named, second_order_terms, taylor, taylor_with_pull
from theodolite.measures.kernel.gates import Recorded, Replayed
from theodolite.measures.kernel.jets import Jet, jets_for
from theodolite.problem import Problem
from theodolite.problem.calling import copy_model, main_output, unwrap
from theodolite.problem.second_order import functional_transforms

_COUPLED = (nn.modules.batchnorm._BatchNorm,)


class TaylorTwin(nn.Module):
    """The expansion of a network to `order` 1 or 2 at the weights w₀ it had when the twin was made.

    Parameters have the network's names and start at w₀, so weight decay, checkpoints and optimizer groups mean the same; what
    was frozen stays frozen. The network runs in eval mode. Made by `theodolite.linearize` and `theodolite.quadratize`.
    """

    def __init__(self, model: nn.Module, order: int) -> None:
        super().__init__()
        self.order = order
        # In a tuple, so that its parameters are not counted as the twin's.
        self._network = (copy_model(model).eval().requires_grad_(False),)
        self._names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        for name, parameter in model.named_parameters():
            _place(self, name).register_parameter(
                _last(name), nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            )
        for name, buffer in model.named_buffers():
            _place(self, name).register_buffer(_last(name), buffer.detach().clone())
        self._anchor = nn.Module()
        for i, name in enumerate(self._names):
            start = model.get_parameter(name).detach().clone()
            self._anchor.register_buffer(str(i), start, persistent=False)
        self._checked = False
        self.gated = self.jets = False  # see `prepare`

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The expansion at the current parameters: the network's main output."""
        moved = self._by_name(self._names)
        if not _inside_transform():
            self.prepare(*args, **kwargs)
        if self.gated or _inside_transform():
            return self.value(moved, args, kwargs)
        found: Tensor = _Expanded.apply(self, args, kwargs, *moved.values())
        return found

    def value(self, moved: Named, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The expansion with the trained parameters at `moved`, by plain operations: differentiable any number of times."""
        with functional_transforms():
            function = self._function(args, kwargs)
            if self.gated:
                return _gated(function, self.anchor(), moved)
            return taylor(function, self.anchor(), self._displacement(moved), self.order, jets=self.jets)

    def value_and_pull(
        self, moved: Named, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Callable[[Tensor], Named]]:
        """The expansion, and the cheap gradient: cotangents of the output -> gradient by name."""
        with functional_transforms():
            function = self._function(args, kwargs)
            return taylor_with_pull(function, self.anchor(), self._displacement(moved), self.order, jets=self.jets)

    def fleet_gradient(
        self, parameters: Named, buffers: Named, batch: Any, loss: Callable[[Any, Any], Tensor]
    ) -> tuple[Tensor, Named]:
        """Loss and gradient of one replica in a fleet, at the cost of one pull back."""
        moved = {name: parameters[name] for name in self._names}
        with functional_transforms():
            function = self._function(batch.args, batch.kwargs, {**parameters, **buffers})
            anchor = {name: buffers[f"_anchor.{i}"] for i, name in enumerate(self._names)}
            if self.gated:
                gradient, value = torch.func.grad_and_value(lambda w: loss(_gated(function, anchor, w), batch.target))(moved)
                return value, gradient
            away = {name: moved[name] - anchor[name] for name in self._names}
            output, pull = taylor_with_pull(function, anchor, away, self.order, jets=self.jets)
            value, back, *_ = torch.func.vjp(lambda z: loss(z, batch.target), output)
            return value, pull(back(torch.ones_like(value))[0])

    def anchor(self) -> Named:
        """The weights w₀ of the expansion, by name."""
        return {name: self._anchor.get_buffer(str(i)) for i, name in enumerate(self._names)}

    def _displacement(self, moved: Named) -> Named:
        return {name: moved[name] - start for name, start in self.anchor().items()}

    def _function(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Mapping[str, Tensor] | None = None
    ) -> Callable[[Named], Tensor]:
        """The network as a function of its trained parameters; the others and the buffers stay as they are."""
        (network,) = self._network
        names = [name for name, _ in network.named_parameters()] + [name for name, _ in network.named_buffers()]
        fixed = {name: given[name] for name in names} if given is not None else self._by_name(names)
        fixed = {name: t.detach() if name not in self._names else t for name, t in fixed.items()}

        # The fused recurrent layers of float32 have no forward mode; torch's own do.
        recurrent = any(isinstance(m, nn.RNNBase) for m in network.modules())

        def function(weights: dict[str, Any]) -> Any:
            with _without_fused_recurrence() if recurrent else nullcontext():
                if any(isinstance(w, Jet) for w in weights.values()):
                    with jets_for(network, {**fixed, **weights}):
                        found = network(*args, **kwargs)
                        return found if isinstance(found, Jet) else main_output(found)
                return main_output(functional_call(network, {**fixed, **weights}, args, dict(kwargs)))

        return function

    def _by_name(self, names: Any) -> Named:
        """The twin's own tensors, which a functional call may have replaced."""
        return {name: getattr(_place(self, name), _last(name)) for name in names}

    def prepare(self, *args: Any, **kwargs: Any) -> Self:
        """Look at the network once, on inputs of the kind it will see: whether it can be expanded, and how it is cheapest.

        Called on the first forward pass; a fleet, whose first pass is inside a transform, gains from calling it before.
        """
        if not self._checked:
            self._refuse_state(args, kwargs)
            self.gated = self.order == 2 and self._is_quadratic_when_gated(args, kwargs)
            self.jets = self.order == 2 and not self.gated and self._takes_jets(args, kwargs)
            self._checked = True
        return self

    def _is_quadratic_when_gated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether frozen gates make the network a quadratic in its weights: third differences over large steps vanish."""
        anchor, step = self.anchor(), self._trial_step()
        with functional_transforms(), torch.no_grad():
            function = self._function(args, kwargs)
            places = ({name: w + i * step[name] for name, w in anchor.items()} for i in range(4))
            first, second, third, fourth = (_gated(function, anchor, place).double() for place in places)
        scale = max(float(value.norm()) for value in (first, second, third, fourth))
        tolerance = 1e-11 if next(iter(anchor.values())).dtype == torch.float64 else 1e-4
        return float((fourth - 3 * third + 3 * second - first).norm()) <= tolerance * scale

    def _takes_jets(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether Taylor arithmetic goes through the network, and agrees with nested forward mode."""
        step = self._trial_step()
        with functional_transforms(), torch.no_grad():
            function = self._function(args, kwargs)
            true = second_order_terms(function, self.anchor(), step, step, jets=False)
            try:
                found = second_order_terms(function, self.anchor(), step, step, jets=True)
            except Exception:  # a model may do anything with its weights; the other route is always there
                return False
        tolerance = 1e-9 if true[0].dtype == torch.float64 else 1e-3
        return all(float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in zip(found, true, strict=True))

    def _trial_step(self) -> Named:
        """A random displacement of the size of the weights."""
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(w.shape, generator=generator, dtype=torch.float32).to(w) * (w.abs().mean() + 0.1)
            for name, w in self.anchor().items()
        }

    def _refuse_state(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A network that writes into its buffers or draws random numbers has no Taylor expansion."""
        (network,) = self._network
        tensors = {name: t.detach().clone() for name, t in {**dict(network.named_buffers()), **self.anchor()}.items()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = [main_output(functional_call(network, tensors, args, dict(kwargs))) for _ in range(2)]
        if not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6, equal_nan=True):
            raise NotRepeatableError(
                "Two evaluations of the network differ, so it has no Taylor expansion: it draws random numbers or keeps a "
                "state between calls. Remedy: switch that off in eval mode, or expand the part of the network without it."
            )

    def extra_repr(self) -> str:
        (network,) = self._network
        return f"order {self.order} expansion of {type(network).__name__}, {len(self._names)} trained tensors"


class _Expanded(torch.autograd.Function):
    """The twin's output with its cheap gradient; differentiated twice it falls back to plain operations."""

    @staticmethod
    def forward(ctx: Any, twin: TaylorTwin, args: Any, kwargs: Any, *moved: Tensor) -> Tensor:
        ctx.twin, ctx.call = twin, (args, kwargs)
        named = dict(zip(twin._names, moved, strict=True))
        if not any(ctx.needs_input_grad):
            return twin.value(named, args, kwargs)
        ctx.save_for_backward(*moved)
        value, ctx.pull = twin.value_and_pull({k: t.detach() for k, t in named.items()}, args, kwargs)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        twin: TaylorTwin = ctx.twin
        if not torch.is_grad_enabled():
            return None, None, None, *ctx.pull(cotangent).values()
        moved = dict(zip(twin._names, ctx.saved_tensors, strict=True))
        value = twin.value(moved, *ctx.call)
        return None, None, None, *torch.autograd.grad(value, list(moved.values()), cotangent, create_graph=True)


def _gated(function: Callable[[Named], Tensor], anchor: Named, weights: Named) -> Tensor:
    """The network at `weights` with the ReLU gates it has at `anchor`."""
    with torch.no_grad(), Recorded() as recorded:
        function(anchor)
    with Replayed(recorded.gates):
        return function(weights)


def linearize(model: nn.Module | Problem) -> TaylorTwin:
    """The first order Taylor model `f(w₀) + J(w₀)(w − w₀)` of a network: what it would be in the kernel regime.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    >>> _ = [nn.init.constant_(p, 2.0) for p in model.parameters()]                        # f = w₁ w₂ x
    >>> twin = linearize(model)
    >>> _ = [nn.init.constant_(p, 3.0) for p in twin.parameters()]
    >>> twin(torch.ones(1, 1).double()).item()                                             # 4 + 2 (1 + 1)
    8.0
    """
    return TaylorTwin(_expandable(model, "linearize"), 1)


def quadratize(model: nn.Module | Problem) -> TaylorTwin:
    """The second order Taylor model `f(w₀) + J δ + ½ δᵀ H δ`, δ = w − w₀: the smallest model that can catapult.

    A training step costs a few gradients of the network (the benchmark table says how many) and about three times its memory:
    the slope J δ and the curvature are carried forward together, and one pull back of the slope gives the gradient. A ReLU
    network with two weight layers is recognised: with its gates frozen it is a quadratic itself, at the price of a forward
    pass and a gradient.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    >>> _ = [nn.init.constant_(p, 2.0) for p in model.parameters()]                        # f = w₁ w₂ x
    >>> twin = quadratize(model)
    >>> _ = [nn.init.constant_(p, 3.0) for p in twin.parameters()]
    >>> twin(torch.ones(1, 1).double()).item()                                             # exact here: 3 · 3
    9.0
    """
    return TaylorTwin(_expandable(model, "quadratize"), 2)


def _expandable(model: nn.Module | Problem, who: str) -> nn.Module:
    """The module to expand, or the reason why there is no such expansion."""
    if isinstance(model, Problem):
        model.refuse_batch_coupling("A Taylor expansion")
        model.check_repeatable()
        chosen = set(model.selection.keys)
        network = copy_model(model.model)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in chosen)
        return network
    if not isinstance(model, nn.Module):
        raise ValueError(f"{who} takes a torch.nn.Module or a Problem. Got {type(model).__name__}.")
    network = unwrap(model)
    if not any(p.requires_grad for p in network.parameters()):
        raise ValueError(f"{who}: no parameter requires a gradient, so there is nothing to expand in.")
    for name, module in network.named_modules():
        if module.training and isinstance(module, _COUPLED):
            raise BatchCoupledError(
                f"{who}: {name or type(module).__name__} is BatchNorm in train mode, where outputs depend on the whole batch. "
                "Remedy: model.eval(); the twin then expands the network with its running statistics."
            )
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise NotRepeatableError(
                f"{who}: dropout is active in {name or type(module).__name__}. Remedy: model.eval(); twins run without dropout."
            )
    return network


@contextmanager
def _without_fused_recurrence() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _inside_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _place(root: nn.Module, name: str) -> nn.Module:
    """The submodule that holds a tensor, made on the way where it is missing."""
    module = root
    for part in name.split(".")[:-1]:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    return module


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
