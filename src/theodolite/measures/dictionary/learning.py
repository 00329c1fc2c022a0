"""Learning dictionaries: decode, compare with the data, step, bring atoms back to unit length; several runs as one program.

The masked objective decodes each signal from its visible coordinates and is charged on hidden ones only, where the noise
knows nothing of the code. The plain one decodes from, and is charged on, all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from theodolite.arguments import (
    checked,
    choice,
    each,
    either,
    fraction,
    instance,
    integer,
    optional,
    positive,
    seed,
    shown,
    whole,
)
from theodolite.interrupts import unbroken
from theodolite.measures.dictionary.arrays import as_real, unit_rows
from theodolite.measures.dictionary.decoding import Decoder, check_decoder, decode, reconstruct
from theodolite.measures.dictionary.hidden import Masks, hidden_count, visible_masks
from theodolite.measures.dictionary.matching_pursuit import FROM_ONE, Selection, SparseCodes
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.problem.arguments import a_tensor, of_dimensions, tensors_fit
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.training.interruption import deferred_interrupt

Objective = Literal["masked", "reconstruction"]
Optimizer = Literal["adam", "sgd"]

_BETAS, _EPS = (0.9, 0.999), 1e-8
_SHORTEST = 1e-12  # no atom is divided by a length below this


# Where learning starts: atoms taken from samples, random ones, or given ones.


def start_seeds(random_state: Any, count: int = 1) -> tuple[int, ...]:
    """The seeds of `count` starts that a scikit-learn `random_state` (seed, generator or None) stands for."""
    drawn = check_random_state(random_state).randint(np.iinfo(np.int32).max, size=count)
    return tuple(int(seed) for seed in drawn)


def initial_dictionary(signals: Tensor, atoms: int, init: Any = "samples", *, seed: int = 0) -> Tensor:
    """`atoms` directions (atoms, dim) to start from.

    "samples" takes signals (n, dim) without repetition, those that are not zero; what is lacking, and everything for
    "random", is Gaussian. An array (atoms, dim) is taken as it is.
    """
    dim = signals.shape[1]
    if not isinstance(init, str):
        given = as_real("init", init).to(signals)
        if tuple(given.shape) != (atoms, dim):
            raise ValueError(f"init must be ({atoms}, {dim}): n_components atoms of as many features. Got {tuple(given.shape)}.")
        if not torch.isfinite(given).all():
            raise ValueError("init has NaN or infinite entries.")
        if not given.any(1).all():
            raise ValueError("init has atoms of length zero: give each a direction.")
        return given.clone()
    if init not in ("samples", "random"):
        raise ValueError(f"init must be 'samples', 'random' or an array (atoms, dim). Got {init!r}.")
    random = np.random.default_rng((seed, 2))
    start = torch.from_numpy(random.standard_normal((atoms, dim))).to(signals)
    if init == "samples":
        usable = torch.nonzero(signals.square().sum(1) > 0)[:, 0].cpu().numpy()
        chosen = torch.from_numpy(random.permutation(usable)[:atoms]).to(signals.device)
        start[: len(chosen)] = signals[chosen]
    return start


# The steps of learning.

_BYTES = 8 * 4  # per number of an atom at the least: itself, its gradient, both moments of Adam


@dataclass(frozen=True)
class LearningSettings:
    """How to learn: objective, decoding, hiding, steps. `hidden_fraction` and `masks` concern the masked objective."""

    sparsity: int
    objective: Objective = "masked"
    hidden_fraction: float = 0.1
    masks: Masks = "batch"
    decoder: Decoder = "omp"
    selection: Selection = "raw"
    penalty: float = 0.1
    batch_size: int = 200
    learning_rate: float = 1e-3
    optimizer: Optimizer = "adam"
    shuffle: bool = True

    def __post_init__(self) -> None:
        either("objective", self.objective, get_args(Objective))
        either("optimizer", self.optimizer, get_args(Optimizer))
        choice("masks", self.masks, get_args(Masks))
        either("selection", self.selection, get_args(Selection))
        check_decoder(self.decoder, self.penalty)
        integer("batch_size", self.batch_size, least=1, wanted=FROM_ONE)
        integer("sparsity", self.sparsity, least=1, wanted=FROM_ONE)
        positive("learning_rate", self.learning_rate)
        if self.objective == "masked":
            fraction("hidden_fraction", self.hidden_fraction)

    def check(self, samples: int, dim: int, atoms: int) -> None:
        """Refuse what cannot be learned with from such data, saying why."""
        visible = dim - hidden_count(dim, self.hidden_fraction) if self.objective == "masked" else dim
        if self.decoder == "omp" and self.sparsity > min(atoms, visible):
            raise ValueError(
                f"sparsity must be at most {min(atoms, visible)}: there are {atoms} atoms and {visible} visible coordinates. "
                f"Got {self.sparsity}."
            )
        if samples < 1:
            raise ValueError("There are no samples to learn from.")
        needed, there = _BYTES * atoms * dim, available_bytes(torch.device("cpu"))
        if needed > there:
            raise ValueError(
                f"{atoms} atoms of {dim} numbers need some {needed / 2**30:.4g} GiB; {there / 2**30:.3g} are free. Take fewer."
            )


@dataclass(frozen=True, eq=False)
class LearnerState:
    """Where learning stands: components (runs, atoms, dim), both moments of Adam, steps and whole passes done."""

    components: Tensor
    first: Tensor
    second: Tensor
    step: int = 0
    epoch: int = 0

    @classmethod
    def begin(cls, initial: Tensor) -> LearnerState:
        """At normalised copies of the initial atoms (runs, atoms, dim)."""
        components = unit_rows(initial.detach())
        if not bool(components.any(-1).all()):
            raise ValueError("The initial dictionary has atoms of length zero: give each a direction.")
        return cls(components, torch.zeros_like(components), torch.zeros_like(components))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearnedDictionaries(Result):
    """Dictionaries (runs, atoms, dim) with unit atoms. `losses` (epochs, runs): mean over each pass; `state` resumes."""

    components: Tensor
    losses: Tensor
    settings: LearningSettings
    state: LearnerState = field(repr=False)
    interrupted: bool = False

    def rows(self) -> list[Row]:
        first = self.state.epoch - len(self.losses)
        return [
            {"run": run, "epoch": first + epoch + 1, "loss": loss}
            for epoch, losses in enumerate(self.losses.tolist())
            for run, loss in enumerate(losses)
        ]

    def sentence(self) -> str:
        runs, atoms, dim = self.components.shape
        words = f"{runs} dictionaries of {atoms} atoms" if runs > 1 else f"A dictionary of {atoms} atoms"
        if not len(self.losses):
            return f"{words} in {dim} dimensions, not trained."
        kind = "on hidden coordinates" if self.settings.objective == "masked" else "of reconstruction"
        return (
            f"{words} in {dim} dimensions after {self.state.epoch} passes: squared error {kind} "
            f"{float(self.losses[-1].mean()):.4g} per signal, {float(self.losses[0].mean()):.4g} in the first pass."
        )


@checked(signals=a_tensor, initial=optional(a_tensor), settings=instance(LearningSettings), epochs=whole, seeds=each(seed))
def learn_dictionaries(
    signals: Tensor,
    initial: Tensor | None,
    settings: LearningSettings,
    *,
    epochs: int,
    seeds: Sequence[int] = (0,),
    observed: Tensor | None = None,
    resume: LearnerState | None = None,
    progress: bool | None = False,
) -> LearnedDictionaries:
    """Train from `initial` (runs, atoms, dim), or go on from `resume`, for `epochs` passes over signals (runs, n, dim).

    Signals of shape (n, dim) serve all runs. `observed`, bool of their shape, says what is known (entries elsewhere are
    ignored). `seeds`, one per run, decide the hidden coordinates and, with shuffle, the order; each step has its own stream,
    so a resumed run equals one that was never stopped. Ctrl-C ends between two steps with what was learned.
    """
    if resume is not None:
        state = resume
    elif initial is None or initial.ndim != 3:
        got = "nothing" if initial is None else f"shape {tuple(initial.shape)}"
        raise ValueError(f"initial must be (runs, atoms, dim) unless learning is resumed. Got {got}.")
    else:
        state = LearnerState.begin(initial)
    if len(seeds) != len(state.components):
        raise ValueError(f"seeds must be one per run of initial. Got {len(seeds)} for {len(state.components)} runs.")
    live, Y, known = _prepared(state, signals, settings, seeds, observed)
    begun = time.perf_counter()
    losses: list[Tensor] = []
    interrupted, healthy = False, True
    with (
        unbroken(torch.no_grad()),
        deferred_interrupt() as pressed,
        counting("learning", progress=progress, total=epochs) as advance,
    ):
        for _ in range(epochs):
            total = Y.new_zeros(len(seeds))
            for batch, shown in _batches(Y, known, settings, live.epoch, seeds):
                live, loss = _step(live, batch, shown, settings, seeds)
                total += loss * batch.shape[1]
            live = replace(live, epoch=live.epoch + 1)
            losses.append(total / Y.shape[1])
            advance(1)
            # Steps too long for the numbers leave no atoms of length 1.
            lengths: Tensor = live.components.norm(dim=-1)
            healthy = bool(torch.isfinite(losses[-1]).all()) and bool(((lengths - 1).abs() < 1e-3).all())
            interrupted = healthy and pressed()
            if interrupted or not healthy:
                break
    return LearnedDictionaries(
        components=live.components.clone(),
        losses=torch.stack(losses) if losses else Y.new_zeros(0, len(seeds)),
        settings=settings,
        state=live,
        interrupted=interrupted,
        outcome=Outcome.FINISHED if healthy else Outcome.DIVERGED,
        seed=int(seeds[0]),
        cost=Cost(seconds=time.perf_counter() - begun),
    )


def learn_batch(
    state: LearnerState,
    signals: Tensor,
    settings: LearningSettings,
    *,
    seeds: Sequence[int] = (0,),
    observed: Tensor | None = None,
) -> tuple[LearnerState, Tensor]:
    """One step on one batch: the new state, and the loss of each run before it."""
    live, Y, known = _prepared(state, signals, settings, seeds, observed)
    with unbroken(torch.no_grad()):
        return _step(live, Y, known, settings, seeds)


def _mask(name: str, value: Any) -> Tensor:
    """A tensor of true and false."""
    if a_tensor(name, value).dtype != torch.bool:
        raise ValueError(f"{name} must hold true and false. Got {value.dtype} numbers, {shown(value)}.")
    return value  # type: ignore[no-any-return]


@checked(
    components=of_dimensions(3),
    signals=of_dimensions(3),
    settings=instance(LearningSettings),
    visible=optional(_mask),
    observed=_mask,
)
@tensors_fit
def objective_and_gradient(
    components: Tensor, signals: Tensor, settings: LearningSettings, visible: Tensor | None, observed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss (runs,) and its gradient (runs, atoms, dim) with the codes held fixed.

    Decoded from `visible` (bool, (runs, 1 or n, dim)) and charged on what is not visible; None decodes from, and charges on, all.
    Only the `observed` coordinates take part.
    """
    return _objective_and_gradient(components, signals, settings, visible, observed)


def _objective_and_gradient(
    components: Tensor, signals: Tensor, settings: LearningSettings, visible: Tensor | None, observed: Tensor | None
) -> tuple[Tensor, Tensor]:
    seen = observed if visible is None else visible if observed is None else visible & observed
    charged = observed if visible is None else ~visible if observed is None else ~visible & observed
    codes = decode(signals, components, settings.sparsity, seen, settings.decoder, settings.selection, settings.penalty)
    left = signals - reconstruct(codes, components)
    left = left if charged is None else torch.where(charged, left, 0.0)
    n = signals.shape[1]
    return left.square().sum((1, 2)) / n, _times_codes(codes, left, components) * (-2 / n)


def _times_codes(codes: SparseCodes | Tensor, left: Tensor, components: Tensor) -> Tensor:
    """codesᵀ @ left, (R, p, d)."""
    if isinstance(codes, Tensor):
        return codes.transpose(1, 2) @ left
    R, p, d = components.shape
    rows = codes.support.clamp(min=0) + torch.arange(R, device=left.device)[:, None, None] * p
    spread = (codes.values[..., None] * left[:, :, None, :]).reshape(-1, d)
    return components.new_zeros(R * p, d).index_add_(0, rows.reshape(-1), spread).view(R, p, d)


def _step(
    state: LearnerState, Y: Tensor, known: Tensor | None, settings: LearningSettings, seeds: Sequence[int]
) -> tuple[LearnerState, Tensor]:
    """One step, in place on the tensors of the state."""
    visible = None
    if settings.objective == "masked":
        hidden = hidden_count(Y.shape[2], settings.hidden_fraction)
        visible = visible_masks(Y.shape[2], hidden, masks=settings.masks, batch=Y.shape[1], step=state.step, seeds=seeds)
        visible = visible.to(Y.device)
    loss, gradient = _objective_and_gradient(state.components, Y, settings, visible, known)
    t = state.step + 1
    if settings.optimizer == "adam":
        state.first.lerp_(gradient, 1 - _BETAS[0])
        state.second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        spread = (state.second / (1 - _BETAS[1] ** t)).sqrt_().add_(_EPS)
        state.components.addcdiv_(state.first, spread, value=-settings.learning_rate / (1 - _BETAS[0] ** t))
    else:
        state.components.add_(gradient, alpha=-settings.learning_rate)
    lengths: Tensor = state.components.norm(dim=-1, keepdim=True)
    state.components.div_(lengths.clamp_(min=_SHORTEST))
    return replace(state, step=t), loss


def _batches(
    Y: Tensor, known: Tensor | None, settings: LearningSettings, epoch: int, seeds: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The batches of each run, (runs, b, d), and what is known of them."""
    n, runs = Y.shape[1], torch.arange(len(seeds))[:, None]
    order = torch.arange(n).expand(len(seeds), n)
    if settings.shuffle:
        order = torch.from_numpy(np.stack([np.random.default_rng((seed, epoch, 1)).permutation(n) for seed in seeds]))
    for rows in order.to(Y.device).split(settings.batch_size, dim=1):
        yield Y[runs, rows], None if known is None else known[runs, rows]


def _prepared(
    state: LearnerState, signals: Tensor, settings: LearningSettings, seeds: Sequence[int], observed: Tensor | None
) -> tuple[LearnerState, Tensor, Tensor | None]:
    """A state to write to, signals (runs, n, dim) with zeros where nothing was observed, and what was."""
    runs, atoms, dim = state.components.shape
    if len(seeds) != runs:
        raise ValueError(f"seeds must be one per run. Got {len(seeds)} for {runs} runs.")
    shape = (runs, signals.shape[-2], dim)
    if signals.ndim not in (2, 3) or signals.shape[-1] != dim or (signals.ndim == 3 and len(signals) != runs):
        raise ValueError(f"signals must be (n, {dim}) or ({runs}, n, {dim}). Got {tuple(signals.shape)}.")
    Y = signals.detach().to(state.components).expand(shape)
    if observed is None and not torch.isfinite(Y).all():
        raise ValueError("signals have NaN or infinite entries; say which entries are known by observed.")
    known = None if observed is None else observed.expand(shape)
    settings.check(Y.shape[1], dim, atoms)
    # A state is never written to: whoever holds one may resume from it again.
    live = replace(state, components=state.components.clone(), first=state.first.clone(), second=state.second.clone())
    return live, Y if known is None else torch.where(known, Y, 0.0), known
