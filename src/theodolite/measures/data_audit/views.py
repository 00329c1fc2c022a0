"""What the audits of data look at: some samples, as vectors of moderate length; their labels; what the model says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from theodolite.problem import Batch, Problem
from theodolite.problem.accuracy import right_answers
from theodolite.problem.losses import compares_numbers, is_binary
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import IGNORED

#: Samples looked at where nothing else is said.
SAMPLES = 2000
#: Length of the vectors that stand for samples; longer ones are projected at random, which keeps distances to a tenth.
DIM = 128
#: Numbers held at a time.
NUMBERS = 2 * 10**7
#: More classes than this are no classes but an index.
CLASSES = 1000


def chosen_rows(problem: Problem, most: int, seed: int) -> Tensor:
    """The numbers of at most so many samples, a seeded choice in ascending order."""
    total = problem.samples
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[:most].sort().values


def parts_of(problem: Problem, rows: Tensor) -> Iterator[Batch]:
    """The samples of these numbers (ascending), batch by batch."""
    before = 0
    for batch in problem.data:
        mine = rows[(rows >= before) & (rows < before + batch.size)] - before
        if len(mine):
            yield batch if len(mine) == batch.size else batch.part(mine)
        before += batch.size


def part_of(problem: Problem, rows: Tensor) -> Problem:
    """The problem on the samples of these numbers, in batches no larger than its own, as few as shapes allow."""
    parts = list(parts_of(problem, rows))
    largest = max(batch.size for batch in problem.data)
    with suppress(RuntimeError, StopIteration, TypeError):  # sequences of different lengths stay apart
        whole = parts[0].joined(*parts[1:])
        parts = [whole.part(some) for some in torch.arange(whole.size).tensor_split(-(-whole.size // largest))]
    return problem.with_batches(parts)


def sample_tensors(batch: Batch) -> list[Tensor]:
    """The inputs of a batch that have one entry per sample; the labels that a model with its own loss takes are no inputs."""
    found = [t for _, t in named_tensors(batch.inputs) if t.ndim and t.shape[0] == batch.size]
    return [t for t in found if t is not batch.target] or found[:1]


class SampleVectors:
    """The inputs of samples as vectors (n, at most `dim`): numbers flattened, tokens counted.

    Tables are standardised column by column, by what the first samples `seen` tell of them; images and other long inputs are
    projected at random as they are. `seen` is None where samples have no one length.
    """

    def __init__(self, problem: Problem, rows: Tensor, *, dim: int = DIM, seed: int = 0) -> None:
        self.dim, self.seed = dim, seed
        self.shift, self.scale = torch.zeros(1), torch.ones(1)
        first = next(parts_of(problem, rows[:1]))
        self.width = _flat(first, dim, seed).shape[1]
        if self.width <= dim or len(rows) * self.width <= NUMBERS:
            self._standardise(problem, rows)
        self.seen = self.of(problem, rows) if self.width else None

    def of(self, problem: Problem, rows: Tensor) -> Tensor | None:
        """The vectors of samples of this or another problem."""
        found, directions = [], self._directions()
        for batch in parts_of(problem, rows):
            flat = _flat(batch, self.dim, self.seed)
            if flat.shape[1] != self.width:
                return None
            x = (flat - self.shift) / self.scale
            found.append(x if directions is None else x @ directions)
        return torch.cat(found) if found else None

    def _standardise(self, problem: Problem, rows: Tensor) -> None:
        """Columns are centred, and scaled where they are few or their scales differ by far."""
        parts = [_flat(batch, self.dim, self.seed) for batch in parts_of(problem, rows)]
        if len({part.shape[1] for part in parts}) > 1 or len(rows) < 2:
            return
        x = torch.cat(parts)
        self.shift = x.mean(0)
        spread = (x - self.shift).norm(dim=0) / math.sqrt(len(x) - 1)
        used = spread[spread > 0]
        if self.width <= self.dim or (len(used) and float(used.max() / used.median()) > 100):
            spread = torch.maximum(spread, 0.1 * (x.amax(0) - x.amin(0)))  # rare values are no reason to blow up noise
            self.scale = torch.where(spread > 0, spread, torch.ones_like(spread))

    def _directions(self) -> Tensor | None:
        """What long vectors are projected on, drawn anew rather than held: of large images it is large itself."""
        if self.width <= self.dim:
            return None
        return torch.randn(self.width, self.dim, generator=torch.Generator().manual_seed(self.seed)) / math.sqrt(self.dim)


def _flat(batch: Batch, dim: int, seed: int) -> Tensor:
    """Numbers flattened, side by side; tokens as counts, in as many random directions as the vector may be long."""
    parts = []
    for t in sample_tensors(batch):
        if t.is_floating_point() or t.dtype in (torch.bool, torch.uint8):
            parts.append(t.detach().reshape(batch.size, -1).float().cpu())
        elif not t.is_complex():
            parts.append(_token_counts(t.detach().reshape(batch.size, -1).cpu(), dim, seed))
    return torch.cat(parts, dim=1) if parts else torch.zeros(batch.size, 0)


def _token_counts(tokens: Tensor, dim: int, seed: int) -> Tensor:
    """How often each token stands in a sequence, as a sum of one random direction per token over the root of the length."""
    values, places = tokens.unique(return_inverse=True)
    # A direction must belong to its token in every batch: it is drawn from the token itself.
    generator = torch.Generator().manual_seed(seed)
    waves = torch.randn(dim, generator=generator, dtype=torch.float64) * 1e3
    shifts = 2 * math.pi * torch.rand(dim, generator=generator, dtype=torch.float64)
    directions = torch.cos(values.double()[:, None] * waves + shifts).float()
    return directions[places].sum(1) / math.sqrt(tokens.shape[1])


@dataclass(frozen=True)
class Labels:
    """The class of each sample that has one: `rows` are the numbers of the samples, `values` count through `names`."""

    rows: Tensor
    values: Tensor
    names: tuple[str, ...]

    @property
    def counts(self) -> Tensor:
        return torch.bincount(self.values, minlength=len(self.names))

    def at(self, rows: Tensor) -> Tensor:
        """The classes of some samples, -1 for those without one."""
        found = torch.full((int(max(self.rows.max(), rows.max())) + 1,), -1, dtype=torch.long)
        found[self.rows] = self.values
        return found[rows]


def labels_of(problem: Problem) -> Labels | None:
    """One class per sample, where the targets are classes: whole numbers, rows of 0 and 1 with a single 1, or 0/1 and -1/1.

    >>> model = torch.nn.Linear(1, 3)
    >>> labels_of(Problem(model, torch.nn.CrossEntropyLoss(), (torch.ones(4, 1), torch.tensor([2, 0, 2, -100])))).counts
    tensor([1, 2])
    """
    parts = []
    for batch in problem.data:
        values = _classes(batch.target, problem.loss_function)
        if values is None or len(values) != batch.size:
            return None
        parts.append(values.cpu())
    values = torch.cat(parts)
    ignored = getattr(problem.loss_function, "ignore_index", IGNORED)
    rows = torch.nonzero(values != ignored).flatten()
    if not len(rows):
        return None
    seen, places = values[rows].unique(return_inverse=True)
    if len(seen) > min(CLASSES, max(2, len(rows) // 2)):
        return None
    known = problem.data.classes
    whole = seen.tolist()
    names = tuple(known[i] if known is not None and 0 <= i < len(known) else str(i) for i in whole)
    return Labels(rows, places, names)


def _classes(target: object, loss: object) -> Tensor | None:
    if not isinstance(target, Tensor) or target.is_complex() or not target.ndim:
        return None
    if not target.is_floating_point():
        return None if target.ndim > 1 or compares_numbers(loss) else target.long()
    flat = target.reshape(len(target), -1)
    if flat.shape[1] > 1:
        one_hot = flat.ndim == target.ndim and bool(((flat == 0) | (flat == 1)).all()) and bool((flat.sum(1) == 1).all())
        return flat.argmax(1) if one_hot else None
    binary = is_binary(loss)
    values = flat[:, 0]
    if bool((values.abs() == 1).all()) or (binary and bool(((values == 0) | (values == 1)).all())):
        return values.long()
    return None


def numbers_of(problem: Problem, rows: Tensor) -> Tensor | None:
    """Targets of a regression (n, k) in float64, where each sample has as many; None where the targets are no numbers."""
    found = []
    for batch in parts_of(problem, rows):
        numbers = numbers_in(batch, problem.loss_function)
        if numbers is None:
            return None
        found.append(numbers.double())
    return torch.cat(found) if found and len({part.shape[1] for part in found}) == 1 else None


def numbers_in(batch: Batch, loss: object) -> Tensor | None:
    """Targets of a batch as they are, (n, k); None where they are no numbers."""
    target = batch.target
    if is_binary(loss):
        return None
    if not isinstance(target, Tensor) or not target.is_floating_point() or not target.ndim or len(target) != batch.size:
        return None
    return target.detach().reshape(batch.size, -1).cpu()


@dataclass(frozen=True)
class Answers:
    """What the model says of samples: its `outputs` (n, k), and where the targets are classes whether it is `right` (n,)."""

    outputs: Tensor
    right: Tensor | None


def answers_on(problem: Problem) -> Answers | None:
    """The model's outputs on all samples of a problem; None where samples have no outputs of their own of equal number."""
    outputs, right = [], []
    with problem.session(second=False), torch.no_grad():
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, batch in enumerate(problem.data):
            placed = problem.placed(batch)
            output = problem.output(tensors, placed, i, check=False)
            if not output.ndim or len(output) != batch.size:
                return None
            outputs.append(output.reshape(batch.size, -1).double().cpu())
            found = right_answers(output, placed.target, problem.loss_function)
            if found is not None and len(found) == batch.size:
                right.append(found.cpu())
    if len({part.shape[1] for part in outputs}) != 1:
        return None
    whole = torch.cat(right) if right and sum(map(len, right)) == sum(map(len, outputs)) else None
    return Answers(torch.cat(outputs), whole)


def label_losses(outputs: Tensor, values: Tensor) -> Tensor | None:
    """The cross-entropy of each sample, where the outputs are one per class (or one in all, of two)."""
    if outputs.shape[1] == 1:
        return functional.softplus(torch.where(values > 0, -outputs[:, 0], outputs[:, 0]))
    if int(values.max()) >= outputs.shape[1]:
        return None
    return functional.cross_entropy(outputs, values, reduction="none")


def middle_and_width(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Median and spread of each column, which a few numbers far out do not move.

    >>> [float(value) for value in middle_and_width(torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e9]], dtype=torch.float64))]
    [2.0, 1.4825796886582654]
    """
    low, middle, high = torch.quantile(numbers, torch.tensor([0.25, 0.5, 0.75], dtype=numbers.dtype), dim=0)
    return middle, (high - low) / 1.349  # the standard deviation of a normal distribution
