"""`track_eigenpairs`: how the sharpest directions move along a training run, each look started from the one before."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, count, entry, fraction, instance, one_or_each, seed, sequence
from theodolite.errors import NonFiniteError
from theodolite.linalg import Eigenpairs, subspace_overlap, top_eigenpairs
from theodolite.operators import LinearOperator, hessian, layer_hessians
from theodolite.operators.matrices import MATRICES, MatrixName
from theodolite.problem import Problem, split_like
from theodolite.problem.arguments import a_problem
from theodolite.problem.parameters import clean_names
from theodolite.progress import counting
from theodolite.results import Outcome, Result, ResultMapping, Row
from theodolite.text import nearest

# States of one architecture, one after the other: modules, state dicts or flat vectors, put into a copy of the model.

Checkpoint = nn.Module | Mapping[str, Tensor] | Tensor
Label = int | float | str


def labelled(checkpoints: Any, labels: Iterable[Label] | None, first: int = 0) -> Iterator[tuple[Label, Checkpoint]]:
    """Checkpoints with their labels, taken one at a time; by default the labels count on from `first`."""
    alone = isinstance(checkpoints, nn.Module | Mapping | str) or (isinstance(checkpoints, Tensor) and checkpoints.ndim < 2)
    if alone or not isinstance(checkpoints, Iterable):
        kind = type(checkpoints).__name__
        raise ValueError(f"checkpoints must be a list or a generator of them, [checkpoint] for a single one. Got one {kind}.")
    if labels is None:
        yield from zip(itertools.count(first), checkpoints, strict=False)
        return
    if isinstance(labels, Sized) and isinstance(checkpoints, Sized) and len(labels) != len(checkpoints):
        raise ValueError(f"There are {len(labels)} labels for {len(checkpoints)} checkpoints; each needs one.")
    names = iter(labels)
    for place, checkpoint in enumerate(checkpoints):
        label = next(names, None)
        if label is None:
            raise ValueError(f"labels ended after {place}, but there are more checkpoints; each needs one.")
        yield label, checkpoint


def load(checkpoint: Any, into: Problem, home: Problem, label: str) -> None:
    """Put a checkpoint into the problem that is measured, a copy of `home`; a vector leaves the rest as it is in `home`.

    `label` is what errors call the checkpoint.
    """
    if isinstance(checkpoint, Tensor):
        _load_vector(checkpoint, into, home, label)
        return
    state = checkpoint.state_dict() if isinstance(checkpoint, nn.Module) else checkpoint
    if not isinstance(state, Mapping):
        accepted = "a module, a state dict or a flat vector"
        raise ValueError(f"{label} must be {accepted}. Got {type(checkpoint).__name__}.")
    into.model.load_state_dict(_fitted(into.model, state, label))


@contextmanager
def telling(label: Label) -> Iterator[None]:
    """Errors inside say at which checkpoint they happened."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This happened at checkpoint {label!r}.")
        raise


def _load_vector(vector: Tensor, into: Problem, home: Problem, label: str) -> None:
    if vector.shape != (home.size,):
        raise ValueError(
            f"{label} is a tensor of shape {tuple(vector.shape)}; "
            f"a flat vector of the measured parameters has shape ({home.size},)."
        )
    _check_finite({"the vector": vector}, label)
    into.model.load_state_dict(home.model.state_dict())
    with torch.no_grad():
        for parameter, part in zip(into.parameters, split_like(vector.detach(), into.parameters), strict=True):
            parameter.copy_(part)


def _fitted(model: nn.Module, state: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A state dict under the model's own names; raises where it belongs to another architecture."""
    own = model.state_dict()
    keys = {name: key for key, name in clean_names(own).items()}
    given = {name: state[key] for key, name in clean_names(state).items()}
    unknown = [name for name in given if name not in keys]
    if unknown:
        near = ", ".join(nearest(unknown[0], keys, count=3))
        raise ValueError(f"{label} holds {unknown[0]!r}, which the problem's model has not. Nearest names: {near}.")
    for name, key in keys.items():
        if name not in given:
            raise ValueError(f"{label} lacks {name!r}. Save the whole state: model.state_dict().")
        mine, shape = own[key], tuple(getattr(given[name], "shape", ()))
        if isinstance(mine, Tensor) and shape != tuple(mine.shape):
            raise ValueError(f"{label}: {name} has shape {shape}; in the problem's model it is {tuple(mine.shape)}.")
    _check_finite(given, label)
    return {keys[name]: value for name, value in given.items()}


def _check_finite(tensors: Mapping[str, Any], label: str) -> None:
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{label}: {name} lies on the meta device and has no values.")
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"{label}: {name} holds NaN or inf. The run has diverged there; leave it out.")


Which = Literal["largest", "smallest", "magnitude"]
Matrix = Callable[[Problem], Any]

#: The name of the only matrix where no mapping of them is tracked.
_WHOLE = ""
_ADJECTIVES = {"largest": "largest", "smallest": "smallest", "magnitude": "strongest"}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class EigenTrajectory(Result):
    """The k extreme eigenpairs of one matrix at T checkpoints.

    `values` and `residuals` are (T, k); `losses` are the objective there. `with_previous` and `with_first` (T,) are the
    overlaps of the k-dimensional subspace with that of the checkpoint before (NaN at the first) and with the very first.
    `matvecs` are the products of each look and `warm` says which looks began at the eigenpairs of the one before. `first`
    (n, k) and `last` are kept so that a later call can go on from here.
    """

    labels: tuple[Label, ...]
    losses: tuple[float, ...]
    values: Tensor
    residuals: Tensor
    with_previous: Tensor
    with_first: Tensor
    matvecs: tuple[int, ...]
    warm: tuple[bool, ...]
    converged: tuple[bool, ...]
    first: Tensor
    last: Eigenpairs

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self) -> list[Row]:
        return [
            {
                "label": label,
                "index": i,
                "eigenvalue": float(self.values[t, i]),
                "residual": float(self.residuals[t, i]),
                "loss": self.losses[t],
                "overlap_previous": float(self.with_previous[t]),
                "overlap_first": float(self.with_first[t]),
                "matvecs": self.matvecs[t],
                "start": "warm" if self.warm[t] else "cold",
                "converged": self.converged[t],
            }
            for t, label in enumerate(self.labels)
            for i in range(self.values.shape[1])
        ]

    def sentence(self) -> str:
        k, which = self.values.shape[1], self.last.which
        extreme = self.values[:, -1 if which == "smallest" else 0]
        cold = [n for n, warm in zip(self.matvecs, self.warm, strict=True) if not warm]
        warm = [n for n, warm in zip(self.matvecs, self.warm, strict=True) if warm]
        spent = [f"{sum(cold) / len(cold):.3g} from a cold start"] if cold else []
        spent += [f"{sum(warm) / len(warm):.3g} from a warm one"] if warm else []
        state = "" if all(self.converged) else f"; {self.converged.count(False)} not converged ({self.outcome.value})"
        return (
            f"{k} {_ADJECTIVES[which]} eigenvalues at {len(self)} checkpoints ({self.labels[0]} to {self.labels[-1]}): "
            f"the {_ADJECTIVES[which]} goes from {float(extreme[0]):.4g} to {float(extreme[-1]):.4g}, the last subspace shares "
            f"{float(self.with_first[-1]):.2g} with the first; products per checkpoint: {', '.join(spent)}{state}."
        )


@checked(problem=a_problem, k=count, labels=sequence, layers=one_or_each(instance(str)), tol=fraction, seed=seed)
def track_eigenpairs(
    problem: Problem,
    checkpoints: Iterable[Checkpoint],
    k: int = 5,
    *,
    labels: Iterable[Label] | None = None,
    layers: str | Iterable[str] | None = None,
    matrix: Matrix | MatrixName | None = None,
    which: Which = "largest",
    tol: float = 1e-3,
    verify: Literal["auto", "full"] = "auto",
    start: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Any:
    """The k extreme eigenpairs at every checkpoint of a run, each look warm-started from the one before.

    Everything is measured on a copy of the problem's model: the model itself is never written to.

    Args:
        problem: loss and data, and a model of the checkpoints' architecture.
        checkpoints: modules, state dicts, or flat vectors of the problem's measured parameters (what else the model holds is then
            the problem's own). They are taken one at a time, so a generator may train in between and yield the same module again
            and again.
        labels: steps, epochs or names of the checkpoints; None counts them from 0.
        layers: names or globs: the exact blocks of these layers, in lockstep. None: the whole Hessian.
        matrix: another matrix: "gauss_newton" or "kernel", or a function of the problem that gives an operator or a mapping of
            them.
        which, tol, verify, seed: as in `top_eigenpairs`. Unless `verify="full"`, a look that starts from a verified one may trust
            it: then it is not `converged`, an eigenvalue that has risen from nowhere may be missing, and the next look searches
            in full. So such a value is seen one look late at most.
        start: what an earlier call returned; its looks come first, and the next one starts from its last.
        progress: show a bar; None shows it on a terminal only.

    Returns:
        An `EigenTrajectory`; with `layers`, or a `matrix` that gives a mapping, a `ResultMapping` of them by name.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> data = torch.diag(torch.tensor([1.0, 3.0]).double()), torch.zeros(2, 1).double()
    >>> def run():
    ...     for _ in range(3):
    ...         yield model
    ...         model.weight.data *= 0.5                      # or th.train(model, ..., steps=10)
    >>> problem = Problem(model, torch.nn.MSELoss(), data)
    >>> found = track_eigenpairs(problem, run(), k=1, labels=(0, 10, 20))
    >>> [(row["label"], round(row["eigenvalue"], 6), row["start"]) for row in found.rows()]
    [(0, 9.0, 'cold'), (10, 9.0, 'warm'), (20, 9.0, 'warm')]

    Inside `th.train` the hook `observe` can look every so many steps, keeping no checkpoint::

        looks = [None]

        def look(step, model, batch, optimizer):
            if step % 50 == 0:
                looks.append(th.measures.hessian.track_eigenpairs(problem, [model], k=5, labels=[step], start=looks[-1]))

        th.train(model, loss, data, optimizer, steps=1000, observe=look)
        looks[-1].rows()
    """
    if layers is not None and matrix is not None:
        raise ValueError("Give layers or matrix, one of them: a matrix of yours chooses its layers itself.")
    chosen = entry("matrix", matrix, MATRICES) if isinstance(matrix, str) else matrix
    at = chosen or _matrix_of(layers)
    settings: dict[str, Any] = {"which": which, "tol": tol, "verify": verify, "seed": seed, "progress": False}
    tracks, single = _opened(start)
    began = time.perf_counter()
    total = len(checkpoints) if isinstance(checkpoints, Sized) else None
    here = problem.copied()
    with counting("tracking", progress=progress, total=total) as count:
        for label, checkpoint in labelled(checkpoints, labels, first=max(map(len, tracks.values()), default=0)):
            load(checkpoint, here, problem, f"checkpoints: {label!r}")
            with telling(label):
                loss = here.loss()
                found, single = _pairs(at(here), tracks, single, k, settings)
            tracks = {name: _extended(tracks.get(name), pairs, label, loss) for name, pairs in found.items()}
            count(1)
    if not tracks:
        raise ValueError("checkpoints is empty: give at least one module, state dict or flat vector.")
    seconds = time.perf_counter() - began
    tracks = {name: replace(t, seed=seed, cost=replace(t.cost, seconds=seconds)) for name, t in tracks.items()}
    if single:
        return tracks[_WHOLE]
    worst = Outcome.worst(t.outcome for t in tracks.values())
    cost = next(iter(tracks.values())).cost
    return ResultMapping(results=dict(tracks), seed=seed, cost=cost, outcome=worst)


def _matrix_of(layers: str | Iterable[str] | None) -> Matrix:
    if layers is None:
        return hessian
    chosen = layers if isinstance(layers, str) else tuple(layers)  # read anew at every checkpoint
    return lambda problem: layer_hessians(problem, chosen)


def _pairs(
    op: Any, tracks: Mapping[str, EigenTrajectory], single: bool, k: int, settings: dict[str, Any]
) -> tuple[dict[str, Eigenpairs], bool]:
    """Eigenpairs by name, and whether there is but one matrix; `single` says so of what was tracked so far."""
    several, which = isinstance(op, Mapping), settings["which"]
    if tracks and single == several:
        now, before = ("a mapping", "one matrix") if several else ("one matrix", "a mapping")
        raise ValueError(f"Here there is {now} to track, but what was tracked so far is {before}. Ask for the same.")
    if not several:
        return {_WHOLE: top_eigenpairs(op, k, start=_last(tracks.get(_WHOLE), k, which, op), **settings)}, True
    starts = {name: _last(tracks[name], k, which, op[name]) for name in op if name in tracks}
    return dict(top_eigenpairs(cast(Mapping[str, LinearOperator], op), k, start=starts, **settings)), False


def _last(track: EigenTrajectory | None, k: int, which: str, op: Any) -> Eigenpairs | None:
    """Where the next look starts; what was tracked must be the same matrix, asked for the same pairs."""
    if track is None:
        return None
    size, columns = track.first.shape
    if size != op.shape[0]:
        raise ValueError(f"start was tracked on a matrix of size {size}; here it is {op.shape[0]}. Use the same problem.")
    if (columns, track.last.which) != (min(k, size), which):
        raise ValueError(
            f"start holds {columns} {track.last.which} eigenpairs, asked for are {min(k, size)} {which}. "
            "Use the same k and which."
        )
    return track.last


def _extended(track: EigenTrajectory | None, pairs: Eigenpairs, label: Label, loss: float) -> EigenTrajectory:
    """A trajectory with one more look."""
    shared = math.nan if track is None else subspace_overlap(track.last.vectors, pairs.vectors)
    since = 1.0 if track is None else subspace_overlap(track.first, pairs.vectors)
    look: dict[str, Any] = {
        "labels": (label,),
        "losses": (loss,),
        "values": pairs.values[None],
        "residuals": pairs.residuals[None],
        "with_previous": torch.tensor([shared], dtype=torch.float64),
        "with_first": torch.tensor([since], dtype=torch.float64),
        "matvecs": (pairs.matvecs,),
        "warm": (track is not None,),
        "converged": (pairs.converged,),
    }
    first, outcome, cost = pairs.vectors, pairs.outcome, pairs.cost
    if track is not None:
        first, outcome = track.first, Outcome.worst((track.outcome, outcome))
        cost = replace(cost, peak_bytes=max(track.cost.peak_bytes, cost.peak_bytes))
        for name, part in look.items():
            before = getattr(track, name)
            look[name] = torch.cat([before, part.to(before)]) if isinstance(part, Tensor) else before + part
    return EigenTrajectory(**look, first=first, last=pairs, outcome=outcome, cost=cost)


def _opened(start: Any) -> tuple[dict[str, EigenTrajectory], bool]:
    """The trajectories of an earlier call by name, and whether it tracked but one matrix."""
    if start is None:
        return {}, False
    if isinstance(start, EigenTrajectory):
        return {_WHOLE: start}, True
    if isinstance(start, Mapping) and all(isinstance(track, EigenTrajectory) for track in start.values()):
        return dict(start), False
    raise ValueError(f"start must be what an earlier track_eigenpairs returned. Got {type(start).__name__}.")
