"""Taylor twins: the first and second order expansions of a network in its weights, as modules that train like it.

For an expansion point w₀ and a displacement δ, `f + Jδ + ½ δᵀHδ` costs a few forward passes. Its gradient in the direction
of cotangents s at the output is `Jᵀs + H_s δ` with H_s = Σ s_i H_i: both are what one pull back of `J(w)δ` gives, with respect
to δ and to w. So a second order model needs no third derivative, and no p × p matrix is formed.

A function that takes jets is expanded by Taylor arithmetic, five forward passes; others by nested forward mode, eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from theodolite.arguments import checked, up_to
from theodolite.errors import BatchCoupledError, NotRepeatableError, SecondOrderError
from theodolite.interrupts import unbroken, unbroken_context
from theodolite.measures.kernel.jets import Jet, jets_for
from theodolite.measures.kernel.problem_views import TRIAL_SEEDS, measured_copy, third_difference, trial_step
from theodolite.problem import Problem
from theodolite.problem.arguments import a_model, a_model_or_problem
from theodolite.problem.calling import copy_model, main_output, unwrap
from theodolite.problem.derivatives.second_order import functional_transforms
from theodolite.problem.state_guard import random_states_kept
from theodolite.problem.tensors import inside_transform, map_tensors, named_tensors

Named = dict[str, Tensor]
Function = Callable[[dict[str, Any]], Any]


def taylor(function: Function, point: Named, displacement: Named, order: int, *, jets: bool = False) -> Tensor:
    """The Taylor polynomial of degree 1 or 2 at `point + displacement`; differentiable in the displacement."""
    if order == 1:
        value, slope = _push(function, point, displacement)
        return value + slope  # type: ignore[no-any-return]
    value, slope, bend = second_order_terms(function, point, displacement, displacement, jets=jets)
    return value + slope + bend


def second_order_terms(
    function: Function, point: Named, displacement: Named, fixed: Named, *, jets: bool, aside: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`f`, `Jδ` and `½ δᵀHδ`; `fixed` is δ once more, for the outer derivative."""
    if not jets:
        (value, slope), (_, curvature) = _push(lambda w: _push(function, w, displacement), point, fixed)
        return value, slope, 0.5 * curvature
    found = function({name: Jet(point[name], d, aside=aside) for name, d in displacement.items()})
    if not isinstance(found, Jet):
        raise TypeError(f"The network turned jets into {type(found).__name__}.")
    return found.value, found.or_zero("slope"), found.or_zero("bend")


def taylor_with_pull(
    function: Function, point: Named, displacement: Named, order: int, *, jets: bool = False
) -> tuple[Tensor, Callable[[Tensor], Named]]:
    """The same value, and a function that turns cotangents of it into the gradient in the displacement."""
    if order == 1:

        def slope_and_line(d: Named) -> tuple[Tensor, Tensor]:
            value, slope = _push(function, point, d)
            return slope, value + slope

        pull, line = _pull(slope_and_line, displacement)
        return line, lambda s: pull(s)[0]

    def slope_and_parabola(w: Named, d: Named) -> tuple[Tensor, Tensor]:
        # What is pulled back is the slope Jδ alone; the curvature rides along for the value.
        value, slope, bend = second_order_terms(function, w, d, displacement, jets=jets, aside=True)
        return slope, value + slope + bend

    pull, parabola = _pull(slope_and_parabola, point, displacement)

    def gradient(s: Tensor) -> Named:
        by_point, by_displacement = pull(s)
        return {name: by_point[name] + by_displacement[name] for name in displacement}

    return parabola, gradient


def _push(function: Callable[[Named], Any], point: Named, direction: Named) -> tuple[Any, Any]:
    """A value and its derivative in a direction."""
    value, slope, *_ = jvp(function, (point,), (direction,))
    return value, slope


def _pull(function: Callable[..., tuple[Tensor, Tensor]], *points: Named) -> tuple[Callable[[Tensor], Any], Tensor]:
    """The pull back of the first thing a function returns, and the second as it is."""
    _, pull, aside = vjp(function, *points, has_aux=True)  # type: ignore[misc]
    return pull, aside


# Networks with frozen gates: ReLU units stay on or off as they were at the expansion point.
#
# With its gates frozen a ReLU network is a polynomial in its weights of the degree of its depth. For two weight layers that
# is a quadratic, so it is its own second order Taylor model, at the price of the network itself.

_IN_PLACE = {torch.relu_, Tensor.relu_}
_RELU = {torch.relu, Tensor.relu, F.relu, *_IN_PLACE}


class Gates(TorchFunctionMode):
    """Notes which units of each ReLU are on, in the order of the calls; with gates `noted` before, multiplies by these."""

    def __init__(self, noted: list[Tensor] | None = None) -> None:
        super().__init__()
        self.gates: list[Tensor] = []
        self._noted = None if noted is None else iter(noted)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _RELU:
            return func(*args, **kwargs)
        x: Tensor = args[0] if args else kwargs["input"]
        if self._noted is None:
            self.gates.append((x > 0).to(x.dtype))
            return func(*args, **kwargs)
        gate = next(self._noted)
        # Somebody may have dropped what the in-place form returns, and rely on its argument.
        return x.mul_(gate) if func in _IN_PLACE or kwargs.get("inplace") or args[1:] == (True,) else x * gate


# The Taylor expansion of one network: which tensors move, and by which route value and gradient are cheapest.

#: Samples that the choice of a route is tried on, at least.
PROBED = 32

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class NetworkExpansion:
    """The expansion of `network` to `order` 1 or 2 in the parameters `names`.

    `gated`: with its ReLU gates frozen the network is the expansion itself. `jets`: Taylor arithmetic goes through it. Both
    are found out by `prepare`; until then nested forward mode is used, which is always right.
    """

    def __init__(self, network: nn.Module, order: int, names: tuple[str, ...], output: Callable[[Any], Tensor]) -> None:
        self.network, self.order, self.names, self.output = network, order, names, output
        self.gated = self.jets = False
        self._seen: set[Any] = set()
        # The fused recurrent layers of float32 have no forward mode; torch's own do.
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in network.modules())

    def value(self, moved: Named, anchor: Named, fixed: Named, call: Call) -> Tensor:
        """The expansion by plain operations: differentiable any number of times, in weights and inputs."""
        with functional_transforms():
            function = self.function(fixed, call)
            if self.gated:
                return with_gates_of(function, anchor, moved)
            return taylor(function, anchor, self._away(moved, anchor), self.order, jets=self.jets)

    def value_and_pull(self, moved: Named, anchor: Named, fixed: Named, call: Call) -> tuple[Tensor, Callable[[Tensor], Named]]:
        """The expansion, and the cheap gradient: cotangents of the output -> gradient by name."""
        with functional_transforms():
            function = self.function(fixed, call)
            return taylor_with_pull(function, anchor, self._away(moved, anchor), self.order, jets=self.jets)

    def loss_and_gradient(
        self, moved: Named, anchor: Named, fixed: Named, call: Call, loss: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Named]:
        """A function of the output and its gradient, inside a transform."""
        if self.gated:
            with functional_transforms():
                function = self.function(fixed, call)
                gradient, value = torch.func.grad_and_value(lambda w: loss(with_gates_of(function, anchor, w)))(moved)
            return value, gradient
        output, pull = self.value_and_pull(moved, anchor, fixed, call)
        value, back, *_ = torch.func.vjp(loss, output)
        return value, pull(back(torch.ones_like(value))[0])

    def function(self, fixed: Named, call: Call) -> Function:
        """The network as a function of the tensors that move; the others are constants."""
        args, kwargs = call
        constants = {name: t.detach() for name, t in fixed.items()}

        def function(weights: dict[str, Any]) -> Any:
            with _without_fused_recurrence() if self._recurrent else nullcontext():
                if any(isinstance(w, Jet) for w in weights.values()):
                    with jets_for(self.network, {**constants, **weights}):
                        found = self.network(*args, **kwargs)
                        return found if isinstance(found, Jet) else self.output(found)
                return self.output(functional_call(self.network, {**constants, **weights}, args, dict(kwargs)))

        return function

    def prepare(self, anchor: Named, fixed: Named, call: Call) -> None:
        """Look at the network once for each kind of input: whether it can be expanded, and how that is cheapest."""
        kind = tuple((name, t.ndim, t.dtype) for name, t in named_tensors(call)), next(iter(anchor.values())).dtype
        if kind in self._seen:
            return
        self._refuse_state(anchor, fixed, call)
        if self.order == 2:
            first = not self._seen
            self.gated = (first or self.gated) and self._is_its_own_expansion(anchor, fixed, _probe(call))
            self.jets = (first or self.jets) and not self.gated and self._takes_jets(anchor, fixed, call)
        self._seen.add(kind)

    def _away(self, moved: Named, anchor: Named) -> Named:
        return {name: moved[name] - anchor[name] for name in self.names}

    def _is_its_own_expansion(self, anchor: Named, fixed: Named, probe: Call) -> bool:
        """Whether frozen gates make the network a quadratic in its weights.

        Tried on made-up inputs and with large steps, so that the answer is one about the network and not about a batch: third
        differences must vanish, and the value must be that of nested forward mode.
        """
        try:
            with functional_transforms(), torch.no_grad():
                function = self.function(fixed, probe)
                with Gates() as recorded:
                    function(anchor)
                if not recorded.gates:
                    return False
                return all(self._quadratic_along(trial_step(anchor, seed), function, anchor) for seed in TRIAL_SEEDS)
        except Exception:  # the inputs are made up: a network may refuse them
            return False

    def _quadratic_along(self, step: Named, function: Function, anchor: Named) -> bool:
        exact = next(iter(anchor.values())).dtype == torch.float64
        places = [{name: w + i * step[name] for name, w in anchor.items()} for i in range(4)]
        values = [with_gates_of(function, anchor, place) for place in places]
        size, scale = third_difference(values)
        if not scale > 0 or size > (1e-10 if exact else 1e-4) * scale:
            return False
        far = {name: 3 * d for name, d in step.items()}
        true = taylor(function, anchor, far, 2)
        return float((values[3] - true).norm()) <= (1e-9 if exact else 1e-3) * float((true - values[0]).norm())

    def _takes_jets(self, anchor: Named, fixed: Named, call: Call) -> bool:
        """Whether Taylor arithmetic goes through the network, and agrees with nested forward mode."""
        step = trial_step(anchor)
        with functional_transforms(), torch.no_grad():
            function = self.function(fixed, call)
            try:
                true = second_order_terms(function, anchor, step, step, jets=False)
            except NotImplementedError as error:
                raise SecondOrderError(
                    f"A layer has no second derivative in forward mode ({str(error).splitlines()[0]}). Write it with ordinary "
                    "torch operations (a gated linear unit is a product with a sigmoid, say)."
                ) from error
            try:
                found = second_order_terms(function, anchor, step, step, jets=True)
            except Exception:  # a model may do anything with its weights; the other route is always there
                return False
        tolerance = 1e-9 if true[0].dtype == torch.float64 else 1e-3
        return all(float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in zip(found, true, strict=True))

    def _refuse_state(self, anchor: Named, fixed: Named, call: Call) -> None:
        """A network that writes into its buffers or draws random numbers has no Taylor expansion."""
        kept = {name: t.detach().clone() for name, t in fixed.items()}
        with unbroken(torch.no_grad()), random_states_kept():
            function = self.function(kept, call)
            outputs = [function(anchor) for _ in range(2)]
        changed = any(not torch.equal(t, fixed[name]) for name, t in kept.items())
        if changed or not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6, equal_nan=True):
            raise NotRepeatableError(
                "Two evaluations of the network differ, or it writes into its buffers: it draws random numbers or keeps a state "
                "between calls, and has no Taylor expansion. Remedy: switch that off in eval mode, or expand the part without it."
            )


def with_gates_of(function: Function, anchor: Named, weights: Named) -> Tensor:
    """The network at `weights` with the ReLU gates it has at `anchor`."""
    with unbroken(torch.no_grad()), Gates() as recorded:
        function(anchor)
    with Gates(recorded.gates):
        found: Tensor = function(weights)
    return found


def _probe(call: Call) -> Call:
    """Inputs of the same kind and at least `PROBED` samples: what is a number is drawn anew, so that no input is special."""
    tensors = [t for _, t in named_tensors(call) if t.ndim]
    samples = tensors[0].shape[0] if tensors else 1
    copies = -(-PROBED // max(samples, 1))
    generator = torch.Generator().manual_seed(0)

    def made_up(t: Tensor) -> Tensor:
        if t.ndim == 0 or t.shape[0] != samples:
            return t
        t = t.detach().repeat(copies, *[1] * (t.ndim - 1))
        return torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t) if t.is_floating_point() else t

    args, kwargs = call
    return map_tensors(made_up, args), map_tensors(made_up, dict(kwargs))


@unbroken_context
def _without_fused_recurrence() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class TaylorTwin(nn.Module):
    """The expansion of a network to first or second order at the weights w₀ it had when the twin was made.

    Parameters have the network's names and start at w₀, so weight decay, checkpoints and optimizer groups mean the same; what
    was frozen stays frozen. A checkpoint holds the weights, not w₀: load it into a twin made of the same network. The network
    runs in eval mode, and `output` of what it returns is expanded, by `taylor`. Made by `theodolite.linearize` and
    `theodolite.quadratize`.
    """

    @checked(model=a_model, order=lambda name, value: up_to(name, value, 2, of="terms that are expanded"))
    def __init__(self, model: nn.Module, order: int, output: Callable[[Any], Tensor] = main_output) -> None:
        super().__init__()
        names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        self._refuse_names(model)
        self.taylor = NetworkExpansion(copy_model(model).eval().requires_grad_(False), order, names, output)
        for name, parameter in model.named_parameters():
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            place, last = _place(self, name)
            place.register_parameter(last, copied)
        for name, buffer in model.named_buffers():
            place, last = _place(self, name)
            persistent = last not in model.get_submodule(name.rpartition(".")[0])._non_persistent_buffers_set
            place.register_buffer(last, buffer.detach().clone(), persistent=persistent)
        # Buffers, so that they move with the module and belong to a replica; under a name that the network does not use: a
        # twin of a twin has two.
        self._home = "taylor_anchor"
        while hasattr(model, self._home):
            self._home += "_"
        home = nn.Module()
        self.add_module(self._home, home)
        for i, name in enumerate(names):
            home.register_buffer(str(i), model.get_parameter(name).detach().clone(), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The expansion at the current parameters: of the network's main output, or what the loss of a problem reads of it."""
        moved, call = self._by_name(self.taylor.names), (args, kwargs)
        transformed = inside_transform()
        if not transformed:
            self.prepare(*args, **kwargs)
        follows_inputs = torch.is_grad_enabled() and any(t.requires_grad for _, t in named_tensors(call))
        if transformed or self.taylor.gated or follows_inputs:
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
        return {name: getattr(*_place(self, name)) for name in names}

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

    Returns:
        A `TaylorTwin`, a module with parameters of its own that trains like any other.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    >>> _ = [nn.init.constant_(p, 2.0) for p in model.parameters()]                        # f = w₁ w₂ x
    >>> twin = linearize(model)
    >>> _ = [nn.init.constant_(p, 3.0) for p in twin.parameters()]
    >>> twin(torch.ones(1, 1).double()).item()                                             # 4 + 2 (1 + 1)
    8.0
    """
    return TaylorTwin(_expandable(model, "linearize"), 1, _output(model))


def quadratize(model: nn.Module | Problem) -> TaylorTwin:
    """The second order Taylor model `f(w₀) + J δ + ½ δᵀ H δ`, δ = w − w₀: the smallest model that can catapult.

    A training step costs a few gradients of the network (the benchmark table says how many) and about three times its memory:
    the slope J δ and the curvature are carried forward together, and one pull back of the slope gives the gradient. A ReLU
    network with two weight layers is recognised: with its gates frozen it is a quadratic itself, at the price of a forward
    pass and a gradient.

    Returns:
        A `TaylorTwin`, a module with parameters of its own that trains like any other.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    >>> _ = [nn.init.constant_(p, 2.0) for p in model.parameters()]                        # f = w₁ w₂ x
    >>> twin = quadratize(model)
    >>> _ = [nn.init.constant_(p, 3.0) for p in twin.parameters()]
    >>> twin(torch.ones(1, 1).double()).item()                                             # exact here: 3 · 3
    9.0
    """
    return TaylorTwin(_expandable(model, "quadratize"), 2, _output(model))


def _expandable(model: nn.Module | Problem, who: str) -> nn.Module:
    """The module to expand, or the reason why there is no such expansion."""
    a_model_or_problem("model", model)
    if isinstance(model, Problem):
        model.refuse_batch_coupling("A Taylor expansion")
        model.check_repeatable()
        return measured_copy(model)
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


def _output(model: nn.Module | Problem) -> Callable[[Any], Tensor]:
    """What is expanded of all that the network returns."""
    return model.output_choice() if isinstance(model, Problem) else main_output


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor, made on the way where it is missing, and what it calls the tensor."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    return module, last
