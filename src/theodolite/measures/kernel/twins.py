"""Taylor twins: the first and second order expansions of a network in its weights, as modules that train like it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.measures.kernel.expansion import Call, Named, NetworkExpansion
from theodolite.problem import Problem
from theodolite.problem.calling import copy_model, unwrap
from theodolite.problem.derivatives.exact_derivatives import inside_transform
from theodolite.problem.tensors import named_tensors


class TaylorTwin(nn.Module):
    """The expansion of a network to first or second order at the weights w₀ it had when the twin was made.

    Parameters have the network's names and start at w₀, so weight decay, checkpoints and optimizer groups mean the same; what
    was frozen stays frozen. A checkpoint holds the weights, not w₀: load it into a twin made of the same network. The network
    runs in eval mode. `taylor` is the expansion itself. Made by `theodolite.linearize` and `theodolite.quadratize`.
    """

    def __init__(self, model: nn.Module, order: int) -> None:
        super().__init__()
        names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        self._refuse_names(model)
        self.taylor = NetworkExpansion(copy_model(model).eval().requires_grad_(False), order, names)
        for name, parameter in model.named_parameters():
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            _place(self, name).register_parameter(_last(name), copied)
        for name, buffer in model.named_buffers():
            persistent = _last(name) not in model.get_submodule(name.rpartition(".")[0])._non_persistent_buffers_set
            _place(self, name).register_buffer(_last(name), buffer.detach().clone(), persistent=persistent)
        # Buffers, so that they move with the module and belong to a replica; under a name that the network does not use.
        self._home = _free_name(model)
        home = nn.Module()
        self.add_module(self._home, home)
        for i, name in enumerate(names):
            home.register_buffer(str(i), model.get_parameter(name).detach().clone(), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The expansion at the current parameters: the network's main output."""
        moved, call = self._by_name(self.taylor.names), (args, kwargs)
        if inside_transform():
            return self.taylor.value(moved, self.anchor(), self._fixed(), call)
        self.prepare(*args, **kwargs)
        follows_inputs = torch.is_grad_enabled() and any(t.requires_grad for _, t in named_tensors(call))
        if self.taylor.gated or follows_inputs:
            return self.taylor.value(moved, self.anchor(), self._fixed(), call)
        found: Tensor = _Expanded.apply(self, call, *moved.values())
        return found

    def prepare(self, *args: Any, **kwargs: Any) -> Self:
        """Look at the network on inputs of the kind it will see: whether it can be expanded, and how that is cheapest.

        Called on the first forward pass; a fleet, whose first pass is inside a transform, gains from calling it before.
        """
        thawed = [name for name, p in self.named_parameters() if p.requires_grad and name not in self.taylor.names]
        if thawed:
            raise ValueError(f"{thawed[0]} was frozen when the twin was made and is no part of its expansion; make a new twin.")
        self.taylor.prepare(self.anchor(), self._fixed(), (args, kwargs))
        return self

    def fleet_gradient(
        self, parameters: Named, buffers: Named, batch: Any, loss: Callable[[Any, Any], Tensor]
    ) -> tuple[Tensor, Named]:
        """Loss and gradient of one replica in a fleet, at the cost of one pull back."""
        given = {**parameters, **buffers}
        anchor = {name: given[f"{self._home}.{i}"] for i, name in enumerate(self.taylor.names)}
        fixed = {name: given[name] for name in self._fixed_names()}
        moved = {name: parameters[name] for name in self.taylor.names}
        call = (batch.args, batch.kwargs)
        return self.taylor.loss_and_gradient(moved, anchor, fixed, call, lambda output: loss(output, batch.target))

    def anchor(self) -> Named:
        """The weights w₀ of the expansion, by name."""
        home = self._modules[self._home]
        assert home is not None
        return {name: home.get_buffer(str(i)) for i, name in enumerate(self.taylor.names)}

    def _fixed(self) -> Named:
        return self._by_name(self._fixed_names())

    def _fixed_names(self) -> list[str]:
        """Frozen parameters and buffers of the network."""
        network = self.taylor.network
        names = [name for name, _ in network.named_parameters()] + [name for name, _ in network.named_buffers()]
        return [name for name in names if name not in self.taylor.names]

    def _by_name(self, names: Iterable[str]) -> Named:
        """The twin's own tensors, which a functional call may have replaced."""
        return {name: getattr(_place(self, name), _last(name)) for name in names}

    def _refuse_names(self, model: nn.Module) -> None:
        tops = {name.partition(".")[0] for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        taken = sorted(name for name in tops if hasattr(self, name) or name == "taylor")
        if taken:
            raise ValueError(
                f"The network calls one of its parts {taken[0]!r}, which is a name of the twin itself. Rename it, or wrap the "
                "network: nn.Sequential(network)."
            )

    def extra_repr(self) -> str:
        expansion = self.taylor
        return f"order {expansion.order} expansion of {type(expansion.network).__name__}, {len(expansion.names)} trained tensors"


class _Expanded(torch.autograd.Function):
    """The twin's output with its cheap gradient; differentiated twice it falls back to plain operations."""

    @staticmethod
    def forward(ctx: Any, twin: TaylorTwin, call: Call, *moved: Tensor) -> Tensor:
        ctx.twin, ctx.call, ctx.fixed = twin, call, twin._fixed()
        named = dict(zip(twin.taylor.names, moved, strict=True))
        if not any(ctx.needs_input_grad):
            return twin.taylor.value(named, twin.anchor(), ctx.fixed, call)
        ctx.save_for_backward(*moved)
        detached = {name: t.detach() for name, t in named.items()}
        value, ctx.pull = twin.taylor.value_and_pull(detached, twin.anchor(), ctx.fixed, call)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        twin: TaylorTwin = ctx.twin
        if not torch.is_grad_enabled():
            return None, None, *ctx.pull(cotangent).values()
        moved = dict(zip(twin.taylor.names, ctx.saved_tensors, strict=True))
        value = twin.taylor.value(moved, twin.anchor(), ctx.fixed, ctx.call)
        return None, None, *torch.autograd.grad(value, list(moved.values()), cotangent, create_graph=True)


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
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise BatchCoupledError(
                f"{who}: {name or type(module).__name__} is BatchNorm in train mode, where outputs depend on the whole batch. "
                "Remedy: model.eval(); the twin then expands the network with its running statistics."
            )
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise NotRepeatableError(
                f"{who}: dropout is active in {name or type(module).__name__}. Remedy: model.eval(); twins run without dropout."
            )
    return network


def _free_name(model: nn.Module) -> str:
    """A name for the anchor that the network does not use: a twin of a twin has two."""
    name = "taylor_anchor"
    while hasattr(model, name):
        name += "_"
    return name


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
