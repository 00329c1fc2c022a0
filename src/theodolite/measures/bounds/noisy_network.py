"""The user's model with noise in its weights: drawn for every sample where that is possible, else for every batch.

Which of the two it is, is found out by calling the model: for every sample where each measured parameter is the weight or the
bias of linear layers, convolutions and embeddings whose inputs begin with the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from theodolite.measures.bounds.noisy_calls import Inputs, NoisyBias, NoisyCall, NoisyCalls, NoisyLayer, OtherUseError
from theodolite.measures.bounds.posterior import Block
from theodolite.operators.kronecker import affine_layers
from theodolite.problem import Batch, Problem

#: Inputs of the first layers that are rotated once and kept, in bytes.
KEPT = 2**31

#: Mean and variance of a parameter's coordinates, by its name.
Values = Mapping[str, tuple[Tensor, Tensor]]


class Samples:
    """The data as one batch, of which parts are taken by the numbers of samples; batch by batch where shapes differ."""

    def __init__(self, problem: Problem) -> None:
        self.batches = [problem.placed(batch) for batch in problem.data]
        self.starts = [0]
        for batch in self.batches:
            self.starts.append(self.starts[-1] + batch.size)
        if len(self.batches) == 1:
            return
        try:
            self.batches = [self.batches[0].joined(*self.batches[1:])]
        except (RuntimeError, StopIteration, TypeError):
            return
        self.starts = [0, self.starts[-1]]

    @property
    def count(self) -> int:
        return self.starts[-1]

    def epoch(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Batch]]:
        """(numbers of the samples, batch): all samples once, in random order where there is a generator."""
        for start, batch in zip(self.starts, self.batches, strict=False):
            order = torch.arange(batch.size) if generator is None else torch.randperm(batch.size, generator=generator)
            for rows in order.split(size):
                yield rows + start, batch.part(rows)


@dataclass(frozen=True)
class Drawn:
    """What came out: the network's `output`; where the last layer's noise is left open, its moments (B, m) and its basis."""

    output: Tensor
    mean: Tensor | None = None
    variance: Tensor | None = None
    left: Tensor | None = None


class NoisyNetwork:
    """Calls the model of a problem with `mean + √variance · noise` in the coordinates of `blocks`.

    `by_sample` asks for draws for every sample; `why` says why there are none.
    """

    def __init__(self, problem: Problem, samples: Samples, blocks: Sequence[Block], *, by_sample: bool = True) -> None:
        self.problem, self.samples = problem, samples
        self.placeholders = dict(zip(problem.names, problem.leaves(grad=False), strict=True))
        self.tensors = problem.tensors(list(self.placeholders.values()))
        self.layers: dict[str, NoisyLayer] = {}
        self.biases: dict[str, NoisyBias] = {}
        self.last: NoisyLayer | None = None
        self.fixed: list[str] = []  # layers whose inputs do not depend on the weights
        self.kept: dict[str, Inputs] = {}
        self.why = "" if by_sample else "weights are drawn for each batch, as asked"
        self.set_blocks(blocks)
        if by_sample:
            try:
                self._find_layers()
            except OtherUseError as error:
                self.why, self.layers, self.biases, self.last = str(error), {}, {}, None

    @property
    def by_sample(self) -> bool:
        return bool(self.layers)

    def set_blocks(self, blocks: Sequence[Block]) -> None:
        """Other bases, or other values, of the same parameters."""
        self.blocks = {block.name: block for block in blocks}
        self.kept = {}
        for name, layer in self.layers.items():
            self.layers[name] = new = self._layer(self.blocks[name], layer)
            if layer is self.last:
                self.last = new
        lefts = {self.blocks[name].group: layer.left for name, layer in self.layers.items()}
        for name, bias in self.biases.items():
            own, other = self.blocks[name].left, lefts.get(self.blocks[name].group)
            same = own is not None and other is not None and torch.equal(own, other)
            bias.left = other if same else own

    def _layer(self, block: Block, like: NoisyLayer) -> NoisyLayer:
        layer = replace(like, left=block.left, right=block.right, start=None, known=None)
        if block.rank is None or block.right is None:
            return layer
        start = block.parameter(block.start).reshape(len(block.mean), -1)
        return replace(layer, right=block.right[:, : block.rank], start=start)

    # How parameters are used

    def _find_layers(self) -> None:
        problem = self.problem
        place = {name: i for i, name in enumerate(problem.names)}
        recipes = {problem.layers[r.name].weights[0]: r for r in affine_layers(problem, list(problem.layers))[0]}
        rows = {id(m.weight) for m in problem.model.modules() if type(m) is nn.Embedding and m.max_norm is None}
        for name, block in self.blocks.items():
            recipe = recipes.get(place[name])
            if recipe is not None or id(problem.parameters[place[name]]) in rows:
                self.layers[name] = NoisyLayer(recipe, block.mean, block.mean, block.left, block.right)
            else:
                self.biases[name] = NoisyBias(block.mean, block.mean, block.left)
        if not self.layers:
            raise OtherUseError("the model has no linear layer, convolution or embedding")
        self._look()

    def _look(self) -> None:
        """Call the model on a few samples with little noise, to see which layers meet a sample once."""
        values = {name: (b.mean, torch.full_like(b.mean, 1e-8)) for name, b in self.blocks.items()}
        _, whole = next(self.samples.epoch(7))
        looks: list[list[NoisyCall]] = []
        with self.problem.session(second=False), torch.no_grad():
            for seed, size in ((0, 4), (1, 4), (2, 3)):
                looks.append([])
                batch = whole.part(slice(0, size))
                output = self._forward(batch, values, torch.Generator().manual_seed(seed), calls=looks[-1]).output
                if not output.ndim or len(output) != size:
                    raise OtherUseError("the first size of the output is not the number of samples")
            self._check_means(batch)
        first, again, _ = looks
        for name, layer in self.layers.items():
            mine = [(a, b) for a, b in zip(first, again, strict=True) if a.layer is layer]
            if len(mine) != 1 or not mine[0][0].plain:
                continue
            layer.shared = False
            one, other = mine[0]
            if torch.equal(one.input, other.input):
                self.fixed.append(name)
        last = looks[-1][-1]
        if last.plain and last.output.shape == output.shape and torch.equal(last.output, output) and not last.layer.shared:
            self.last = last.layer
        shared = [name for name, layer in self.layers.items() if layer.shared]
        self.set_blocks([replace(b, rank=None) if b.name in shared else b for b in self.blocks.values()])

    def _check_means(self, batch: Batch) -> None:
        """Raise where the means of the noisy calls do not make the model's own outputs."""
        values = {name: (b.mean, torch.zeros_like(b.mean)) for name, b in self.blocks.items()}
        means = [b.parameter(b.mean if b.right is None else b.beside(1.0).mean) for b in self.blocks.values()]
        plain = self.problem.output(self.problem.tensors(means), batch, 0, check=False)
        drawn = self._forward(batch, values, torch.Generator().manual_seed(0)).output
        if not torch.allclose(drawn, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max())):
            raise OtherUseError("with noise in its calls the model gives other outputs")

    # Calling

    def keep_inputs(self, size: int) -> None:
        """Rotate the inputs of the first layers once for all samples, where memory allows."""
        for name in self.fixed:
            layer = self.layers[name]
            bytes_needed = self.samples.count * (sum(layer.mean.shape) if layer.start is not None else layer.mean.shape[1]) * 4
            if bytes_needed <= KEPT:
                self._keep(name, size)

    def _keep(self, name: str, size: int) -> None:
        layer, found = self.layers[name], []
        values = {n: (b.mean, torch.zeros_like(b.mean)) for n, b in self.blocks.items()}
        with self.problem.session(second=False), torch.no_grad():
            for _, batch in self.samples.epoch(size):
                calls: list[NoisyCall] = []
                self._forward(batch, values, torch.Generator(), calls=calls)
                (x,) = [call.input for call in calls if call.layer is layer]
                found.append(layer.inputs(x))
        parts = zip(*((i.turned, i.start, i.rest) for i in found), strict=True)
        self.kept[name] = Inputs(*(None if part[0] is None else torch.cat(part) for part in parts))  # type: ignore[arg-type]

    def __call__(
        self,
        rows: Tensor,
        batch: Batch,
        values: Values,
        generator: torch.Generator,
        variances: Mapping[str, float],
        *,
        open_last: bool,
    ) -> Drawn:
        """Inside a session: the outputs for a batch. `open_last`: without the noise of the last layer, which is told instead."""
        for name, layer in self.layers.items():
            layer.known = self.kept[name].at(rows) if name in self.kept else None
            layer.rest = variances[self.blocks[name].group]
        return self._forward(batch, values, generator, open_last=open_last)

    def _forward(
        self,
        batch: Batch,
        values: Values,
        generator: torch.Generator,
        *,
        open_last: bool = False,
        calls: list[NoisyCall] | None = None,
    ) -> Drawn:
        if not self.layers:
            return Drawn(self._with_one_draw(batch, values, generator))
        for name, layer in self.layers.items():
            layer.mean, layer.variance = values[name]
            if layer.start is not None:
                layer.mean, layer.variance = (self.blocks[name].own(t) for t in values[name])
        for name, bias in self.biases.items():
            bias.mean, bias.variance = values[name]
        layers = {id(self.placeholders[name]): layer for name, layer in self.layers.items()}
        biases = {id(self.placeholders[name]): bias for name, bias in self.biases.items()}
        with NoisyCalls(layers, biases, batch.size, generator, last=self.last if open_last else None, calls=calls) as mode:
            output = self.problem.output(self.tensors, batch, 0, check=False)
        if mode.moments is None:
            return Drawn(output)
        assert self.last is not None
        mean, variance, _ = mode.moments
        return Drawn(output, mean, variance, self.last.left)

    def _with_one_draw(self, batch: Batch, values: Values, generator: torch.Generator) -> Tensor:
        """One network for the whole batch."""
        parameters = []
        for name, block in self.blocks.items():
            mean, variance = values[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
            parameters.append(block.parameter(mean + variance.sqrt() * noise))
        return self.problem.output(self.problem.tensors(parameters), batch, 0, check=False)
