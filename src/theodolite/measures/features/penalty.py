"""A regulariser on the average gradient outer product: fewer or weaker directions of the input that the output depends on."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.measures.features.gradients import Settings, cotangents, pulled_back
from theodolite.measures.features.source import QUANTITY, Point, as_source, batches_of
from theodolite.problem import Problem
from theodolite.problem.derivatives.second_order import plain_second_order_errors, refuse_first_order_layers

Norm = Literal["frobenius", "trace", "nuclear", "spectral"]
_NORMS = ("frobenius", "trace", "nuclear", "spectral")


def agop_penalty(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    norm: Norm = "frobenius",
    at: str | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> Tensor:
    """A norm of `agop(model, inputs)` that can be differentiated with respect to the model's parameters.

    Add it to a loss, on a batch: it costs a backward pass for each output, and as many again when it is differentiated.
    With n samples and k outputs no matrix larger than min(n k, d) squared is formed. As `agop`, it sees a module in eval
    mode, whatever mode it is in; the model's mode, buffers and gradients stay as they are.

    Parameters
    ----------
    norm : `"frobenius"` ‖G‖; `"trace"`, which is also the `"nuclear"` norm, G having no negative eigenvalue: the mean squared
        length of the gradients; `"spectral"`, the largest eigenvalue.
    projections : random sign combinations of the outputs, for many outputs; "trace" stays unbiased, the others are raised.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> penalty = agop_penalty(model, torch.zeros(4, 2).double(), norm="trace")
    >>> penalty.backward()
    >>> round(penalty.item(), 6), model.weight.grad
    (25.0, tensor([[6., 8.]], dtype=torch.float64))
    """
    if norm not in _NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, _NORMS))}. Got {norm!r}.")
    problem = as_source(model_or_problem, inputs, check=False)
    rows, count = _rows(problem, inputs, Settings(at, None, projections, seed))
    if norm in ("trace", "nuclear"):
        return rows.square().sum() / count
    gram = (rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows) / count
    found: Tensor = gram.norm() if norm == "frobenius" else torch.linalg.eigvalsh(gram)[-1]
    return found


def _rows(problem: Problem, inputs: Any, settings: Settings) -> tuple[Tensor, int]:
    """The gradients (m, d) with their graph to the model's own parameters, and how many samples they are of."""
    problem.refuse_batch_coupling(QUANTITY)
    refuse_first_order_layers(problem.model)
    point = Point(problem, settings.at)
    generator = torch.Generator().manual_seed(settings.seed)
    found, count = [], 0
    with problem.session(second=True), plain_second_order_errors():
        own = [p.float() if problem.half_precision else p for p in problem.parameters]
        for index, batch in enumerate(batches_of(problem, inputs)):
            flat, places = point.outputs(problem.tensors(own), problem.placed(batch), index)
            pulled = pulled_back(point, flat, places, cotangents(flat, settings, generator), create_graph=True)
            found.append(pulled.reshape(-1, pulled.shape[-1]))
            count += pulled.shape[1]
    return torch.cat(found), count
