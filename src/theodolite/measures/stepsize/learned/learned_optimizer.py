"""`LearnedOptimizer`: a small network reads each weight's gradient and its history, and says how far the weight moves.

For every scalar weight v with gradient g at step k = 1, 2, ... and decays β, scales S

    m_β ← β m_β + (1 - β) g,    r_β ← β r_β + (1 - β) g²,    n_β = (r_β + 10⁻⁶)^(-1/2)
    (direction, magnitude) = network(g, v, m_β, r_β, m_β n_β, n_β; tanh(k/S - 1))
    v ← v - 0.001 · direction · exp(0.001 · magnitude)

`learned_step` is the rule; the torch optimizer, the fleet (`Fleet(optimizer=network, rate=1.0)`) and `meta_train` all call it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import (
    a_path,
    about,
    checked,
    count,
    each,
    entry,
    fields_checked,
    finite,
    fraction,
    nonnegative,
    one_of,
    positive,
    shown,
)
from theodolite.arguments import seed as a_seed
from theodolite.errors import ArgumentError
from theodolite.files import json_check_sum, write_whole
from theodolite.interrupts import called_within, unbroken
from theodolite.training.interruption import tensor_check_sums

Normalise = Literal["rms", "standard"]

#: Decays of the moving averages, and numbers of steps by which the step number is divided.
DECAYS = (0.5, 0.9, 0.99, 0.999, 0.9999)
SCALES = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 300000.0)
#: What is added to a moving average of squares, and to a mean square that features are divided by.
EPS, FLOOR = 1e-6, 1e-5
#: The weights of a network, and which file holds one.
_WEIGHTS = ("hidden.weight", "hidden.bias", "output.weight", "output.bias")
_FORMAT = "theodolite-learned-optimizer"


@dataclass(frozen=True, eq=False)
class OptimizerNetwork:
    """The network of a learned optimizer: weights, and the settings of its features.

    `weights` are "hidden.weight" (hidden, features), "hidden.bias", "output.weight" (2, hidden) and "output.bias". `normalise`
    is "rms" (each feature over the root mean square of its parameter tensor; the sign of the gradient stays) or "standard" (mean
    0 and standard deviation 1 across all parameters). The step enters as `tanh(k/scale - shift)`; a weight moves by
    `step_size · direction · exp(exponent · magnitude)`.

    It is an optimizer of a `Fleet` as it is, with `rate=1.0`.

    >>> network = OptimizerNetwork.new()
    >>> network.features, network.size                        # 31·32 + 32 + 32·2 + 2
    (31, 1090)
    """

    weights: dict[str, Tensor]
    normalise: Normalise = "rms"
    decays: tuple[float, ...] = DECAYS
    scales: tuple[float, ...] = SCALES
    shift: float = 1.0
    step_size: float = 0.001
    exponent: float = 0.001

    def __post_init__(self) -> None:
        fields_checked(
            self,
            normalise=one_of("rms", "standard"),
            decays=lambda name, value: tuple(each(fraction)(name, value)),
            scales=lambda name, value: tuple(each(positive)(name, value)),
            shift=finite,
            step_size=positive,
            exponent=nonnegative,
        )
        object.__setattr__(self, "weights", _fitting_weights(self.weights, self.features))

    @classmethod
    @checked(hidden=count, seed=a_seed)
    def new(cls, *, hidden: int = 32, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Self:
        """An untrained one: weights from N(0, 1), biases 0.1; `settings` are fields of the class: `normalise="standard"`."""
        known = [field.name for field in fields(cls) if field.name != "weights"]
        for name in settings:
            entry("settings", name, dict.fromkeys(known))
        decays, scales = (list(settings.get(name, usual)) for name, usual in (("decays", DECAYS), ("scales", SCALES)))
        inputs = _plain_features(decays) + len(scales)
        generator = torch.Generator().manual_seed(seed)
        weights = {
            "hidden.weight": torch.randn(hidden, inputs, generator=generator).to(dtype),
            "hidden.bias": torch.full((hidden,), 0.1, dtype=dtype),
            "output.weight": torch.randn(2, hidden, generator=generator).to(dtype),
            "output.bias": torch.full((2,), 0.1, dtype=dtype),
        }
        return cls(weights, **settings)

    @property
    def features(self) -> int:
        """Inputs of the network: 22 of the weight and its gradients, 9 of the step, with the usual settings."""
        return _plain_features(self.decays) + len(self.scales)

    @property
    def size(self) -> int:
        """How many weights it has itself."""
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def digest(self) -> str:
        """A few digits that tell it from another network."""
        return json_check_sum([self._settings(), *tensor_check_sums(self.weights)])

    def like(self, tensor: Tensor) -> OptimizerNetwork:
        """The same in another precision, on another device."""
        return replace(self, weights={name: weight.to(tensor) for name, weight in self.weights.items()})

    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "weights"}

    # Files

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file, the settings in its metadata."""
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self.weights.items()}
        settings = json.dumps(self._settings())
        metadata = {"format": _FORMAT, "settings": settings, "check": json_check_sum([settings, *tensor_check_sums(tensors)])}
        write_whole(Path(a_path("path", path)), save_tensors(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what `save` wrote."""
        if not Path(a_path("path", path)).is_file():
            raise FileNotFoundError(f"path: there is no file {path}, and no network in it.")
        content = Path(path).read_bytes()
        try:
            metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
            tensors = load_tensors(content)
        except Exception as error:
            raise ValueError(f"{path} is damaged, or no safetensors file ({error}). Save the network again.") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} holds no learned optimizer: write one by OptimizerNetwork.save.")
        if metadata.get("check") != json_check_sum([metadata.get("settings"), *tensor_check_sums(tensors)]):
            raise ValueError(f"{path} is damaged: its content does not have its check sum. Save the network again.")
        return cls(tensors, **json.loads(metadata["settings"]))

    # As the optimizer of a fleet

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what a fleet keeps for each weight."""
        return tuple(f"{kind} {decay:g}" for kind in ("mean", "square") for decay in self.decays)

    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Tensor]],
        rate: Tensor,
        count: Tensor,
    ) -> None:
        """Move the parameters (R, *shape) of R replicas in place; `count` (R,) are the steps taken so far."""
        names = list(gradients)
        values, gradient = (_in_rows([stack[name] for name in names]) for stack in (parameters, gradients))
        history = torch.stack([_in_rows([state[column][name] for name in names]) for column in self.columns])
        means, squares = history.chunk(2)
        sizes = [parameters[name][0].numel() for name in names]
        change, means, squares = learned_step(self.like(values), values, gradient, means, squares, count + 1, sizes)
        for name, piece in zip(names, change.mul_(rate[:, None]).split(sizes, 1), strict=True):
            parameters[name].sub_(piece.view(parameters[name].shape))
        for column, kept in zip(self.columns, torch.cat([means, squares]), strict=True):
            for name, piece in zip(names, kept.split(sizes, 1), strict=True):
                state[column][name].copy_(piece.view(parameters[name].shape))


def _in_rows(stacks: Sequence[Tensor]) -> Tensor:
    """Tensors (R, *shape) beside one another, (R, N)."""
    return torch.cat([stack.reshape(len(stack), -1) for stack in stacks], 1)


def _plain_features(decays: Sequence[float]) -> int:
    """Features that are not of the step."""
    return 2 + 4 * len(decays)


def _fitting_weights(weights: Any, features: int) -> dict[str, Tensor]:
    """The weights, with shapes that go together."""
    if not isinstance(weights, Mapping) or set(weights) != set(_WEIGHTS):
        raise ValueError(f"weights must be a dict with {', '.join(_WEIGHTS)}. Got {shown(weights)}.")
    hidden = len(weights["hidden.bias"])
    wanted = {"hidden.weight": (hidden, features), "hidden.bias": (hidden,), "output.weight": (2, hidden), "output.bias": (2,)}
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"weights: {name} must have shape {shape} with these settings. Got {tuple(weights[name].shape)}.")
    return {name: weights[name] for name in _WEIGHTS}


# The rule, on stacked tensors: R replicas of N weights each, which lie in tensors of `sizes` weights.


def learned_step(
    network: OptimizerNetwork,
    values: Tensor,
    gradient: Tensor,
    means: Tensor,
    squares: Tensor,
    steps: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """How far each weight moves, (R, N), and the new moving averages of the gradient and of its square, (5, R, N) both.

    `values` and `gradient` are (R, N); `steps` is the number of this step, from 1 on, () or (R,).
    """
    fresh = 1 - torch.tensor(network.decays, dtype=values.dtype, device=values.device)[:, None, None]
    means, squares = means.lerp(gradient, fresh), squares.lerp(gradient.square(), fresh)
    history = normalised(network, gradient_features(gradient, means, squares), sizes)
    return change_of(network, history, normalised(network, values[None], sizes), steps), means, squares


def gradient_features(gradient: Tensor, means: Tensor, squares: Tensor) -> Tensor:
    """Gradient, five means m, five mean squares r, five m (r + ε)^(-1/2), five (r + ε)^(-1/2): (21, R, N)."""
    inverse = (squares + EPS).rsqrt()
    return torch.cat([gradient[None], means, squares, means * inverse, inverse])


def normalised(network: OptimizerNetwork, features: Tensor, sizes: Sequence[int]) -> Tensor:
    """Features (F, R, N), each over its root mean square in each tensor, or standardised across all of them."""
    if network.normalise == "standard":
        centred = features - features.mean(-1, keepdim=True)
        return centred * _inverse_rms(centred)
    return torch.cat([part * _inverse_rms(part) for part in features.split(list(sizes), -1)], -1)


def _inverse_rms(features: Tensor) -> Tensor:
    return (features.square().mean(-1, keepdim=True) + FLOOR).rsqrt()


def step_features(network: OptimizerNetwork, steps: Tensor) -> Tensor:
    """The features of the step, the same for all weights: `tanh(k/S - shift)`, (9, 1) or (9, R)."""
    like = network.weights["hidden.weight"]
    scales = torch.tensor(network.scales, dtype=like.dtype, device=like.device)[:, None]
    return torch.tanh(steps.to(like).reshape(1, -1) / scales - network.shift)


def change_of(network: OptimizerNetwork, history: Tensor, values: Tensor, steps: Tensor) -> Tensor:
    """`step_size · direction · exp(exponent · magnitude)`, (R, N), from normalised features of the history and of the values.

    The network's inputs are in order: gradient, value, the rest of the history, the step. The value has a product of its own, for
    in meta-training it alone leads back to the steps before: nothing is differentiated in the others.
    """
    first, bias, last, last_bias = (network.weights[name] for name in _WEIGHTS)
    plain, shape = 1 + len(history), history.shape[1:]
    offset = bias[:, None] + first[:, plain:] @ step_features(network, steps)  # (hidden, 1 or R): one for all weights
    whose = torch.eye(offset.shape[1], dtype=first.dtype, device=first.device).repeat_interleave(
        shape[0] * shape[1] // offset.shape[1], 1
    )
    others = torch.cat([first[:, :1], first[:, 2:plain]], 1) @ history.flatten(1)
    beside = torch.cat([first[:, 1:2], offset], 1)
    hidden = torch.addmm(others, beside, torch.cat([values.flatten(1), whose])).relu_()  # (hidden, R N)
    direction, magnitude = torch.addmm(last_bias[:, None], last, hidden).unflatten(1, shape)
    change: Tensor = network.step_size * direction * (network.exponent * magnitude).exp()
    return change


# The same as an optimizer of torch


def as_network(name: str, value: Any) -> OptimizerNetwork:
    """A network, the one in a file, or that of a meta-training."""
    if isinstance(value, str | PathLike):
        with about(name):
            return OptimizerNetwork.load(value)
    found = getattr(value, "network", value)
    if not isinstance(found, OptimizerNetwork):
        raise TypeError(f"{name} must be an OptimizerNetwork, a file of one or what th.meta_train returns. Got {shown(value)}.")
    return found


def some_parameters(name: str, value: Any) -> list[Any]:
    """Parameters or groups of them, as torch's optimizers take them."""
    wanted = f"{name} must be parameters with numbers, such as model.parameters(), or groups of them."
    if isinstance(value, Tensor | Mapping | str | nn.Module) or not isinstance(value, Iterable):
        raise ArgumentError(f"{wanted} Got {shown(value)}.")
    found = list(value)
    groups = [group.get("params", ()) if isinstance(group, Mapping) else [group] for group in found]
    flat = [p for group in groups for p in ([group] if isinstance(group, Tensor) else group)]
    tensors = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in flat]
    if not tensors or not all(isinstance(p, Tensor) and p.is_floating_point() and not p.is_meta and p.is_leaf for p in tensors):
        raise ArgumentError(f"{wanted} Got {shown(value)}.")
    return found


class LearnedOptimizer(Optimizer):
    """A trained network as the optimizer of any model: used as torch's own are.

    It reads the gradient, the weight, five moving averages of the gradient and of its square, and the number of the step. Ten
    numbers are kept for each weight, as moving averages; some hundred for each weight of the largest tensor while it steps.

    Args:
        params: as of any torch optimizer: `model.parameters()`, or groups of them.
        network: an `OptimizerNetwork`, a file that its `save` wrote, or what `meta_train` returns.
        lr: factor on every step; a schedule may change it. 1 is what the network was trained with.

    `state_dict` holds the moving averages, and by which network they were made: another one is refused.

    >>> network = OptimizerNetwork.new()
    >>> model = nn.Linear(2, 1)
    >>> optimizer = LearnedOptimizer(model.parameters(), network)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> before = model.weight.detach().clone()
    >>> optimizer.step()
    >>> bool((model.weight != before).all()), optimizer.state[model.weight]["mean"].shape
    (True, torch.Size([5, 1, 2]))
    """

    @checked(params=some_parameters, network=as_network, lr=nonnegative)
    def __init__(
        self,
        params: Any,
        network: Any,
        *,
        lr: float = 1.0,
    ) -> None:
        self.network: OptimizerNetwork = network
        super().__init__(params, {"lr": lr, "network": self.network.digest})

    @called_within(torch.no_grad)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move all parameters that have a gradient; a `closure` is called first, and its loss returned."""
        loss = None
        if closure is not None:
            with unbroken(torch.enable_grad()):
                loss = closure()
        moving = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p.grad.layout is not torch.strided for p, _ in moving):
            raise ArgumentError("params: a learned optimizer needs dense gradients. Build the embedding with sparse=False.")
        # Standardised features are those of all parameters together; else each tensor is a world of its own.
        for part in [moving] if self.network.normalise == "standard" and moving else [[one] for one in moving]:
            self._move(part)
        return loss

    def _move(self, part: Sequence[tuple[Tensor, float]]) -> None:
        """One step of some parameters, with the rate of each."""
        parameters = [p for p, _ in part]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        states = [self._state_of(p, dtype) for p in parameters]
        values, gradient = (
            torch.cat([t.detach().to(dtype).reshape(1, -1) for t in tensors], 1)
            for tensors in (parameters, [p.grad for p in parameters if p.grad is not None])
        )
        means, squares = (_in_rows([state[name].to(dtype) for state in states])[:, None] for name in ("mean", "square"))
        for state in states:
            state["step"] += 1
        steps, sizes = torch.stack([state["step"] for state in states]).max(), [p.numel() for p in parameters]
        change, means, squares = learned_step(self.network.like(values), values, gradient, means, squares, steps, sizes)
        pieces = (t.split(sizes, -1) for t in (change, means, squares))
        for (p, lr), state, moved, mean, square in zip(part, states, *pieces, strict=True):
            p.sub_(moved.view(p.shape).to(p.dtype), alpha=lr)
            state["mean"].copy_(mean.view(state["mean"].shape))
            state["square"].copy_(square.view(state["square"].shape))

    def _state_of(self, p: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The steps and moving averages of a parameter; zeros at first."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("mean", "square"):
                state[name] = torch.zeros(len(self.network.decays), *p.shape, dtype=dtype, device=p.device)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; raises where another network made it."""
        if any(group.get("network") != self.network.digest for group in state_dict["param_groups"]):
            raise ValueError(
                "The state is that of another optimizer, or of another network. Give LearnedOptimizer the network that made it."
            )
        super().load_state_dict(state_dict)
