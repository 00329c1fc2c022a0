"""The output head of any model: its weight, the states it reads, and the check that the logits are linear in them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.arguments import checked, instance, up_to
from theodolite.errors import NumericalWarning, TheodoliteError
from theodolite.interrupts import called_within, unbroken_context
from theodolite.problem.activations import Call, Hooks, recorded_calls
from theodolite.problem.arguments import a_model
from theodolite.problem.calling import main_output, unwrap
from theodolite.problem.tensors import named_tensors
from theodolite.text import nearest

#: How far h Wᵀ + b may be from the model's own logits, relative to the largest, in full and in half precision.
TOLERANCE, HALF_TOLERANCE = 1e-3, 3e-2
#: A call of the head is another candidate where its gap is within this factor of the least.
RIVAL = 10
HALF = (torch.bfloat16, torch.float16)
REMEDY = "Name the layer with head='its.name', or pass the states and the weight to probe_states."


@dataclass(frozen=True, eq=False)
class OutputHead:
    """logits = `scale` · h Wᵀ + bias, with `weight` W (n, d) and states h (N, d) as they enter `module`.

    Half precision is widened to float32. `call` is the number of the call of `module` in a forward pass that makes the logits;
    `cap` c, where there is one, means that the model turns these logits into c · tanh(z/c). `notes` say what was folded in or
    taken away.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    notes: tuple[str, ...] = ()
    call: int = 0
    cap: float | None = None

    def states(self, caught: Tensor) -> Tensor:
        """What entered the module as rows (N, d) in the weight's precision, with the scale folded in."""
        rows = caught.reshape(-1, caught.shape[-1]).to(self.weight)
        return rows if self.scale == 1.0 else self.scale * rows

    def restricted(self, words: int | None) -> OutputHead:
        """Only the first `words` rows of the weight."""
        if words is None or up_to("words", words, len(self.weight), of="rows of the head") == len(self.weight):
            return self
        bias = None if self.bias is None else self.bias[:words]
        note = f"the first {words} of {len(self.weight)} vocabulary rows"
        return replace(self, weight=self.weight[:words], bias=bias, notes=(*self.notes, note))


class _HeadReached(BaseException):
    """Ends a forward pass at the head, where all that is wanted is known; not an Exception, so that no model catches it."""


@unbroken_context
def _catching(module: nn.Module, last: int | None = None) -> Iterator[list[Tensor | None]]:
    """Catch what enters the module, call by call (None: no states), and end the forward pass at call `last`, if given."""
    caught: list[Tensor | None] = []

    def catch(call: Call) -> None:
        caught.append(_entering(call))
        if last is not None and len(caught) > last:
            raise _HeadReached

    with Hooks({"head": module}, catch, before=True):
        yield caught


def _entering(call: Call) -> Tensor | None:
    return next((t for _, t in named_tensors((call.args, call.kwargs)) if t.is_floating_point()), None)


def call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's raw output, without the key/value cache that language models would also return."""
    quiet = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        return model(*args, **quiet, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError | TheodoliteError) or not str(error):
            raise
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for _, t in named_tensors((args, kwargs)))
        raise ValueError(
            f"The model refused its args of the data ({shapes}): {str(error).splitlines()[0].rstrip('.')}."
        ) from error


def states_of(model: nn.Module, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], number: int = 0) -> Tensor:
    """What enters the head (..., d) at its call `number`; the forward pass ends there, so no logits are computed.

    Models whose layers move weights about after each call (offloading) are run to the end.
    """
    stop = not any(hasattr(module, "_hf_hook") for module in model.modules())
    with _catching(head, number if stop else None) as caught, suppress(_HeadReached):
        call(model, args, kwargs)
    return _reached(model, head, caught, number)[number]


def _reached(model: nn.Module, head: nn.Module, caught: list[Tensor | None], number: int = 0) -> list[Tensor]:
    """The states of all calls, if there were so many and each had states."""
    what = f"The head {type(head).__name__} was "
    if len(caught) <= number:
        times = f"called only {len(caught)} times" if caught else "not called"
        raise ValueError(f"{what}{times} in the forward pass of {type(model).__name__}. {REMEDY}")
    states = [one for one in caught if one is not None]
    if len(states) < len(caught):
        raise ValueError(
            f"{what}called with whole numbers in the forward pass of {type(model).__name__}: it reads tokens, no states. {REMEDY}"
        )
    return states


@called_within(torch.no_grad)
@checked(model=a_model, args=instance(tuple), kwargs=instance(dict))
def find_head(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], head: str | nn.Module | None = None) -> OutputHead:
    """The linear layer that makes the logits, tried out on one batch `model(*args, **kwargs)` in the model's present mode.

    It is `head`, or `model.get_output_embeddings()`, or the `nn.Linear` whose output is the model's. Logits that are a constant
    times h Wᵀ, have a constant bias added, or are its log-softmax are log-linear as well. Capped logits c · tanh(z/c) are
    analysed before the cap, with a warning; anything else is refused. Of several calls of the layer it is the one that gives
    the logits.
    """
    model = unwrap(model)
    module = named_head(model, head) if head is not None else announced_head(model)
    if module is None:
        module, caught, logits = _searched(model, args, kwargs)
    else:
        with _catching(module) as caught:
            logits = main_output(call(model, args, kwargs))
    return _checked(model, module, _reached(model, module, caught), logits)


def named_head(model: nn.Module, head: str | nn.Module) -> nn.Module:
    """The layer called so, or the layer itself, if it has a weight (n, d)."""
    known = dict(model.named_modules())
    if isinstance(head, str) and head not in known:
        near = ", ".join(nearest(head, [name for name in known if name]))
        raise ValueError(f"head={head!r} is no submodule of {type(model).__name__}. Nearest names: {near}.")
    module = known[head] if isinstance(head, str) else head
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"head must be a linear layer with a weight (n, d). Got {type(module).__name__}.")
    return module


def announced_head(model: nn.Module) -> nn.Module | None:
    """What a Hugging Face model says its head is, if that has a weight."""
    method = getattr(model, "get_output_embeddings", None)
    found = method() if callable(method) else None
    weight = getattr(found, "weight", None)
    return found if isinstance(found, nn.Module) and isinstance(weight, Tensor) and weight.ndim == 2 else None


def _searched(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[nn.Module, list[Tensor | None], Tensor]:
    """The last linear layer whose output has the shape of the model's, best if it is the same numbers; its inputs; the logits."""
    with recorded_calls({name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}) as seen:
        logits = main_output(call(model, args, kwargs))
    fitting = [one for one in seen if one.output.shape[-1] == logits.shape[-1] and one.output.numel() == logits.numel()]
    if not fitting:
        last = ", ".join(f"{one.name!r} {tuple(one.output.shape)}" for one in seen[-3:]) or "none"
        raise ValueError(
            f"{type(model).__name__} has no linear output head: its output is {tuple(logits.shape)}, and the linear layers "
            f"called last gave {last}. {REMEDY}"
        )
    same = [one for one in fitting if torch.equal(one.output.reshape(logits.shape), logits)]
    module = (same or fitting)[-1].module
    return module, [_entering(one) for one in seen if one.module is module], logits


class _Law(NamedTuple):
    """How the logits come from z = h Wᵀ + b: times `scale`, plus `extra`, then capped; what to say about it; what is left."""

    scale: float
    extra: Tensor | None
    cap: float | None
    note: str
    gap: float


def _checked(model: nn.Module, module: nn.Module, calls: list[Tensor], logits: Tensor) -> OutputHead:
    """The head, once h Wᵀ + b at one of its calls is known to be the logits or something as good."""
    weight, own_bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    n, d = weight.shape
    count = logits.numel() // n if logits.shape[-1] == n else -1
    fitting = {i: states for i, states in enumerate(calls) if states.shape[-1] == d and states.numel() == d * count}
    if not fitting:
        read = ", ".join(str(tuple(states.shape)) for states in calls[:4])
        raise ValueError(
            f"The head {type(module).__name__} has the weight {tuple(weight.shape)} and reads {read}, but the "
            f"model's output is {tuple(logits.shape)}: that is not its output. {REMEDY}"
        )
    half = weight.dtype in HALF
    exact = torch.promote_types(weight.dtype, torch.float32)
    w = weight.detach().to(exact)
    bias = own_bias.detach().to(exact) if isinstance(own_bias, Tensor) else None
    given, tolerance = logits.reshape(-1, n).to(exact), HALF_TOLERANCE if half else TOLERANCE
    products = {i: F.linear(states.reshape(-1, d).to(exact), w, bias) for i, states in fitting.items()}
    laws = {i: law for i, z in products.items() if (law := _law(_softcap(model), z, given, tolerance)) is not None}
    if not laws:
        least = min(float((given - z).abs().max()) for z in products.values())
        where = f" at the nearest of {len(products)} calls" if len(products) > 1 else ""
        raise ValueError(
            f"The head of {type(model).__name__} is not log-linear: the model's logits differ from h Wᵀ + b by up to {least:.3g}"
            f"{where} (largest logit {float(given.abs().max()):.3g}), and no constant factor, bias, log-softmax or known cap "
            f"explains it. {REMEDY}"
        )
    number = min(laws, key=lambda i: laws[i].gap)
    law, states = laws[number], calls[number]
    if any(other.gap <= RIVAL * law.gap and not torch.equal(calls[i], states) for i, other in laws.items()):
        raise ValueError(
            f"The head {type(module).__name__} is called {len(calls)} times in a forward pass of {type(model).__name__}, and "
            "different states give the same logits: which are meant is open. Pass the states and the weight to probe_states."
        )
    if law.cap:
        warnings.warn(f"The head is not log-linear: {law.note}.", NumericalWarning, stacklevel=4)
    if law.extra is not None:
        bias = law.extra if bias is None else bias + law.extra
    elif bias is not None:
        bias = law.scale * bias
    widened = f"{str(weight.dtype).removeprefix('torch.')} weights widened to float32" if half else ""
    notes = tuple(note for note in (widened, law.note) if note)
    return OutputHead(module, w, bias, law.scale, notes, number, law.cap)


def _law(cap: float | None, z: Tensor, given: Tensor, tolerance: float) -> _Law | None:
    """How the logits `given` come from z = h Wᵀ + b; None where it is none of the laws known."""
    bound = tolerance * float(given.abs().max()) + torch.finfo(z.dtype).tiny

    def gap(guess: Tensor) -> float:
        return float((given - guess).abs().max())

    # The cap first: small logits look as if there were none.
    if cap and (left := gap(cap * torch.tanh(z / cap))) <= bound:
        note = f"logits capped at ±{cap:g} by the model; analysed are those before the cap, the perplexity is with it"
        return _Law(1.0, None, cap, note, left)
    if (left := gap(z)) <= bound:
        return _Law(1.0, None, None, "", left)
    scale = float((given * z).sum() / z.square().sum().clamp_min(torch.finfo(z.dtype).tiny))
    if (left := gap(scale * z)) <= bound:
        return _Law(scale, None, None, f"logits scaled by {scale:.6g}, folded into the states", left)
    extra = (given - z).mean(0)
    if len(z) > 1 and (left := gap(z + extra)) <= bound:
        return _Law(1.0, extra, None, "a constant added to the logits after the head, taken as its bias", left)
    if (left := gap(z.log_softmax(-1))) <= bound:
        return _Law(1.0, None, None, "the model returns log-probabilities; analysed are the logits before", left)
    return None


def _softcap(model: nn.Module) -> float | None:
    """The cap that a Hugging Face configuration, or the text part of one, names."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        value = getattr(part, "final_logit_softcapping", None)
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
