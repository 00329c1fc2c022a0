"""The error rate of networks drawn from a posterior: as a smooth function to fit, and counted in independent draws to certify."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from theodolite.measures.bounds.calculator import kl_inverse
from theodolite.measures.bounds.noisy_network import Drawn, NoisyNetwork, Values
from theodolite.measures.bounds.posterior import GaussianPosterior
from theodolite.problem.accuracy import answers, right_answers
from theodolite.progress import counting

#: Outputs up to which the error of a sample is computed from all pairs of classes.
PAIRS = 64
_FAR = 12.0  # standard deviations; the logarithm of what is farther is no number in single precision


@dataclass(frozen=True)
class DrawnError:
    """The mean of independent variables in [0, 1] whose expectation is the error rate of the posterior on the samples.

    `draws` is how many there are; `scale` is 1 where all count the same, else what their mean is multiplied by to give `value`.
    """

    value: float
    draws: int
    scale: float = 1.0

    def upper(self, delta: float) -> float:
        """What the error rate is at most, with probability 1 − δ over the draws (Hoeffding 1963, of unequal means).

        >>> round(DrawnError(0.4993, 50_000).upper(0.005), 4)
        0.5066
        """
        if self.value >= 1:
            return 1.0
        return min(1.0, self.scale * float(kl_inverse(self.value / self.scale, math.log(1 / delta) / self.draws)))


def smooth_error(drawn: Drawn, target: Tensor, loss: object) -> Tensor:
    """A differentiable estimate of the error rate on a batch.

    With the last layer's noise left open: the probability that the right class falls behind, exact for two classes, and the
    product over pairs of classes where there are more. Else the cross-entropy over the log of the number of classes.
    """
    labels = answers(target, loss)
    assert labels is not None
    if drawn.mean is None or drawn.variance is None or drawn.output.shape[-1] > PAIRS:
        return _cross_entropy(drawn.output, labels)
    logits = drawn.output
    left = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device) if drawn.left is None else drawn.left
    if logits.shape[1] == 1:
        sign = 2.0 * labels.to(logits) - 1
        spread = (drawn.variance @ left.square().T)[:, 0].clamp(min=1e-20).sqrt()
        return torch.special.ndtr((-sign * logits[:, 0] / spread).clamp(-_FAR, _FAR)).mean()  # type: ignore[no-any-return]
    pairs = (left[:, None] - left[None]).square()  # (C, C, m)
    spread = torch.einsum("bcm,bm->bc", pairs[labels], drawn.variance).clamp(min=1e-20).sqrt()
    ahead = logits.gather(1, labels[:, None]) - logits
    others = F.one_hot(labels, logits.shape[1]) == 0
    return -torch.expm1((torch.special.log_ndtr((ahead / spread).clamp(-_FAR, _FAR)) * others).sum(1)).mean()


def _cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    if output.numel() == len(output):
        return F.binary_cross_entropy_with_logits(output.reshape(-1), labels.to(output)) / math.log(2)
    return F.cross_entropy(output, labels) / math.log(output.shape[1])


def drawn_error(
    network: NoisyNetwork,
    posterior: GaussianPosterior,
    passes: int,
    *,
    batch_size: int = 1000,
    seed: int = 0,
    progress: bool | None = False,
) -> DrawnError:
    """The error rate over `passes` through the data: every sample, or every batch, meets networks of its own."""
    network.set_blocks(posterior.blocks)
    values: Values = {b.name: (b.mean, (2 * b.log_std).exp()) for b in posterior.blocks}
    generator = torch.Generator().manual_seed(seed)
    wrong, sizes = 0, []
    problem = network.problem
    with problem.session(second=False), torch.no_grad(), counting("drawing networks", progress=progress, total=passes) as count:
        network.keep_inputs(batch_size)
        for _ in range(passes):
            for rows, batch in network.samples.epoch(batch_size):
                drawn = network(rows, batch, values, generator, posterior.variances, open_last=False)
                right = right_answers(drawn.output, batch.target, problem.loss_function)
                assert right is not None
                wrong += int((~right).sum())
                sizes.append(batch.size)
            count(1)
    total = sum(sizes)
    if network.by_sample:
        return DrawnError(wrong / total, total)
    return DrawnError(wrong / total, len(sizes), len(sizes) * max(sizes) / total)
