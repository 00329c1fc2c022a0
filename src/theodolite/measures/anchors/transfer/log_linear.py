"""Log-linear word models, p(word | context) ∝ exp⟨h, v_word⟩, and distances between two of them.

Everything is computed in float64 and from logits: no probability is formed before its logarithm is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, finite, instance, positive, up_to, whole
from theodolite.errors import NonFiniteError
from theodolite.interrupts import unbroken
from theodolite.measures.anchors.probing.heads import announced_head, named_head
from theodolite.problem.arguments import (
    a_finite_tensor,
    a_model,
    a_tensor,
    numbers,
    numbers_in,
    of_dimensions,
    tensors_fit,
    without_nan,
)
from theodolite.problem.calling import copy_model, unwrap

#: Singular values of a logit matrix below this fraction of the largest count as rounding.
RANK_CUTOFF = 1e-10
#: Logits held at once.
CHUNK_ELEMENTS = 1 << 22
#: A number for every context, or a function of the states (..., dim) that gives one number each (...).
Shift = float | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LogLinear:
    """A word model on some contexts: states (contexts, dim), weight (words, dim) and perhaps a bias (words,).

    Held in float64 on the CPU. A bias becomes one more coordinate, [h; 1] and [v; bias], so that `states`, `weight` and
    `logits` always agree.

    >>> model = LogLinear(torch.zeros(3, 2), torch.randn(5, 2), bias=torch.arange(5.0))
    >>> model.logits()[0].tolist(), model.dim
    ([0.0, 1.0, 2.0, 3.0, 4.0], 3)
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("states", "weight") if self.bias is None else ("states", "weight", "bias"):
            a_tensor(name, getattr(self, name))
        states, weight = (t.detach().to(device="cpu", dtype=torch.float64) for t in (self.states, self.weight))
        if states.ndim != 2 or weight.ndim != 2 or states.shape[1] != weight.shape[1]:
            shapes = f"{tuple(states.shape)} and {tuple(weight.shape)}"
            raise ValueError(f"states must be (contexts, dim) and weight (words, dim) with one dim. Got {shapes}.")
        if not len(states) or not len(weight):
            raise ValueError(f"A word model needs contexts and words. Got {len(states)} contexts and {len(weight)} words.")
        if self.bias is not None:
            if self.bias.shape != weight.shape[:1]:
                raise ValueError(f"bias must be ({len(weight)},), one number per word. Got {tuple(self.bias.shape)}.")
            states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
            weight = torch.cat([weight, self.bias.detach().to(weight)[:, None]], dim=1)
        for name, tensor in (("states", states), ("weight" if self.bias is None else "weight or bias", weight)):
            if not tensor.isfinite().all():
                raise NonFiniteError(f"{name} holds NaN or infinity; leave out those contexts or words first.")
        object.__setattr__(self, "states", states)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "bias", None)

    @classmethod
    def from_logits(cls, logits: Tensor, *, rank: int | None = None) -> LogLinear:
        """The model behind logits (contexts, words), by singular values; `rank` is the dimension, found if not given.

        Logits tell the states only as far as the atoms reach: where the atoms span the space of the states (the weight has
        rank d), a linear function of the states is one of these, so anchors are the same; what is orthogonal to all atoms is
        lost. Contexts that share atoms must come in one matrix; `at` parts them afterwards.
        """
        if a_tensor("logits", logits).ndim != 2:
            raise ValueError(f"logits must be (contexts, words). Got shape {tuple(logits.shape)}.")
        if not logits.isfinite().all():
            raise NonFiniteError("logits hold NaN or infinity; words the model excludes must be left out.")
        left, values, right = torch.linalg.svd(logits.detach().cpu().double(), full_matrices=False)
        above = int((values > RANK_CUTOFF * values[:1]).sum())
        found = above if rank is None else up_to("rank", rank, len(values), of="singular values")
        return cls(left[:, :found] * values[:found], right[:found].mT)

    @property
    def contexts(self) -> int:
        return self.states.shape[0]

    @property
    def words(self) -> int:
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        """Dimension of states and atoms, with the coordinate of a bias."""
        return self.weight.shape[1]

    def logits(self, rows: slice | Tensor | None = None) -> Tensor:
        """Logits (contexts, words), of the given rows only if there are any."""
        return (self.states if rows is None else self.states[rows]) @ self.weight.mT

    def chunks(self) -> tuple[Tensor, ...]:
        """Rows in parts whose logits fit in memory."""
        parts: tuple[Tensor, ...] = torch.arange(self.contexts).split(max(1, CHUNK_ELEMENTS // self.words))
        return parts

    def log_partition(self) -> Tensor:
        """log Z (contexts,)."""
        return torch.cat([self.logits(rows).logsumexp(1) for rows in self.chunks()])

    def at(self, rows: slice | Tensor) -> LogLinear:
        """The same words at some of the contexts."""
        return LogLinear(self.states[rows], self.weight)


@checked(teacher=without_nan, student=without_nan)
@tensors_fit
def kl_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(p* ‖ p) in nats from logits (..., words), one number per context; −inf are words that a model never says.

    >>> kl_divergence(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor(0.1201, dtype=torch.float64)
    """
    same_vocabulary(teacher, student)
    log_p, log_q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    # Σ p (log p − log q) + (q − p): the added terms sum to 0 and make each summand non-negative, so no cancellation
    absent = log_p == -torch.inf  # of p (log p − log q) + (q − p) only q is left
    ratio = torch.where(absent, 0.0, log_q - log_p)
    p, q = log_p.exp(), log_q.exp()
    terms = torch.where(ratio < 1, p * (torch.expm1(ratio.clamp(max=1)) - ratio), q - p - p * ratio)
    return torch.where(absent, q, terms).sum(-1)


@checked(teacher=without_nan, student=without_nan)
@tensors_fit
def total_variation(teacher: Tensor, student: Tensor) -> Tensor:
    """½ Σ |p* − p| from logits (..., words), one number per context."""
    same_vocabulary(teacher, student)
    difference = teacher.double().softmax(-1) - student.double().softmax(-1)
    return 0.5 * difference.abs().sum(-1)


def same_vocabulary(teacher: Tensor, student: Tensor) -> None:
    """Refuse logits over different vocabularies."""
    if teacher.shape[-1:] != student.shape[-1:]:
        sizes = f"{tuple(teacher.shape)} and {tuple(student.shape)}"
        raise ValueError(f"Teacher and student must share one vocabulary (the last axis of the logits). Got shapes {sizes}.")


# Students that a language-model loss cannot tell from their teacher, though their logits are ruined.
#
# Two constructions show that a low pre-training loss alone guarantees nothing downstream. The rare-word attack lowers the
# logit of one improbable word: the loss changes by at most s · p(word), a read-out that uses the logit by s. The shift attack
# adds one number to all logits of a context: the loss does not change at all, a thresholded read-out falls silent. Anchored
# logits ⟨h, v_j − v0⟩ are blind to the shift. Both are here on logits, on states and weights, and as an edited copy of a
# module, to test a downstream read-out with; what the user passes in is never changed.


@checked(logits=without_nan, word=whole, strength=finite)
@tensors_fit
def rare_word_logits(logits: Tensor, word: int, strength: float) -> Tensor:
    """Logits (..., words) with that of one word lowered by `strength`."""
    edited = logits.clone()
    edited[..., _word(word, logits.shape[-1])] -= strength
    return edited


@checked(weight=of_dimensions(2), state=of_dimensions(1), word=whole, strength=finite)
@tensors_fit
def rare_word_weight(weight: Tensor, state: Tensor, word: int, strength: float) -> Tensor:
    """Head weight (words, dim) that lowers the logit of one word by `strength` at one state (dim,): v ← v − s h / ‖h‖².

    >>> weight, state = torch.eye(3), torch.tensor([2.0, 1.0, 0.0])
    >>> rare_word_weight(weight, state, word=1, strength=4.0) @ state
    tensor([ 2., -3.,  0.])
    """
    if state.shape != weight.shape[1:]:
        raise ValueError(f"state must be ({weight.shape[1]},), one context of the head. Got shape {tuple(state.shape)}.")
    length = state.detach().double().square().sum()
    if not length > 0:
        raise ValueError("The state is zero or NaN: no head edit can move a logit there. Choose another context.")
    edited = weight.detach().clone()
    edited[_word(word, len(weight))] -= (strength * state.detach().double() / length).to(weight.dtype)
    return edited


@checked(probability=numbers_in(least=0, most=1), strength=numbers)
def rare_word_kl(probability: Tensor | float, strength: Tensor | float) -> Tensor:
    """KL(p* ‖ p) of the rare-word attack on a word of that probability: s p + log(1 − p (1 − e^−s)), at most s p.

    >>> rare_word_kl(0.01, 3.0)
    tensor(0.0205, dtype=torch.float64)
    """
    p = torch.as_tensor(probability, dtype=torch.float64)
    s = torch.as_tensor(strength, dtype=torch.float64)
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError(f"probability must lie in [0, 1]. Got {probability}.")
    added = p * torch.expm1(-s)  # exact where it is small; near −1 and far above 1 the sum of exponentials is
    shrunk = torch.where(added.abs() < 0.5, torch.log1p(added), torch.logaddexp(torch.log1p(-p), p.log() - s))
    return (s * p + shrunk).clamp_min(0)


@checked(logits=without_nan, shift=numbers)
@tensors_fit
def shift_logits(logits: Tensor, shift: Tensor | float) -> Tensor:
    """Logits (..., words) plus one number per context, (...) or the same for all."""
    moved = torch.as_tensor(shift, dtype=logits.dtype, device=logits.device)
    return logits + (moved[..., None] if moved.ndim else moved)


@checked(logits=a_finite_tensor, thresholds=a_finite_tensor, slack=positive)
@tensors_fit
def silencing_shift(logits: Tensor, thresholds: Tensor, *, slack: float = 1.0) -> float:
    """A shift that puts every logit at least `slack` > 0 below every threshold: min b − max z − slack."""
    if not slack > 0:
        raise ValueError(f"slack must be positive, so that every unit is inactive. Got {slack}.")
    if not logits.numel() or not thresholds.numel():
        raise ValueError("silencing_shift needs at least one logit and one threshold. Got none.")
    return float(thresholds.double().min() - logits.double().max()) - slack


@checked(model=instance(LogLinear), shift=numbers)
@tensors_fit
def shift_log_linear(model: LogLinear, shift: Tensor | float) -> LogLinear:
    """The shift inside a log-linear model: states [h; c] and atoms [v; 1]; c is a number or (contexts,)."""
    values = torch.as_tensor(shift, dtype=torch.float64).cpu()
    if values.ndim and values.shape != (model.contexts,):
        raise ValueError(f"shift must be a number or ({model.contexts},), one per context. Got shape {tuple(values.shape)}.")
    column = values.expand(model.contexts)[:, None]
    ones = torch.ones(model.words, 1, dtype=torch.float64)
    return LogLinear(torch.cat([model.states, column], dim=1), torch.cat([model.weight, ones], dim=1))


@checked(anchor=of_dimensions(1))
def shift_anchor(anchor: Tensor) -> Tensor:
    """The anchor vector that belongs to the shifted model: [v0; 1], which leaves every anchored logit as it was."""
    return torch.cat([anchor, anchor.new_ones(1)])


@checked(model=a_model, state=of_dimensions(1), word=whole, strength=finite)
def rare_word_module(model: nn.Module, state: Tensor, word: int, strength: float, *, head: str | None = None) -> nn.Module:
    """A copy of the model whose output head carries the rare-word edit for one state (the head's input, (dim,)).

    `head` is the name of the linear output layer; without it `get_output_embeddings()` is asked. A head tied to the input
    embedding is untied in the copy, so only the output changes.
    """
    twin = copy_model(unwrap(model))
    _, layer = _output_head(twin, head)
    weight = rare_word_weight(layer.weight, state.to(layer.weight.device), word, strength)
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    return twin


@checked(model=a_model, shift=lambda name, value: value if callable(value) else finite(name, value))
def shifted_module(model: nn.Module, shift: Shift, *, head: str | None = None) -> nn.Module:
    """A copy of the model with all logits of a context shifted by c(h): same probabilities, other logits.

    The head becomes a linear layer on [h; c(h)] with atoms [v; 1], so the copy is log-linear again and can be probed;
    `shift_anchor` gives the matching anchor. `shift` is a number or a function of the head's input.
    """
    twin = copy_model(unwrap(model))
    name, layer = _output_head(twin, head)
    weight = layer.weight.detach()
    wide = nn.Linear(weight.shape[1] + 1, len(weight), bias=layer.bias is not None, device=weight.device, dtype=weight.dtype)
    with unbroken(torch.no_grad()):
        wide.weight.copy_(torch.cat([weight, weight.new_ones(len(weight), 1)], dim=1))
        if layer.bias is not None:
            wide.bias.copy_(layer.bias)
    wide.train(layer.training)

    def widen(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states = inputs[0]
        values = shift(states) if callable(shift) else states.new_full(states.shape[:-1], shift)
        if values.shape != states.shape[:-1]:
            raise ValueError(f"shift must give {tuple(states.shape[:-1])}, one number per state. Got {tuple(values.shape)}.")
        return (torch.cat([states, values[..., None].to(states.dtype)], dim=-1), *inputs[1:])

    wide.register_forward_pre_hook(widen)  # hooks added later, such as a probe's, see the widened state
    if not name:  # the model is its own head
        return wide
    parent, _, leaf = name.rpartition(".")
    setattr(twin.get_submodule(parent), leaf, wide)
    return twin


def _output_head(model: nn.Module, head: str | None) -> tuple[str, nn.Linear]:
    """Name and layer of the linear output head."""
    layer = announced_head(model) if head is None else named_head(model, head)
    name = next((known for known, module in model.named_modules() if module is layer), None)
    if name is None or layer is None:
        raise ValueError(f"{type(model).__name__} does not name its output head. Pass head=, the name of a linear layer.")
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"The head must be an nn.Linear. {name!r} is a {type(layer).__name__}.")
    return name, layer


def _word(word: int, words: int) -> int:
    if not 0 <= word < words:
        raise ValueError(f"word must be an id from 0 to {words - 1}. Got {word}.")
    return word
