"""Training runs of the figures on spikes: points, networks, and descent with the tangent kernel of all points at every step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite import data
from theodolite.data import Dataset
from theodolite.data.generators import rank_k_targets, two_class_images
from theodolite.experiments import Params
from theodolite.experiments.lab.datasets import Source, joined, load_or
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import split_loss
from theodolite.models import myrtle5, ntk_cnn, ntk_fcn, vision_transformer, wrn
from theodolite.models.feedforward import fcn
from theodolite.models.initialisation import construct
from theodolite.operators import as_operator, tangent_kernel
from theodolite.problem import Problem
from theodolite.results import Row

# Points

#: Pairs of classes: horse and truck of CIFAR-10, digits 0 and 2 of SVHN.
PAIRS: dict[str, tuple[int, int]] = {"cifar10": (7, 9), "svhn": (0, 2)}
NAMES = {"cifar10": "CIFAR", "svhn": "SVHN", "rank-2": "rank-2 target", "rank-4": "rank-4 target"}
#: Added to the seed of generated images, so that two panels do not see the same ones.
_SHIFT = {"cifar10": 0, "svhn": 1000}
#: Root mean square of an image's pixels, which are not centred.
RMS = 1.1


class Points(NamedTuple):
    """Inputs (n, ...), targets (n, outputs) and where they come from."""

    x: Tensor
    y: Tensor
    origin: str

    @property
    def outputs(self) -> int:
        return int(self.y.shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


def points(name: str, n: int, *, side: int = 8, dim: int = 100, classes: int = 2, source: Source, seed: int = 0) -> Points:
    """`n` points of a data set by name: a pair of classes with targets ±1, `classes` > 2 one-hot, or a rank-k target.

    They are float64: catapults amplify rounding, and in float32 two machines soon see different runs. Where files are not
    there, generated images stand in for a pair, digits of scikit-learn for several classes.
    """

    def pair() -> Points:
        x, label = _drawn(data.load(name), PAIRS[name], n, side, seed)
        return Points(x, (2.0 * label - 1.0)[:, None], name)

    def generated() -> Points:
        made = two_class_images(n, side, 3, rms=RMS, mean_cos=0.9, seed=seed + _SHIFT[name])
        return Points(made.x, made.y[:, None], "generated images")

    def many(stored: str, origin: str) -> Points:
        x, label = _drawn(data.load(stored), tuple(range(classes)), n, side, seed)
        return Points(x, F.one_hot(label, classes).to(x.dtype), origin)

    if name.startswith("rank-"):
        made = rank_k_targets(name, n, dim=dim, seed=seed)  # type: ignore[arg-type]
        found = Points(made.x, made.y[:, None], name)
    elif classes == 2:
        found = load_or(pair, generated, source)
    else:
        found = load_or(lambda: many(name, name), lambda: many("digits", "digits of scikit-learn"), source)
    return Points(found.x.double(), found.y.double(), found.origin)


def _drawn(found: Dataset, classes: tuple[int, ...], n: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """`n` images of these classes, as many of each as that allows, and their labels 0, 1, ..., in random order."""
    x, label = joined(found, classes, side)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    # The i-th image of every class before the (i+1)-th of any.
    turn = torch.empty(len(x))
    for which in range(len(classes)):
        mine = order[label[order] == which]
        turn[mine] = torch.arange(len(mine), dtype=turn.dtype) + which / len(classes)
    if len(x) < n:
        raise ValueError(f"There are {len(x)} images of the classes {classes}: too few to draw {n}.")
    keep = turn.argsort()[:n]
    keep = keep[torch.randperm(n, generator=generator)]
    return x[keep] * (RMS / x[keep].square().mean().sqrt()), label[keep]


# Networks

#: How large each kind of network is: units, channels, widening factor, and the ViT's dimension and patch.
TINY = Params(fcn=512, cnn=24, shallow=512, four=128, wrn=1, vit=32, patch=4, myrtle=64)
LAPTOP = Params(fcn=512, cnn=64, shallow=1024, four=256, wrn=1, vit=64, patch=2, myrtle=128)
PAPER = Params(fcn=1024, cnn=512, shallow=1024, four=256, wrn=10, vit=192, patch=4, myrtle=128)


def network(
    kind: str, shape: tuple[int, ...], outputs: int, widths: Mapping[str, int], *, default: bool = False, seed: int
) -> nn.Module:
    """A float64 network for inputs of a shape; `default` is PyTorch's own parameterisation, else the NTK's without biases.

    "2-FCN", "4-FCN" and "5-FCN" have one, three and four hidden layers, "5-CNN" four convolutions and a linear layer. "WRN" is
    10-k without normalisation, and "ViT" has its own initialisation: the NTK form is not defined for it.
    """
    init, channels = "torch" if default else "ntk", shape[0]
    hidden = {"2-FCN": [widths["shallow"]], "4-FCN": [widths["four"]] * 3, "5-FCN": [widths["fcn"]] * 4}
    hidden["5-CNN"] = [widths["cnn"]] * 4
    model: nn.Module
    if kind in hidden:
        model = plain_network(shape, hidden[kind], outputs, kind == "5-CNN", init, seed)
    elif kind == "Myrtle-5":
        model = myrtle5(widths["myrtle"], outputs, channels, seed=seed)
    elif kind == "WRN":
        model = wrn(10, widths["wrn"], outputs, channels, norm=None, bias=default, init=init, seed=seed)
    elif kind == "ViT":
        init = "torch" if default else "xavier"
        image = (channels, shape[1], shape[2])
        model = vision_transformer(image, widths["patch"], widths["vit"], 4, 4, outputs, init=init, seed=seed)
    else:
        raise ValueError(f"kind must be one of 2-FCN, 4-FCN, 5-FCN, 5-CNN, WRN, ViT, Myrtle-5. Got {kind!r}.")
    if kind in ("WRN", "ViT") and not default:
        # The output bias stays at zero: it adds 1 to every entry of the kernel, which no catapult can lower.
        last: Any = model.fc1 if kind == "WRN" else model.head
        nn.init.zeros_(last.bias)
        last.bias.requires_grad_(False)
    return model.double()


def plain_network(
    shape: tuple[int, ...], widths: Sequence[int], outputs: int, convolutional: bool, init: str, seed: int
) -> nn.Sequential:
    """Dense or convolutional ReLU layers: in the NTK form without biases, or as torch makes them for init "torch"."""
    if convolutional and init != "torch":
        return ntk_cnn(shape, widths, None, outputs, init=init, seed=seed)
    if init != "torch":
        return ntk_fcn(math.prod(shape), widths, None, outputs, init=init, seed=seed)
    if not convolutional:
        return fcn(math.prod(shape), widths, outputs, init="torch", seed=seed)

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([shape[0], *widths]):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * shape[1] * shape[2], outputs))

    return construct(make, "torch", seed)


# Descent

#: Rows of a kernel up to which all its eigenvectors are computed.
DENSE = 400
#: A loss this many times the first has diverged.
BLOWN_UP = 1e8
#: By how much a rate must exceed a critical one to count.
MARGIN = 1e-8

#: The learning rate of a step, given the critical rate of all points at the start.
Rate = Callable[[int, float], float]


def constant(ratio: float) -> Rate:
    """A rate fixed at `ratio` times the critical one of the start."""
    return lambda step, critical: ratio * critical


def descend(
    model: nn.Module,
    sample: Points,
    rate: Rate,
    *,
    steps: int,
    batch_size: int | None = None,
    ranks: Sequence[int] = (1, 5),
    until: float = 0.0,
    seed: int = 0,
) -> Iterator[Row]:
    """Descent on the mean squared error: a row for the weights before each step and after the last.

    A row holds the loss on all points, λ₁ of their kernel, the critical rate of all points and of the batch about to be used
    (numbers in the batch over λ₁ of its kernel, a part of that of all), whether the rate exceeds it, and `top_s`, `rest_s`.

    Args:
        rate: Of the step and the critical rate of all points at the start.
        batch_size: None is gradient descent; else batches of shuffled epochs.
        until: Stop once the loss on all points is below this.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    problem = Problem(model, nn.MSELoss(), (sample.x, sample.y), check=False)
    batches = _batches(len(sample.x), batch_size, seed)
    first = critical = math.inf
    for step in range(steps + 1):
        with torch.no_grad():
            residual = (model(sample.x) - sample.y).double()
        loss = float(residual.square().mean())
        first = loss if step == 0 else first
        if not loss < BLOWN_UP * first:
            yield {"step": step, "loss": None, "diverged": True}
            return
        kernel = tangent_kernel(problem).double()
        row = {"step": step, "diverged": False, **loss_and_kernel(kernel, residual, ranks)}
        critical = row["critical"] if step == 0 else critical
        if step == steps or loss < until:
            yield row
            return
        batch = next(batches)
        outputs = (batch[:, None] * sample.outputs + torch.arange(sample.outputs)).flatten()
        chosen, edge = rate(step, critical), batch_critical(kernel, outputs)
        yield {**row, "rate": chosen, "batch_critical": edge, "exceeded": chosen - edge > MARGIN}
        gradients = torch.autograd.grad(F.mse_loss(model(sample.x[batch]), sample.y[batch]), weights)
        with torch.no_grad():
            for w, g in zip(weights, gradients, strict=True):
                w.sub_(chosen * g)


def loss_and_kernel(kernel: Tensor, residual: Tensor, ranks: Sequence[int]) -> Row:
    """Loss, kernel norm, critical rate and the split of the loss; residuals (n, outputs)."""
    size, outputs = residual.numel(), residual.shape[1]
    split = split_loss(kernel if size <= DENSE else as_operator(kernel), residual, ranks, outputs=outputs)
    largest = float(split.eigenvalues[0])
    parts = {f"top_{s}": split.top[s] for s in split.top} | {f"rest_{s}": split.rest[s] for s in split.rest}
    return {"loss": split.total, "kernel": largest, "critical": size / largest if largest > 0 else math.inf, **parts}


def batch_critical(kernel: Tensor, rows: Tensor) -> float:
    """Numbers over λ₁ of the kernel of some outputs; infinite for a network that has died."""
    part = kernel if len(rows) == len(kernel) else kernel[rows][:, rows]
    if len(rows) <= DENSE:
        largest = float(torch.linalg.eigvalsh(part)[-1])
    else:
        largest = float(top_eigenpairs(as_operator(part), 1, tol=1e-6, progress=False).values[0])
    return len(rows) / largest if largest > 0 else math.inf


def _batches(n: int, size: int | None, seed: int) -> Iterator[Tensor]:
    """Indices of one batch after the other: all points, or shuffled epochs without replacement."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        if size is None or size >= n:
            yield torch.arange(n)
        else:
            yield from torch.randperm(n, generator=generator).split(size)


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean square error of the only output, summed in float64."""
    with torch.no_grad():
        return float((model(x)[:, 0] - y).double().square().mean())
