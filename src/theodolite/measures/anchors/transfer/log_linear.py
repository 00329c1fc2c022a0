"""Log-linear word models, p(word | context) ∝ exp⟨h, v_word⟩, and distances between two of them.

Everything is computed in float64 and from logits: no probability is formed before its logarithm is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError

#: Singular values of a logit matrix below this fraction of the largest count as rounding.
RANK_CUTOFF = 1e-10
#: Logits held at once.
CHUNK_ELEMENTS = 1 << 22


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
        for name, tensor in (("states", states), ("weight", weight)):
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
        if logits.ndim != 2:
            raise ValueError(f"logits must be (contexts, words). Got shape {tuple(logits.shape)}.")
        if not logits.isfinite().all():
            raise NonFiniteError("logits hold NaN or infinity; words the model excludes must be left out.")
        left, values, right = torch.linalg.svd(logits.detach().cpu().double(), full_matrices=False)
        found = int((values > RANK_CUTOFF * values[:1]).sum()) if rank is None else rank
        return cls(left[:, :found] * values[:found], right[:found].mT)

    @property
    def contexts(self) -> int:
        """Number of contexts."""
        return self.states.shape[0]

    @property
    def words(self) -> int:
        """Size of the vocabulary."""
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
