"""Probes of a problem: what would make a number wrong is found before the number appears."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.problem.batches import Batch
from theodolite.problem.calling import Evaluation, left_as_found
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import IGNORED, counts

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem


def check_repeatable(problem: Problem) -> None:
    """Evaluate one batch twice; raise where the numbers differ."""
    batch = problem.placed(next((b for b in problem.data if counts(b)), next(iter(problem.data))))
    with problem.session(second=False), torch.no_grad():
        first, second = (problem.evaluate(problem.tensors(problem.leaves(grad=False)), batch, 0) for _ in range(2))
    gap = float((first.output.double() - second.output.double()).abs().max()) if first.output.numel() else 0.0
    gap = max(gap, abs(float(first.loss) - float(second.loss)))
    size = max(float(first.output.abs().max()), abs(float(first.loss)), 1e-30)
    if gap > 1e-5 * size:
        raise NotRepeatableError(
            f"Two identical evaluations differ by {gap:.2e} (the output is of size {size:.2g}). {_random_parts(problem)} "
            "Remedy: mode='eval', or check=False if a random objective is intended."
        )


def refuse_all_ignored(problem: Problem) -> None:
    """Raise if no label of the data counts."""
    if not any(counts(batch) for batch in problem.data):
        raise ValueError(f"Every label of the data is {IGNORED}, that is ignored: nothing is left to measure.")


def refuse_self_changing_layers(model: nn.Module) -> None:
    """Raise for layers that write into their own weights when they are called."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} is an embedding with max_norm, which rescales its own weight in every forward pass. "
                "Apply the bound once and set max_norm=None before measuring."
            )


def _random_parts(problem: Problem) -> str:
    with left_as_found(problem.model, problem.mode):
        active = [
            name or type(module).__name__
            for name, module in problem.model.named_modules()
            if module.training and type(module).__name__.endswith(("Dropout", "DropPath", "Dropout1d", "Dropout2d", "Dropout3d"))
        ]
    if active:
        return f"Dropout is active in {', '.join(active[:5])}{', ...' if len(active) > 5 else ''}."
    return "Usual causes: dropout or noise in train mode, random augmentation inside the model, a state kept between calls."


def refuse_batch_coupling(problem: Problem, quantity: str) -> None:
    """Raise if outputs of one sample depend on the others (BatchNorm in train mode)."""
    with left_as_found(problem.model, problem.mode):
        coupled = [
            name or type(module).__name__
            for name, module in problem.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        ]
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
