"""Does the set-up fit? What the optimizer trains, decays and has left of its rate; what the loss is given; batch statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

from theodolite.arguments import checked, count, instance, positive, seed
from theodolite.interrupts import unbroken
from theodolite.measures.dynamics.noise import random_parts
from theodolite.measures.dynamics.optimizers import decoupled, first_rate, plain_optimizer, weight_decay
from theodolite.measures.mode_connectivity import batch_statistics, statistics_of
from theodolite.measures.progress.gradient_flow import one_update, record_forward
from theodolite.measures.progress.learning import LearningProgress
from theodolite.measures.progress.new_weights import looks_new
from theodolite.measures.progress.trivial import first_loss
from theodolite.measures.trials import Remedy, Setup, try_changes, usual_batch_size
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, an_optimizer, of_dimensions
from theodolite.problem.parameters import clean_names
from theodolite.results import Cost, Outcome, Result, Row

#: Optimizers that divide by the size of gradients: the scale of the loss means nothing to them.
SCALE_FREE = (Adam, Adamax, NAdam, RAdam, RMSprop, Adagrad)
#: A rate below this share of the one that its schedule began with.
ENDED = 0.01
#: Shares of that first rate at which training could go on, and by how much less a held-out loss must come out.
AGAIN, GAIN = (1.0, 0.1), 0.05
#: Samples for the look at what the loss is given and at batch statistics.
SAMPLES = 512
#: Samples below which a batch has no statistics to speak of.
FEW = 16


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SetupCheck(Result):
    """What was found about the set-up.

    `missing` are parameters that require a gradient, get one, and that the optimizer does not have; `frozen` those of layers with
    weight matrices that require none; `given` those of them that the optimizer has; `new` those of both whose layers look as they
    were drawn. `resting` belong to groups of rate 0. `decay_half_life` is the number of steps in which weight decay alone halves
    the weights, `decay_force` what it moves over what the gradient does. `first_lr` is the rate that a schedule began with;
    `next_lr` one that is better than what is left of it, on samples that were held out, None where there is none or it was not
    tried. `summed` says that the loss is a sum over the batch; `given_probabilities` what makes the probabilities that a loss of
    logits is given ("softmax", "sigmoid"). `eval_loss` and `batch_loss` are those with running and with batch statistics,
    `tracked` the batches that made the former. `dropout` is the largest share of units that a layer drops and `dropping` are the
    layers that drop so many. `varying` and `varying_valid`: samples differ each time they are read.
    """

    trained: int
    missing: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    resting: tuple[str, ...] = ()
    layers: int = 0
    decay: float = 0.0
    decay_half_life: float = math.inf
    decay_force: float = 0.0
    lr: float | None = None
    first_lr: float | None = None
    next_lr: float | None = None
    summed: bool = False
    given_probabilities: str = ""
    eval_loss: float | None = None
    batch_loss: float | None = None
    tracked: int | None = None
    norm_momentum: float | None = None
    dropout: float = 0.0
    dropping: tuple[str, ...] = ()
    varying: bool = False
    varying_valid: bool = False

    def rows(self) -> list[Row]:
        table = {
            "parameters that train": self.trained,
            "parameters that the optimizer does not have": len(self.missing),
            "frozen parameters": len(self.frozen),
            "weight decay": self.decay,
            "steps in which weight decay alone halves the weights": self.decay_half_life,
            "largest share of units that a layer drops": self.dropout or None,
            "learning rate": self.lr,
            "learning rate at the begin of its schedule": self.first_lr,
            "loss is a sum over the batch": self.summed,
            "loss with running statistics": self.eval_loss,
            "loss with statistics of the batch": self.batch_loss,
            "samples differ each time they are read": self.varying,
        }
        return [{"setting": name, "value": value} for name, value in table.items() if value is not None]

    def sentence(self) -> str:
        without = f", {len(self.missing)} more require a gradient and are not in the optimizer" if self.missing else ""
        return f"{self.trained} parameters train{without}."


@checked(
    problem=a_problem,
    lr=positive,
    optimizer=an_optimizer,
    valid=a_problem,
    batch_size=count,
    progress=instance(LearningProgress, wanted="what learning_progress found"),
    gradient=of_dimensions(1),
    seed=seed,
)
def check_setup(
    problem: Problem,
    *,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    valid: Problem | None = None,
    batch_size: int | None = None,
    progress: LearningProgress | None = None,
    gradient: Tensor | None = None,
    seed: int = 0,
) -> SetupCheck:
    """Look through optimizer, loss, normalisations and data for settings that contradict each other.

    Args:
        progress: what `learning_progress` found; whether something was learned decides what counts as begun and as ended.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    >>> problem = Problem(model, nn.CrossEntropyLoss(), (torch.randn(8, 2), torch.arange(8) % 2))
    >>> found = check_setup(problem, optimizer=torch.optim.SGD([model[0].weight], lr=0.1))
    >>> found.missing, found.given_probabilities
    (('0.bias',), 'softmax')
    """
    began = time.perf_counter()
    optimizer = plain_optimizer(optimizer)
    facts: dict[str, Any] = {**_trained(problem, optimizer), **_loss(problem), **_dropout(problem.model)}
    known = optimizer is not None and not facts["missing"]
    if known and lr is not None:
        facts |= _decay(problem, lr, optimizer, gradient)
    begun = has_trained(problem, progress)
    if optimizer is not None:
        followed = has_stepped(optimizer) and lr in (None, first_rate(optimizer) or None)
        facts |= _schedule(problem, optimizer, batch_size, seed, ended=begun and followed)
    if begun:
        facts |= _statistics(problem)
    return SetupCheck(
        **facts,
        lr=lr,
        varying=problem.data.varying,
        varying_valid=valid is not None and valid.data.varying,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="a look at the objects, and forward passes"),
    )


def has_trained(problem: Problem, progress: LearningProgress | None) -> bool:
    """Whether training has begun: something is known, or most weights do not look newly drawn any more."""
    if progress is not None and progress.below:
        return True
    layers = _layers(problem.model)
    return sum(looks_new(module) for module in layers.values()) < 0.5 * len(layers)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer has taken a step; one without a state knows that only from its scheduler."""
    return bool(optimizer.state) or getattr(optimizer, "_opt_called", False)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with weight matrices of their own, by name."""
    named = model.named_modules()
    return {name: module for name, module in named if any(p.ndim >= 2 for p in module.parameters(recurse=False))}


def _dropout(model: nn.Module) -> dict[str, Any]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.modules.dropout._DropoutNd)}
    shares = {name: float(module.p) for name, module in layers.items()}
    largest = max(shares.values(), default=0.0)
    return {"dropout": largest, "dropping": tuple(name for name, p in shares.items() if p == largest and p > 0.0)}


# What the optimizer has


def _trained(problem: Problem, optimizer: Optimizer | None) -> dict[str, Any]:
    model = problem.model
    named = {key: p for key, p in model.named_parameters() if p.is_floating_point()}
    groups = [] if optimizer is None else optimizer.param_groups
    held = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    rates = max(held.values(), default=0.0)
    open_ones = {key: p for key, p in named.items() if p.requires_grad}
    missing = [key for key, p in open_ones.items() if held and id(p) not in held]
    missing = _reached(problem, missing) if missing else []
    modules = _layers(model)
    shut = [key for key, p in named.items() if not p.requires_grad and key.rpartition(".")[0] in modules]
    shut = shut if open_ones else []  # a model that is frozen as a whole is another matter
    layers = {key.rpartition(".")[0] for key in (*missing, *shut)} & modules.keys()
    new = {name for name in layers if looks_new(modules[name])}
    names = clean_names(named)
    return {
        "trained": len(open_ones) - len(missing),
        "missing": tuple(names[key] for key in missing),
        "frozen": tuple(names[key] for key in shut),
        "given": tuple(names[key] for key in shut if id(named[key]) in held),
        "new": tuple(names[key] for key in (*missing, *shut) if key.rpartition(".")[0] in new),
        "resting": tuple(names[key] for key, p in open_ones.items() if rates and held.get(id(p)) == 0.0),
        "layers": len(modules),
    }


def _reached(problem: Problem, keys: Sequence[str]) -> list[str]:
    """Those of the parameters that the loss depends on, from one batch on a copy."""
    trial = problem.copied_to_train()
    named = dict(trial.model.named_parameters())
    with trial.session(second=False), unbroken(torch.enable_grad()):
        trial.model.eval()
        loss = trial.live_loss(next(iter(trial.data)).part(slice(0, 64)))
        grads = torch.autograd.grad(loss, [named[key] for key in keys], allow_unused=True)
    return [key for key, g in zip(keys, grads, strict=True) if g is not None and bool(g.any())]


def _decay(problem: Problem, lr: float, optimizer: Optimizer, gradient: Tensor | None) -> dict[str, Any]:
    """How fast weight decay shrinks the weights, and how that compares with what the gradient does."""
    decay = weight_decay(optimizer, problem)
    if decay is None:
        return {}
    weights = problem.vector.double().cpu()
    pull = decay.cpu() * weights
    flat = (problem.gradient() if gradient is None else gradient).double().cpu()
    largest = float(decay.max())
    momentum = float(optimizer.param_groups[0].get("momentum", 0.0) or 0.0)
    if decoupled(optimizer):
        updates = one_update(problem, lr, optimizer, problem.split(flat.to(problem.device, problem.dtype)))
        moved = torch.cat([update.reshape(-1).double().cpu() for update in updates.values()])
        force = lr * float(pull.norm()) / max(float((moved + lr * pull).norm()), 1e-30)
        shrinks = lr * largest
    elif isinstance(optimizer, SCALE_FREE):
        force = float(pull.norm()) / max(float(flat.norm()), 1e-30)
        typical = float(weights.square().mean().sqrt())
        shrinks = lr / max(typical, 1e-30) if force > 1 else 0.0  # such a step has the size of the rate, whatever pulls
    else:
        force = float(pull.norm()) / max(float(flat.norm()), 1e-30)
        shrinks = lr * largest / (1.0 - momentum)
    return {"decay": largest, "decay_force": force, "decay_half_life": math.log(2.0) / shrinks if shrinks > 0 else math.inf}


def _schedule(problem: Problem, optimizer: Optimizer, batch_size: int | None, seed: int, *, ended: bool) -> dict[str, Any]:
    """What a scheduler has left of the rate, and whether more of it would do better on samples that are held out."""
    pairs = [(float(g["lr"]), float(g["initial_lr"])) for g in optimizer.param_groups if g.get("initial_lr")]
    if not pairs:
        return {}
    lr, first = max(pairs, key=lambda pair: pair[1])
    parts = random_parts(problem, 2, seed)
    if not ended or lr > ENDED * first or len(parts.data) < 2:
        return {"first_lr": first}
    half, rest = (problem.with_batches([batch]) for batch in list(parts.data)[:2])
    options = {str(share): Remedy("", restart(share)) for share in AGAIN}
    width = usual_batch_size(problem) if batch_size is None else batch_size
    runs = try_changes(half, options, lr=lr or first, optimizer=optimizer, steps=40, batch_size=width, score_on=rest, seed=seed)
    best = min(runs.trials, key=lambda row: row["changed"] if math.isfinite(row["changed"]) else math.inf)
    own = best["own" if lr else "start"]  # a rate of 0 leaves the loss where it is
    helps = math.isfinite(best["changed"]) and best["changed"] < (1 - GAIN) * own
    return {"first_lr": first, "next_lr": float(best["cause"]) * first if helps else None}


def restart(share: float) -> Any:
    """A change: every group gets this share of the rate that its schedule began with."""

    def change(setup: Setup) -> None:
        for group in setup.optimizer.param_groups:
            group["lr"] = share * float(group.get("initial_lr", group["lr"]))

    return change


# What the loss is given


def _loss(problem: Problem) -> dict[str, Any]:
    seen = record_forward(problem)
    kind, found, batch = first_loss(problem, SAMPLES)
    if kind is None:
        return {"summed": problem.weighting.rule == "sum"}
    counts = {batch.size, batch.target.numel()} - {1}
    summed = problem.weighting.rule == "sum" or any(math.isclose(kind.scale, n, rel_tol=1e-2) for n in counts)
    probabilities = ""
    if kind.name == "cross entropy" and problem.loss_function is not None:
        probabilities = "softmax" if _are_probabilities(found.output, kind.axis) else ""
    elif kind.name == "binary cross entropy" and kind.logits and seen.output_activation in ("sigmoid", "softmax"):
        probabilities = seen.output_activation
    return {"summed": summed, "given_probabilities": probabilities}


def _are_probabilities(output: Tensor, axis: int) -> bool:
    """Whether the outputs are not negative and sum to one over the classes, sample by sample."""
    if output.ndim < 2 or output.shape[axis] < 2:
        return False
    sums = output.double().sum(axis)
    return bool((output >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())


# Normalisations


def _statistics(problem: Problem) -> dict[str, Any]:
    """The loss with running statistics, and with those of the batches themselves."""
    norms = statistics_of(problem.model)
    if not norms or problem.mode != "eval":
        return {}
    tracked = [int(norm.num_batches_tracked) for norm in norms.values() if norm.num_batches_tracked is not None]
    part = problem.with_batches(list(random_parts(problem, max(1, problem.samples // SAMPLES), 0).data)[:2])
    if min(batch.size for batch in part.data) < FEW:
        return {}
    with part.session(second=False), torch.no_grad(), batch_statistics(norms):
        tensors = part.tensors(part.leaves(grad=False))
        batch_loss = sum(share * float(part.evaluate(tensors, batch, i).loss) for i, share, batch in part.iterate())
    momenta = [norm.momentum for norm in norms.values() if norm.momentum is not None]
    return {
        "eval_loss": part.loss(),
        "batch_loss": batch_loss,
        "tracked": min(tracked, default=None),
        "norm_momentum": min(momenta, default=None),
    }
