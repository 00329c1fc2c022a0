"""The output head of any model: its weight, the states it reads, and the check that the logits are linear in them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.errors import NumericalWarning, nearest
from theodolite.problem.calling import main_output, unwrap
from theodolite.problem.tensors import named_tensors

#: How far h Wᵀ + b may be from the model's own logits, relative to the largest, in full and in half precision.
TOLERANCE, HALF_TOLERANCE = 1e-3, 3e-2
HALF = (torch.bfloat16, torch.float16)
REMEDY = "Name the layer with head='its.name', or pass the states and the weight to probe_states."


@dataclass(frozen=True, eq=False)
class OutputHead:
    """logits = `scale` · h Wᵀ + bias, with `weight` W (n, d) and states h (N, d) as they enter `module`.

    Half precision is widened to float32. `notes` say what was folded in or taken away.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    notes: tuple[str, ...] = ()

    def states(self, caught: Tensor) -> Tensor:
        """What entered the module as rows (N, d) in the weight's precision, with the scale folded in."""
        rows = caught.reshape(-1, caught.shape[-1]).to(self.weight)
        return rows if self.scale == 1.0 else self.scale * rows

    def restricted(self, words: int | None) -> OutputHead:
        """Only the first `words` rows of the weight."""
        if words is None or words == len(self.weight):
            return self
        if not 0 < words < len(self.weight):
            raise ValueError(f"restrict_vocab must be 1 .. {len(self.weight)}, the rows of the head. Got {words}.")
        bias = None if self.bias is None else self.bias[:words]
        note = f"the first {words} of {len(self.weight)} vocabulary rows"
        return OutputHead(self.module, self.weight[:words], bias, self.scale, (*self.notes, note))


class _HeadReached(BaseException):
    """Ends a forward pass at the head, where all that is wanted is known; not an Exception, so that no model catches it."""


@dataclass
class _Caught:
    states: Tensor | None = None


@contextmanager
def _catching(module: nn.Module, *, stop: bool) -> Iterator[_Caught]:
    """Catch what first enters the module, and end the forward pass there if `stop`."""
    caught = _Caught()

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if caught.states is None:
            caught.states = next(t for _, t in named_tensors((args, kwargs)) if t.is_floating_point())
        if stop:
            raise _HeadReached

    handle = module.register_forward_pre_hook(catch, with_kwargs=True, prepend=False)
    try:
        yield caught
    finally:
        handle.remove()


def call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's raw output, without the key/value cache that language models would also return."""
    quiet = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(*args, **quiet, **kwargs)


def states_of(model: nn.Module, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What enters the head (..., d); the forward pass ends there, so no logits are computed.

    Models whose layers move weights about after each call (offloading) are run to the end.
    """
    stop = not any(hasattr(module, "_hf_hook") for module in model.modules())
    with _catching(head, stop=stop) as caught, suppress(_HeadReached):
        call(model, args, kwargs)
    if caught.states is None:
        raise ValueError(f"The head {type(head).__name__} was not called in the forward pass of {type(model).__name__}. {REMEDY}")
    return caught.states


@torch.no_grad()
def find_head(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], head: str | nn.Module | None = None) -> OutputHead:
    """The linear layer that makes the logits, tried out on one batch `model(*args, **kwargs)` in the model's present mode.

    It is `head`, or `model.get_output_embeddings()`, or the `nn.Linear` whose output is the model's. Logits that are a constant
    times h Wᵀ, have a constant bias added, or are its log-softmax are log-linear as well. Capped logits c · tanh(z/c) are
    analysed before the cap, with a warning; anything else is refused.
    """
    model = unwrap(model)
    module = _named(model, head) if head is not None else _announced(model)
    if module is None:
        module, states, logits = _searched(model, args, kwargs)
    else:
        with _catching(module, stop=False) as caught:
            logits = main_output(call(model, args, kwargs))
        if caught.states is None:
            raise ValueError(
                f"The head {type(module).__name__} was not called in the forward pass of {type(model).__name__}. {REMEDY}"
            )
        states = caught.states
    return _checked(model, module, states, logits)


def _named(model: nn.Module, head: str | nn.Module) -> nn.Module:
    known = dict(model.named_modules())
    if isinstance(head, str) and head not in known:
        near = ", ".join(nearest(head, [name for name in known if name]))
        raise ValueError(f"head={head!r} is no submodule of {type(model).__name__}. Nearest names: {near}.")
    module = known[head] if isinstance(head, str) else head
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"head must be a linear layer with a weight (n, d). Got {type(module).__name__}.")
    return module


def _announced(model: nn.Module) -> nn.Module | None:
    """What a Hugging Face model says its head is, if that has a weight."""
    method = getattr(model, "get_output_embeddings", None)
    found = method() if callable(method) else None
    weight = getattr(found, "weight", None)
    return found if isinstance(found, nn.Module) and isinstance(weight, Tensor) and weight.ndim == 2 else None


def _searched(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[nn.Module, Tensor, Tensor]:
    """The last linear layer whose output has the shape of the model's, best if it is the same numbers; its input; the logits."""
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, inputs, output, name=name: seen.append((name, m, inputs[0], output)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        logits = main_output(call(model, args, kwargs))
    finally:
        for handle in handles:
            handle.remove()
    fitting = [one for one in seen if one[3].shape[-1] == logits.shape[-1] and one[3].numel() == logits.numel()]
    if not fitting:
        last = ", ".join(f"{name!r} {tuple(output.shape)}" for name, _, _, output in seen[-3:]) or "none"
        raise ValueError(
            f"{type(model).__name__} has no linear output head: its output is {tuple(logits.shape)}, and the linear layers "
            f"called last gave {last}. {REMEDY}"
        )
    same = [one for one in fitting if torch.equal(one[3].reshape(logits.shape), logits)]
    _, module, states, _ = (same or fitting)[-1]
    return module, states, logits


def _checked(model: nn.Module, module: nn.Module, states: Tensor, logits: Tensor) -> OutputHead:
    """The head, once h Wᵀ + b is known to be the logits or something as good."""
    weight, own_bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    n, d = weight.shape
    if states.shape[-1] != d or logits.shape[-1] != n or states.numel() // d != logits.numel() // n:
        raise ValueError(
            f"The head {type(module).__name__} has the weight {tuple(weight.shape)} and reads {tuple(states.shape)}, but the "
            f"model's output is {tuple(logits.shape)}: that is not its output. {REMEDY}"
        )
    half = weight.dtype in HALF
    exact = torch.promote_types(weight.dtype, torch.float32)
    w = weight.detach().to(exact)
    bias = own_bias.detach().to(exact) if isinstance(own_bias, Tensor) else None
    notes = (f"{str(weight.dtype).removeprefix('torch.')} weights widened to float32",) if half else ()
    z = F.linear(states.reshape(-1, d).to(exact), w, bias)
    given = logits.reshape(-1, n).to(exact)
    scale, extra, note = _law(model, z, given, HALF_TOLERANCE if half else TOLERANCE)
    if extra is not None:
        bias = extra if bias is None else bias + extra
    elif bias is not None:
        bias = scale * bias
    return OutputHead(module, w, bias, scale, (*notes, note) if note else notes)


def _law(model: nn.Module, z: Tensor, given: Tensor, tolerance: float) -> tuple[float, Tensor | None, str]:
    """How the logits `given` come from z = h Wᵀ + b: a factor, a bias to add, and what to say about it."""
    bound = tolerance * float(given.abs().max()) + torch.finfo(z.dtype).tiny

    def gap(guess: Tensor) -> float:
        return float((given - guess).abs().max())

    cap = _softcap(model)  # first: small logits look as if there were none
    if cap and gap(cap * torch.tanh(z / cap)) <= bound:
        note = f"logits capped at ±{cap:g} by the model; analysed are those before the cap"
        warnings.warn(f"The head is not log-linear: {note}.", NumericalWarning, stacklevel=5)
        return 1.0, None, note
    if gap(z) <= bound:
        return 1.0, None, ""
    scale = float((given * z).sum() / z.square().sum().clamp_min(torch.finfo(z.dtype).tiny))
    if gap(scale * z) <= bound:
        return scale, None, f"logits scaled by {scale:.6g}, folded into the states"
    extra = (given - z).mean(0)
    if len(z) > 1 and gap(z + extra) <= bound:
        return 1.0, extra, "a constant added to the logits after the head, taken as its bias"
    if gap(z.log_softmax(-1)) <= bound:
        return 1.0, None, "the model returns log-probabilities; analysed are the logits before"
    raise ValueError(
        f"The head of {type(model).__name__} is not log-linear: the model's logits differ from h Wᵀ + b by up to {gap(z):.3g} "
        f"(largest logit {float(given.abs().max()):.3g}), and no constant factor, bias, log-softmax or known cap explains it. "
        f"{REMEDY}"
    )


def _softcap(model: nn.Module) -> float | None:
    """The cap that a Hugging Face configuration, or the text part of one, names."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        value = getattr(part, "final_logit_softcapping", None)
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
