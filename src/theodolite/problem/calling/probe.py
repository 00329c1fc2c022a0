"""Probes of a problem: what would make a number wrong is found before the number appears."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.problem.batches import Batch, merge
from theodolite.problem.calling import Evaluation
from theodolite.problem.state_guard import left_as_found
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import counts, ignored_label

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem


#: Evaluations compared with the first where random numbers are drawn by a part that is not known.
DRAWS = 15

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropPath", "StochasticDepth")
_RATES = ("p", "drop_prob", "drop_rate", "rate", "dropout")
_REMEDY = "Remedy: mode='eval', or check=False if a random objective is intended or the draws never reach the loss."


def check_repeatable(problem: Problem) -> None:
    """Evaluate one batch twice; raise where the numbers differ, or agree by luck only.

    Rare dropout often leaves two evaluations of a few samples alike. Whether it was at work shows in torch's random state:
    a dropout that is never called, is off, or runs with a seed of its own, leaves it alone or in the same place.
    """
    ignored = ignored_label(problem.loss_function)
    index, found = next(((i, b) for i, b in enumerate(problem.data) if counts(b, ignored)), (0, next(iter(problem.data))))
    batch = problem.placed(found)
    with problem.session(second=False), torch.no_grad():

        def evaluate() -> Evaluation:
            return problem.evaluate(problem.tensors(problem.leaves(grad=False)), batch, index)

        first = evaluate()
        before = _random_state(problem.device)
        _compare(problem, first, evaluate())
        if torch.equal(before, _random_state(problem.device)):
            return
        active = _modules_that(problem, _drops)
        if active:
            raise NotRepeatableError(f"Two evaluations agree by luck only: random numbers are drawn. {_named(active)} {_REMEDY}")
        for _ in range(DRAWS - 1):
            _compare(problem, first, evaluate())


def _compare(problem: Problem, first: Evaluation, second: Evaluation) -> None:
    gap = float((first.output.double() - second.output.double()).abs().max()) if first.output.numel() else 0.0
    gap = max(gap, abs(float(first.loss) - float(second.loss)))
    size = max(float(first.output.abs().max()), abs(float(first.loss)), 1e-30)
    if gap > 1e-5 * size:
        cause = _named(_modules_that(problem, _drops))
        raise NotRepeatableError(
            f"Two identical evaluations differ by {gap:.2e} (the output is of size {size:.2g}). {cause} {_REMEDY}"
        )


def _random_state(device: torch.device) -> Tensor:
    """Of the generators that layers draw from."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def refuse_all_ignored(problem: Problem) -> None:
    """Raise if no label of the data counts."""
    ignored = ignored_label(problem.loss_function)
    if not any(counts(batch, ignored) for batch in problem.data):
        raise ValueError(
            f"Every label of the data is {ignored}, which is ignored by the loss: nothing is left to measure. "
            "Give data with other labels, or a loss with another ignore_index."
        )


def refuse_self_changing_layers(model: nn.Module) -> None:
    """Raise for layers that write into their own weights when they are called."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} is an embedding with max_norm, which rescales its own weight in every forward pass. "
                "Apply the bound once and set max_norm=None before measuring."
            )


def _modules_that(problem: Problem, fit: Callable[[nn.Module], bool]) -> list[str]:
    """Names of the modules of which something is true in the problem's mode."""
    with left_as_found(problem.model, problem.mode):
        return [name or type(module).__name__ for name, module in problem.model.named_modules() if fit(module)]


def _drops(module: nn.Module) -> bool:
    """Whether it is a dropout at work with a rate that leaves something to chance."""
    known = type(module).__name__.endswith(_DROPOUTS) or isinstance(module, nn.MultiheadAttention | nn.RNNBase)
    rates = (getattr(module, name, None) for name in _RATES)
    return known and module.training and any(isinstance(rate, float | int) and 0 < rate < 1 for rate in rates)


def _couples(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)


def _named(active: list[str]) -> str:
    if active:
        return f"Dropout is active in {', '.join(active[:5])}{', ...' if len(active) > 5 else ''}."
    return "Usual causes: dropout or noise in train mode, random augmentation inside the model, a state kept between calls."


def refuse_batch_coupling(problem: Problem, quantity: str) -> None:
    """Raise if outputs of one sample depend on the others (BatchNorm in train mode)."""
    coupled = _modules_that(problem, _couples)
    if coupled:
        raise BatchCoupledError(
            f"{quantity} is a per-sample quantity, but {coupled[0]} normalises over the batch. Remedies: "
            "Problem(..., mode='eval') uses the running statistics; theodolite.hessian measures the batch-coupled loss "
            "of these very batches."
        )


def first_bad_tensor(tensors: dict[str, Tensor], batch: Batch, result: Evaluation, index: int) -> str:
    """Where NaN or infinity entered a loss."""
    places = {**tensors, **batch.inputs, "target": batch.target, "output": result.output}
    loss = float(result.loss.detach())
    for name, t in named_tensors(places):
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            return f"The loss of batch {index} is {loss}: {name} is the first tensor with NaN or inf."
    return f"The loss of batch {index} is {loss}, although the output is finite: look at the loss function and its targets."


UNSEEN = (
    "The objective does not depend on the measured parameters through autograd, so its derivatives would all be zero. "
    "Usual causes: .detach(), .item() or torch.no_grad() in the model or the loss, or a loss of decisions (argmax, rounding). "
    "Remedy: keep the way from the parameters to the loss differentiable, or measure other parameters with params=."
)


def refuse_unseen_dependence(problem: Problem, batch: Batch, index: int) -> None:
    """Raise if the loss of a batch without a gradient changes when the measured parameters do.

    One that stays the same is constant in them (a batch may not use them all): its derivatives are truly zero.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        leaves = problem.leaves(grad=False)
        here, there = (problem.raw_loss(problem.tensors(at), batch) for at in (leaves, [_shaken(p, generator) for p in leaves]))
    if not abs(there - here) <= 1e-5 * max(abs(here), 1e-30):
        raise ValueError(
            f"{UNSEEN} (Batch {index}: the loss moves from {here:.4g} to {there:.4g} when the parameters are shaken.)"
        )


def _shaken(p: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)
    return p + 0.3 * noise * (p.square().mean().sqrt() + 1e-2)


def jackknife_error(problem: Problem, quantity: Callable[[Problem], float], *, groups: int, population: int | None) -> float:
    """Delete-a-group jackknife: the spread of the quantity when each group of samples is left out in turn."""
    singles = [b.part(slice(i, i + 1)) for b in problem.data for i in range(b.size)]
    if not 2 <= groups <= len(singles):
        raise ValueError(f"groups must be between 2 and the number of samples, {len(singles)}. Got {groups}.")
    # Groups at random: data that is sorted, or goes through the classes in turn, must not make them unlike or alike.
    order = torch.randperm(len(singles), generator=torch.Generator().manual_seed(0)).tolist()
    values = []
    for group in range(groups):
        kept = [singles[place] for i, place in enumerate(order) if i % groups != group]
        values.append(float(quantity(problem.with_batches(merge(kept)))))
    spread = torch.tensor(values, dtype=torch.float64)
    variance = (groups - 1) / groups * float((spread - spread.mean()).square().sum())
    finite = 1.0 if population is None else max(0.0, 1.0 - len(singles) / population)
    return math.sqrt(variance * finite)
