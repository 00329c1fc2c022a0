"""Probes of a problem: what would make a number wrong is found before the number appears."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.problem.batches import Batch
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
_INTENDED = "check=False if a random objective is intended or the draws never reach the loss."
#: What is left where the mode is the right one already.
_IN_EVAL_MODE = (
    "The mode is 'eval' already, so look for F.dropout without training=self.training, noise drawn in forward or in the loss, "
    "augmentation inside the model, or a state that changes from call to call. Remedy: take it out, or seed it in forward; "
)


def check_repeatable(problem: Problem) -> None:
    """Evaluate one batch twice; raise where the numbers differ, or agree by luck only.

    Rare dropout often leaves two evaluations of a few samples alike. Whether it was at work shows in torch's random state:
    a dropout that is never called, is off, or runs with a seed of its own, leaves it alone or in the same place.
    """
    ignored = ignored_label(problem.loss_function)
    index, found = next(((i, b) for i, b in enumerate(problem.data) if counts(b, ignored)), (0, next(iter(problem.data))))
    batch = problem.placed(found)
    with problem.session(second=False):

        def evaluate() -> Evaluation:
            return problem.evaluate(problem.tensors(problem.leaves(grad=False)), batch, index)

        first = evaluate()
        refuse_unreached_parameters(problem, first.loss)
        before = _random_state(problem.device)
        _compare(problem, first, evaluate())
        if torch.equal(before, _random_state(problem.device)):
            return
        active = _modules_that(problem, _drops)
        if active:
            raise NotRepeatableError(f"Two evaluations agree by luck only: random numbers are drawn. {_cause(problem, active)}")
        for _ in range(DRAWS - 1):
            _compare(problem, first, evaluate())


def _compare(problem: Problem, first: Evaluation, second: Evaluation) -> None:
    (output, loss), (again, loss_again) = (
        (found.output.detach().double(), float(found.loss.detach())) for found in (first, second)
    )
    gap = max(float((output - again).abs().max()) if output.numel() else 0.0, abs(loss - loss_again))
    size = max(float(output.abs().max()), abs(loss), 1e-30)
    if gap > 1e-5 * size:
        cause = _cause(problem, _modules_that(problem, _drops))
        raise NotRepeatableError(f"Two identical evaluations differ by {gap:.2e} (the output is of size {size:.2g}). {cause}")


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


def refuse_unreached_parameters(problem: Problem, loss: Tensor) -> None:
    """Raise if a loss of stand-ins that ask for no gradient has one in the model's own parameters: they were not reached."""
    names = {id(p): name for name, p in problem.model.named_parameters()}
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ValueError(
                f"The model or the loss reads {name} in a way that other values cannot be put in for (a custom autograd.Function "
                "given a parameter that was kept aside), so that part would be missing from every derivative. Pass the parameter "
                "through an ordinary torch operation first (1.0 * weight), or take it from the module that owns it."
            )
        stack.extend(child for child, _ in node.next_functions)


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


def _cause(problem: Problem, active: list[str]) -> str:
    """What it may be, and what to do about it: in eval mode that mode is no remedy."""
    if active:
        named = f"Dropout is active in {', '.join(active[:5])}{', ...' if len(active) > 5 else ''}."
        return f"{named} Remedy: mode='eval', or {_INTENDED}"
    if problem.mode == "eval" or (problem.mode is None and not problem.model.training):
        return f"{_IN_EVAL_MODE}{_INTENDED}"
    usual = "Usual causes: dropout or noise in train mode, random augmentation inside the model, a state kept between calls."
    return f"{usual} Remedy: mode='eval', or {_INTENDED}"


def refuse_batch_coupling(problem: Problem, quantity: str) -> None:
    """Raise if outputs of one sample depend on the others (BatchNorm in train mode)."""
    coupled = _modules_that(problem, _couples)
    if coupled:
        always = _modules_that(problem, lambda module: _couples(module) and module.running_mean is None)
        remedy = "Problem(..., mode='eval') uses the running statistics"
        if always:
            remedy = (
                f"{always[0]} keeps no running statistics, so that eval mode is no help: build it with track_running_stats=True"
            )
        raise BatchCoupledError(
            f"{quantity} is a per-sample quantity, but {(always or coupled)[0]} normalises over the batch. Remedies: {remedy}; "
            "theodolite.hessian measures the batch-coupled loss of these very batches."
        )


def refuse_waiting_layers(problem: Problem) -> None:
    """Raise for layers that wait for other processes, which take no part in a measurement."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    found = _modules_that(problem, lambda module: isinstance(module, nn.SyncBatchNorm) and module.training)
    others = torch.distributed.get_world_size() - 1
    if found and others:
        raise ValueError(
            f"{found[0]} is an nn.SyncBatchNorm in train mode, which waits for {others} other processes. Measure with "
            "mode='eval', or a copy of the model with nn.BatchNorm in its place."
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
    samples = problem.samples
    if groups > samples:
        raise ValueError(f"groups must be at most the number of samples, {samples}. Got {groups}.")
    # Groups at random: data that is sorted, or goes through the classes in turn, must not make them unlike or alike.
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    places = (order.argsort() % groups).split(problem.data.sizes)
    values = []
    for group in range(groups):
        parts = [batch.part((place != group).nonzero().flatten()) for batch, place in zip(problem.data, places, strict=True)]
        values.append(float(quantity(problem.with_batches([part for part in parts if part.size]))))
    spread = torch.tensor(values, dtype=torch.float64)
    variance = (groups - 1) / groups * float((spread - spread.mean()).square().sum())
    finite = 1.0 if population is None else max(0.0, 1.0 - samples / population)
    return math.sqrt(variance * finite)
