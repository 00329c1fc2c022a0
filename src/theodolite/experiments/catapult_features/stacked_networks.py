"""Many small ReLU networks as one program: outputs, gradients, tangent kernels and input gradients from the same two passes.

They are trained by SGD, with the critical rate of every batch, and by gradient descent whose rate is raised above the critical
one on purpose, and kept at the point of best validation.

R networks of one architecture with a single output each are stacked along the first axis, so that a step of SGD on batches
of five costs a handful of batched products. With h the input of a layer and D = ∂f/∂(its output before the activation), the
gradient of f_i by the weights is `scale · D_i h_iᵀ`, and the tangent kernel is a sum over layers of
`(scale² h hᵀ + bias) ∘ (D Dᵀ)`: no per-sample gradient of a dense layer is ever formed.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight
from torch.optim import Optimizer

from theodolite.measures.dynamics import catapult_count
from theodolite.models.initialisation import NTKConv, NTKLinear
from theodolite.results import Row
from theodolite.training.schedules import epoch_order

#: Samples, and numbers in the images of a convolution, that pass through the networks together: they should stay in the cache.
SAMPLES, NUMBERS = 250, 2**17


@dataclass
class Weights:
    """What a layer of all networks has: weight (R, out, ...), bias (R, out) or None, and the factor of the weights."""

    weight: Tensor
    bias: Tensor | None
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass
class Dense(Weights):
    """`scale · W h + b`: weight (R, out, in), bias (R, out) or None."""

    def read(self, h: Tensor) -> Tensor:
        """What the products below take as the layer's input."""
        return h

    def __call__(self, h: Tensor) -> Tensor:
        z = torch.bmm(h, self.weight.mT)
        z = z.mul_(self.scale) if self.scale != 1.0 else z
        return z if self.bias is None else z.add_(self.bias[:, None])

    def back(self, d: Tensor) -> Tensor:
        """D (R, n, out) to the input's side (R, n, in)."""
        return torch.bmm(d, self.weight * self.scale)

    def gradients(self, h: Tensor, d: Tensor, c: Tensor) -> list[Tensor]:
        """Σᵢ cᵢ ∂fᵢ for coefficients c (R, n), by weight and bias."""
        weighted = d * (c * self.scale)[:, :, None]
        found = [torch.bmm(weighted.mT, h)]
        return found if self.bias is None else [*found, torch.einsum("rno,rn->ro", d, c)]

    def add_(self, h: Tensor, d: Tensor, c: Tensor) -> None:
        """Add Σᵢ cᵢ ∂fᵢ to the weights in one product."""
        self.weight.baddbmm_((d * (c * self.scale)[:, :, None]).mT, h)
        if self.bias is not None:
            self.bias.add_(torch.einsum("rno,rn->ro", d, c))

    def kernel(self, h: Tensor, d: Tensor) -> Tensor:
        inner = torch.bmm(h, h.mT).mul_(self.scale**2)
        return (inner if self.bias is None else inner.add_(1.0)).mul_(torch.bmm(d, d.mT))

    def push(self, h: Tensor, d: Tensor, tangent: Sequence[Tensor]) -> Tensor:
        """⟨∂fᵢ, tangent⟩ for each sample: (R, n)."""
        moved = torch.bmm(h, tangent[0].mT).mul_(self.scale)
        moved = moved if self.bias is None else moved.add_(tangent[1][:, None])
        return moved.mul_(d).sum(2)


@dataclass
class Conv(Weights):
    """A convolution with zero padding to equal size: weight (R, out, C, s, s), bias (R, out) or None, on `image` (C, H, W).

    The networks are the groups of one grouped convolution, so between layers the sample comes first: (n, R·C, H, W).
    """

    image: tuple[int, int, int]

    @property
    def padding(self) -> int:
        return self.weight.shape[-1] // 2

    def read(self, h: Tensor) -> Tensor:
        """Images (R, n, C·H·W) as (n, R·C, H, W)."""
        return h.view(*h.shape[:2], -1, *self.image[1:]).transpose(0, 1).flatten(1, 2)

    def _from(self, images: Tensor) -> Tensor:
        """Images (n, R·channels, H, W) as (R, n, channels·H·W)."""
        return images.view(len(images), len(self.weight), -1).transpose(0, 1).contiguous()

    def _convolve(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = None if bias is None else bias.flatten()
        return self._from(F.conv2d(images, weight.flatten(0, 1) * self.scale, flat, padding=self.padding, groups=len(weight)))

    def __call__(self, images: Tensor) -> Tensor:
        return self._convolve(images, self.weight, self.bias)

    def back(self, d: Tensor) -> Tensor:
        weight = self.weight.flatten(0, 1) * self.scale
        return self._from(F.conv_transpose2d(self.read(d), weight, padding=self.padding, groups=len(d)))

    def gradients(self, images: Tensor, d: Tensor, c: Tensor) -> list[Tensor]:
        weighted = self.read(d * c[:, :, None])
        shape = self.weight.flatten(0, 1).shape
        found = conv2d_weight(images, shape, weighted, padding=self.padding, groups=len(d)).mul_(self.scale)
        weights = found.view_as(self.weight)
        return [weights] if self.bias is None else [weights, weighted.sum((0, 2, 3)).view_as(self.bias)]

    def add_(self, images: Tensor, d: Tensor, c: Tensor) -> None:
        for tensor, gradient in zip(self.tensors, self.gradients(images, d, c), strict=True):
            tensor.add_(gradient)

    def kernel(self, images: Tensor, d: Tensor) -> Tensor:
        """By the gradient of each sample, which is small for the batches this is asked for."""
        maps = d.view(*d.shape[:2], self.weight.shape[1], -1)  # (R, n, out, H·W)
        patches = F.unfold(self._from(images).view(-1, *self.image), self.weight.shape[-1], padding=self.padding)
        each = torch.matmul(maps, patches.view(*d.shape[:2], *patches.shape[1:]).mT).mul_(self.scale).flatten(2)
        inner, summed = torch.bmm(each, each.mT), maps.sum(3)
        return inner if self.bias is None else inner.add_(torch.bmm(summed, summed.mT))

    def push(self, images: Tensor, d: Tensor, tangent: Sequence[Tensor]) -> Tensor:
        return self._convolve(images, tangent[0], None if self.bias is None else tangent[1]).mul_(d).sum(2)


class Passes(NamedTuple):
    """Outputs (R, n), and for each layer its input and D."""

    outputs: Tensor
    inputs: list[Tensor]
    signals: list[Tensor]


class StackedNetworks:
    """R networks with ReLU between their layers and one output.

    Args:
        models: `nn.Sequential`s of one architecture out of dense layers and convolutions (torch's or in the NTK form), ReLU
            and Flatten, such as those of `ntk_fcn` and `ntk_cnn`.
        image: (channels, height, width) of the inputs, for networks with convolutions.
    """

    def __init__(self, models: Sequence[nn.Sequential], image: tuple[int, int, int] | None = None) -> None:
        self._example = copy.deepcopy(models[0])
        self.layers: list[Dense | Conv] = []
        for column in zip(*map(_weighted, models), strict=True):
            layer = _stack(column, image)
            self.layers.append(layer)
            if isinstance(layer, Conv):
                image = (layer.weight.shape[1], *layer.image[1:])

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases, (R, ...) each; not copies."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def replicas(self) -> int:
        return self.layers[0].weight.shape[0]

    @property
    def chunk(self) -> int:
        """Samples to take at once."""
        sizes = [self.replicas * math.prod(layer.image) for layer in self.layers if isinstance(layer, Conv)]
        return min([SAMPLES, *(max(1, NUMBERS // size) for size in sizes)])

    def take(self, rows: Tensor, other: StackedNetworks) -> None:
        """Take over the weights of `other` where `rows` (R,) is true."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[rows] = theirs[rows]

    def model(self, replica: int) -> nn.Sequential:
        """One of the networks as a module of its own."""
        model = copy.deepcopy(self._example)
        with torch.no_grad():
            for module, layer in zip(_weighted(model), self.layers, strict=True):
                module.weight.copy_(layer.weight[replica].view_as(module.weight))
                if layer.bias is not None and module.bias is not None:
                    module.bias.copy_(layer.bias[replica])
        return model

    def outputs(self, x: Tensor) -> Tensor:
        """f at inputs (R, n, d): (R, n)."""
        return torch.cat([self._forward(part)[0] for part in x.split(self.chunk, 1)], 1)

    def passes(self, x: Tensor) -> Passes:
        """Forward and backward at inputs (R, n, d); for as many samples as should be held at once."""
        outputs, inputs, masks = self._forward(x)
        signals = [torch.ones_like(outputs)[:, :, None]]
        for layer, mask in zip(reversed(self.layers[1:]), reversed(masks), strict=True):
            signals.append(layer.back(signals[-1]).mul_(mask))
        return Passes(outputs, inputs, signals[::-1])

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        h = x
        inputs: list[Tensor] = []
        masks: list[Tensor] = []
        for layer in self.layers:
            if inputs:
                masks.append(h > 0)
                h = h.relu_()
            inputs.append(layer.read(h))
            h = layer(inputs[-1])
        return h[:, :, 0], inputs, masks

    def kernel(self, passes: Passes) -> Tensor:
        """The tangent kernel (R, n, n)."""
        found = [layer.kernel(h, d) for layer, h, d in zip(self.layers, passes.inputs, passes.signals, strict=True)]
        return torch.stack(found).sum(0)

    def add_(self, passes: Passes, c: Tensor) -> None:
        """Add Σᵢ cᵢ ∂fᵢ/∂w to the weights, c (R, n); `passes` are spent."""
        for layer, h, d in zip(self.layers, passes.inputs, passes.signals, strict=True):
            layer.add_(h, d, c)

    def gradients(self, passes: Passes, c: Tensor) -> list[Tensor]:
        """Σᵢ cᵢ ∂fᵢ/∂w, one for each of `tensors`."""
        layers = zip(self.layers, passes.inputs, passes.signals, strict=True)
        return [g for layer, h, d in layers for g in layer.gradients(h, d, c)]

    def input_gradients(self, x: Tensor) -> Tensor:
        """∂f/∂x at inputs (R, n, d): (R, n, d)."""
        return torch.cat([self.layers[0].back(self.passes(part).signals[0]) for part in x.split(self.chunk, 1)], 1)

    def kernel_times(self, x: Tensor, v: Tensor) -> Tensor:
        """K v at inputs (R, n, d), v (R, n), without K."""
        parts = [self.passes(part) for part in x.split(self.chunk, 1)]
        pulled = [self.gradients(part, c.contiguous()) for part, c in zip(parts, v.split(self.chunk, 1), strict=True)]
        tangent = [torch.stack(each).sum(0) for each in zip(*pulled, strict=True)]
        return torch.cat([self._push(part, tangent) for part in parts], 1)

    def _push(self, passes: Passes, tangent: list[Tensor]) -> Tensor:
        found, tangents = torch.zeros_like(passes.outputs), iter(tangent)
        for layer, h, d in zip(self.layers, passes.inputs, passes.signals, strict=True):
            found += layer.push(h, d, [next(tangents) for _ in layer.tensors])
        return found

    def top_kernel(self, x: Tensor, start: Tensor | None = None, *, iterations: int = 30) -> tuple[Tensor, Tensor]:
        """Largest eigenvalue (R,) of the kernel and its vector (R, n), by power iteration from `start` (warm) or from ones."""
        v = torch.ones_like(x[:, :, 0]) if start is None else start
        value = v.new_zeros(len(v))
        for _ in range(iterations):
            v = v / v.norm(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
            moved = self.kernel_times(x, v)
            value, v = (moved * v).sum(1), moved
        return value, v


def _weighted(model: nn.Sequential) -> Iterator[NTKLinear | NTKConv | nn.Linear | nn.Conv2d]:
    """The layers with weights; anything this file does not know is refused."""
    for module in model:
        if isinstance(module, NTKLinear | NTKConv | nn.Linear | nn.Conv2d):
            yield module
        elif not isinstance(module, nn.ReLU | nn.Flatten):
            raise TypeError(f"Stacked networks are made of dense layers, convolutions, ReLU and Flatten. Got {module}.")


def _stack(column: Sequence[NTKLinear | NTKConv | nn.Linear | nn.Conv2d], image: tuple[int, int, int] | None) -> Dense | Conv:
    """One layer of all networks."""
    first = column[0]
    weight = torch.stack([layer.weight.detach() for layer in column])
    bias = None if first.bias is None else torch.stack([layer.bias.detach() for layer in column if layer.bias is not None])
    scale = first.scale if isinstance(first, NTKLinear | NTKConv) else 1.0
    if isinstance(first, NTKLinear | nn.Linear):
        return Dense(weight, bias, scale)
    if image is None:
        raise ValueError("Networks with convolutions need the shape of their images: image=(channels, height, width).")
    return Conv(weight, bias, scale, image)


# Training

#: A step is supercritical when its rate is above the critical one of its batch by more than this.
MARGIN = 1e-8
#: Training stops once the loss on all training points is below this, and a network is lost above `BLOW_UP`.
UNTIL, BLOW_UP = 1e-3, 1e6
#: Batches up to this size have their kernel formed; larger ones are asked for its top eigenvalue by power iteration.
LARGEST_KERNEL = 250

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class Points(NamedTuple):
    """Inputs (R, n, d) and labels (R, n)."""

    x: Tensor
    y: Tensor

    @property
    def size(self) -> int:
        return self.y.shape[1]

    def loss(self, networks: StackedNetworks) -> Tensor:
        """Mean square error (R,), summed in float64."""
        return (networks.outputs(self.x) - self.y).double().square().mean(1)

    def error(self, networks: StackedNetworks) -> Tensor:
        """Share of outputs with the wrong sign (R,)."""
        return (networks.outputs(self.x) * self.y <= 0).double().mean(1)


class Splits(NamedTuple):
    """The points to train on, to choose the weights by, and to judge them by."""

    train: Points
    validation: Points
    test: Points


class History:
    """What R networks did, and where their validation loss was least."""

    def __init__(self, networks: StackedNetworks) -> None:
        self.best = copy.deepcopy(networks)
        self.best_loss = torch.full((networks.replicas,), torch.inf, dtype=torch.float64)  # on the validation points
        self.final_loss = self.best_loss.clone()
        self.best_step = torch.zeros(networks.replicas, dtype=torch.long)
        self.steps = self.best_step.clone()  # taken before the loss was small enough, or in all
        self.running = torch.ones(networks.replicas, dtype=torch.bool)
        self.diverged = ~self.running
        self.exceeded: list[Tensor] = []  # for each step (R,) bool: its rate was supercritical
        self.curves: list[Row] = []

    def check(self, step: int, networks: StackedNetworks, splits: Splits, until: float | Tensor) -> None:
        """Look at all training and validation points, keep the best weights, and say who goes on."""
        loss, validation = splits.train.loss(networks), splits.validation.loss(networks)
        lost = self.running & ~(loss < BLOW_UP)
        better = self.running & (validation < self.best_loss) & ~lost
        self.best.take(better, networks)
        self.best_loss = torch.where(better, validation, self.best_loss)
        self.best_step[better] = step
        self.steps[self.running] = step
        self.final_loss = torch.where(self.running, loss, self.final_loss)
        for r in self.running.nonzero()[:, 0].tolist():
            self.curves.append({"replica": r, "step": step, "loss": float(loss[r]), "validation": float(validation[r])})
        self.diverged |= lost
        for tensor in networks.tensors:  # numbers that are none would be carried on for nothing
            tensor[lost] = 0.0
        self.running &= ~lost & ~(loss < until)

    def row(self, r: int) -> Row:
        """How run r went."""
        names = ("best_step", "steps", "final_loss", "diverged")
        return {"validation": self.best_loss[r].item(), **{name: getattr(self, name)[r].item() for name in names}}

    def catapults(self, replica: int) -> tuple[int, int]:
        """Supercritical steps up to the best validation loss, and in all."""
        flags = [bool(each[replica]) for each in self.exceeded]
        return catapult_count(flags, int(self.best_step[replica])), catapult_count(flags, int(self.steps[replica]))


def train(
    networks: StackedNetworks,
    splits: Splits,
    *,
    rates: Tensor | None = None,
    optimizer: MakeOptimizer | None = None,
    batch: int,
    steps: int,
    check: int,
    seeds: Sequence[int],
    until: float = UNTIL,
    kernel_every: int = 1,
) -> History:
    """Train in place with `rates` (R,) of SGD, or with a torch optimizer, whose rules act on each number alone.

    Every `check` steps the losses on all points are taken. Critical rates are counted for SGD: of each batch, or every
    `kernel_every` steps where the batch is all data, and then for the steps up to the next time.
    """
    history = History(networks)
    history.check(0, networks, splits, until)
    rule = None if optimizer is None else optimizer(networks.tensors)
    critical = CriticalRates(kernel_every)
    for step, (x, y) in enumerate(itertools.islice(batches(splits.train, batch, seeds), steps)):
        if rule is not None:
            loss_gradient(networks, x, y)
            rule.step()
        else:
            assert rates is not None
            edge = sgd_step(networks, x, y, rates * history.running, critical)  # who has stopped stays where it is
            history.exceeded.append(rates - edge > MARGIN)
        if (step + 1) % check == 0 or step + 1 == steps:
            history.check(step + 1, networks, splits, until)
            if not history.running.any():
                break
    return history


def batches(points: Points, batch: int, seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of every network's points in its own order, all of them once in each epoch."""
    if batch >= points.size:
        yield from itertools.repeat((points.x, points.y))
    for epoch in itertools.count():
        orders = torch.stack([epoch_order(seed, epoch, points.size) for seed in seeds])
        x, y = points.x.gather(1, orders[:, :, None].expand_as(points.x)), points.y.gather(1, orders)
        yield from zip(x.split(batch, 1), y.split(batch, 1), strict=True)


class CriticalRates:
    """b / λ₁ of the tangent kernel of each batch; for large batches looked at now and then, from the last top vector on."""

    def __init__(self, every: int = 1) -> None:
        self.every, self._asked = every, 0
        self._vector: Tensor | None = None
        self._last = torch.empty(0)

    def of_kernel(self, kernel: Tensor) -> Tensor:
        """(R, b, b) to (R,)."""
        values = torch.linalg.eigvalsh(kernel.nan_to_num(0.0, 0.0, 0.0))
        edges: Tensor = kernel.shape[1] / values[:, -1].clamp_min(torch.finfo(values.dtype).tiny)
        return edges

    def of_points(self, networks: StackedNetworks, x: Tensor) -> Tensor:
        """(R,), for all points at once."""
        if self._asked % self.every == 0:
            value, vector = networks.top_kernel(x, self._vector, iterations=30 if self._vector is None else 1)
            self._vector = torch.where(vector.isfinite() & (vector != 0), vector, torch.ones_like(vector))
            self._last = x.shape[1] / value
        self._asked += 1
        return self._last


def sgd_step(networks: StackedNetworks, x: Tensor, y: Tensor, rates: Tensor, critical: CriticalRates) -> Tensor:
    """One step on a batch (R, b, d); the batch's critical rates (R,) at the weights before it."""
    size = x.shape[1]
    if size <= LARGEST_KERNEL:
        passes = networks.passes(x)
        edge = critical.of_kernel(networks.kernel(passes))
        networks.add_(passes, (passes.outputs - y) * (-2.0 / size * rates)[:, None])
        return edge
    edge = critical.of_points(networks, x)
    loss_gradient(networks, x, y)
    gradient_step(networks, rates)
    return edge


def gradient_step(networks: StackedNetworks, rates: Tensor) -> None:
    """Each network against its `.grad` with its own rate (R,)."""
    for tensor in networks.tensors:
        assert tensor.grad is not None
        tensor.addcmul_(tensor.grad, -rates.view(-1, *(1,) * (tensor.ndim - 1)))


def loss_gradient(networks: StackedNetworks, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the mean square error of each network into `.grad`; the losses (R,)."""
    for tensor in networks.tensors:
        tensor.grad = None
    total, size = y.new_zeros(len(y), dtype=torch.float64), y.shape[1]
    for part, labels in zip(x.split(networks.chunk, 1), y.split(networks.chunk, 1), strict=True):
        passes = networks.passes(part)
        residual = passes.outputs - labels
        total += residual.double().square().sum(1)
        for tensor, gradient in zip(networks.tensors, networks.gradients(passes, residual * (2.0 / size)), strict=True):
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
    return total / size


def critical_rate(networks: StackedNetworks, x: Tensor) -> Tensor:
    """n / λ₁(K) on all points (R,)."""
    return x.shape[1] / networks.top_kernel(x)[0]


# Raises of the rate

#: Rates before the first raise and after a catapult, over the critical one.
QUIET = 0.8
#: A raise by itself waits until the rate has been subcritical for so many steps, and a raised rate waits so long for its spike.
PATIENCE, LATEST = 10, 40
#: The critical rate is looked at every so many steps.
KERNEL_EVERY = 2
#: A raise went too far when the loss is this many times the first one: the weights before it are restored, its rate halved.
TOO_FAR = 1e4


class Raises:
    """Rates (R,) of gradient descent: each network's is raised as often as it is told to, and kept subcritical in between.

    Args:
        wanted: (R,), how many raises.
        critical: (R,), critical rates at the start.
        table: Steps of the raises with the rate as a multiple of the critical one at the start. None raises by itself, to
            `factor` times the critical rate of the moment, once the last catapult is over and the rate subcritical for a while.
    """

    def __init__(
        self, wanted: Tensor, critical: Tensor, *, table: Sequence[tuple[int, float]] | None = None, factor: float = 1.6
    ) -> None:
        self.wanted, self.critical, self.factor = wanted, critical, factor
        self.table = None if table is None else dict(table)
        self.rates = QUIET * critical
        self.done = torch.zeros_like(wanted)
        self.restored = torch.zeros_like(wanted)
        self._before = torch.full_like(critical, torch.inf)  # loss at the last raise
        self._risen = torch.zeros_like(wanted, dtype=torch.bool)  # above it since then
        self._since, self._calm = torch.full_like(wanted, LATEST), torch.zeros_like(wanted)

    def due(self, step: int, loss: Tensor, critical: Tensor) -> Tensor:
        """Set the rates of this step, at a loss (R,) and critical rates (R,) of now; which networks were raised (R,)."""
        self._risen |= loss > self._before
        over = (loss < self._before) & (self._risen | (self._since >= LATEST))  # the last catapult
        if self.table is not None:
            due, height = torch.full_like(over, step in self.table), self.table.get(step, 0.0) * self.critical
        else:
            self._calm = torch.where(over & (self.rates < critical), self._calm + 1, torch.zeros_like(self._calm))
            due, height = self._calm >= PATIENCE, self.factor * critical
            self._calm[due] = 0
        due &= self.done < self.wanted
        settle = ~due & over & (self.rates > critical)
        self.rates = torch.where(due, height, torch.where(settle, QUIET * critical, self.rates))
        self._before = torch.where(due, loss.to(self._before), self._before)
        self._risen &= ~due
        self._since = torch.where(due, torch.zeros_like(self._since), self._since + 1)
        self.done += due
        return due

    def until(self, loss: float) -> Tensor:
        """The loss to stop at (R,): none while raises are still to come."""
        return torch.where(self.done < self.wanted, torch.full_like(self.critical, -1.0), torch.full_like(self.critical, loss))


def descend_with_raises(
    networks: StackedNetworks, splits: Splits, raises: Raises, *, steps: int, check: int, until: float = UNTIL
) -> tuple[History, Tensor]:
    """Gradient descent in place; the history, and the training loss before every step (T, R), NaN after a network stopped."""
    history, critical, saved = History(networks), CriticalRates(KERNEL_EVERY), copy.deepcopy(networks)
    losses: list[Tensor] = []
    for step in range(steps):
        edge = critical.of_points(networks, splits.train.x)
        loss = loss_gradient(networks, splits.train.x, splits.train.y)
        losses.append(loss.where(history.running, torch.full_like(loss, torch.nan)))
        too_far = history.running & ~(loss < TOO_FAR * losses[0])
        networks.take(too_far, saved)
        if step % check == 0:
            history.check(step, networks, splits, raises.until(until))
        if not history.running.any():
            break
        saved.take(raises.due(step, loss, edge) & ~too_far, networks)
        for tensor in networks.tensors:
            assert tensor.grad is not None
            tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
        gradient_step(networks, raises.rates * (history.running & ~too_far))
        raises.rates = torch.where(too_far, raises.rates / 2, raises.rates)
        raises.restored += too_far
    else:
        history.check(steps, networks, splits, raises.until(until))
    return history, torch.stack(losses)
