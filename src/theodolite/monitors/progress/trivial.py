"""What a guess gets that knows nothing of the inputs, from the targets that pass by.

Class or token frequencies under a cross entropy, the mean or the median of the targets otherwise. Where the loss is the user's
own function, the guess is scored by it, so that class weights, smoothed labels and sums count as they do in training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.interrupts import unbroken
from theodolite.measures.progress.trivial import label_entropy
from theodolite.problem.accuracy import class_axis
from theodolite.problem.calling import main_output
from theodolite.problem.losses import best_rate, is_binary
from theodolite.problem.weighting import ignored_label

#: Numbers of a made-up output at most: one for a large vocabulary would cost as much as the model.
LARGEST = 2_000_000
#: Targets of a batch from which no median is taken.
CHEAP = 20_000
#: Batches over which the score of a guess is averaged, the oldest forgotten slowly.
MEMORY = 20
#: Batches whose losses are compared with those of a guess one by one, the least that say something, and the errors allowed for.
COMPARED, FEWEST, ERRORS = 10, 4, 2.0

Score = Callable[[Tensor, Tensor], Any]


class TrivialPredictor:
    """Learns the best constant prediction from targets, batch by batch; `value` is its loss, None where nothing is known.

    >>> guess = TrivialPredictor(nn.CrossEntropyLoss())
    >>> guess.update(torch.tensor([0, 1] * 500))
    >>> round(guess.value, 3), guess.name
    (0.693, 'always predicting the class frequencies')
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.value: float | None = None
        self.name = ""
        self._counts: Tensor | None = None
        self._mean: Tensor | None = None
        self._median: Tensor | None = None
        self._seen = 0
        self._scored = 0
        self._gains: deque[float] = deque(maxlen=COMPARED)

    @property
    def possible_gain(self) -> float | None:
        """The largest share of a guess's loss that the last batches may have gained; None where too few were compared.

        Batch by batch: what makes the targets of one batch harder than those of another is the same for the guess.
        """
        if len(self._gains) < FEWEST:
            return None
        return fmean(self._gains) + ERRORS * stdev(self._gains) / math.sqrt(len(self._gains))

    def update(self, target: Any, output: Any = None, score: Score | None = None, loss: float | None = None) -> None:
        """Take the targets of a batch, and where `score` is given the loss of a guess in place of its output.

        `loss` is that of the model on this batch, where it is known.
        """
        if not isinstance(target, Tensor) or target.is_complex() or not target.numel():
            return
        target, output = target.detach(), _tensor(output)
        if target.is_floating_point():
            self._update_mean(target)
            self.name = f"always predicting the {self._what(target)}"
            self._score(self._constants(output), target, score, loss)
        elif target.dtype is not torch.bool:
            if not self._update_counts(target):
                return
            self.name = f"always predicting the {'token' if target.ndim > 1 else 'class'} frequencies"
            if self.loss is None or _is_plain_cross_entropy(self.loss):
                assert self._counts is not None
                self.value = label_entropy(self._counts)
                self._compare(self._entropy_of(target), loss)
            else:
                self._score(self._frequencies(output, target), target, score, loss)

    def _what(self, target: Tensor) -> str:
        """The constant, as a sentence calls it."""
        if not is_binary(self.loss):
            return "mean of the targets"
        return "base rate of each output" if math.prod(target.shape[1:]) > 1 else "base rate"

    def _update_counts(self, target: Tensor) -> bool:
        labels = target.reshape(-1)
        labels = labels[labels != ignored_label(self.loss)]
        if not len(labels) or int(labels.min()) < 0:
            return False
        found = labels.bincount(minlength=0 if self._counts is None else len(self._counts)).double().cpu()
        if self._counts is not None:
            found[: len(self._counts)] += self._counts
        self._counts = found
        return True

    def _update_mean(self, target: Tensor) -> None:
        """The mean over samples, of each output; and the mean of the batches' medians, where they cost little."""
        self._seen += 1
        values = target.double().reshape(len(target), -1) if target.ndim else target.double().reshape(1, 1)
        mean = median = values.mean(0).reshape(target.shape[1:])
        if values.numel() <= CHEAP:
            median = values.median(0).values.reshape(mean.shape)
        if self._mean is None or self._median is None or self._mean.shape != mean.shape:
            self._mean, self._median, self._seen = mean, median, 1
            return
        self._mean += (mean - self._mean) / self._seen
        self._median += (median - self._median) / self._seen

    def _constants(self, output: Tensor | None) -> Iterator[Tensor]:
        """The same output for all samples: the mean, the median, and as a logit the best rate where the mean is one."""
        if output is None or self._mean is None or self._median is None:
            return
        for value in (self._mean, self._median):
            yield value.to(output).expand_as(output)
        if float(self._mean.min()) >= 0.0 and float(self._mean.max()) <= 1.0:
            rate = best_rate(self._mean, self.loss)
            yield torch.logit(rate.clamp(1e-6, 1 - 1e-6)).to(output).expand_as(output)

    def _frequencies(self, output: Tensor | None, target: Tensor) -> Iterator[Tensor]:
        """Logarithms of the frequencies along the classes of the output."""
        axis = None if output is None else class_axis(output, target, self.loss)
        if output is None or self._counts is None or axis is None:
            return
        shares = torch.zeros(max(output.shape[axis], len(self._counts)), dtype=torch.float64)
        shares[: len(self._counts)] = self._counts / self._counts.sum()
        shape = [1] * output.ndim
        shape[axis] = -1
        logs = shares[: output.shape[axis]].log().clamp_min(-30.0)
        yield logs.to(output).reshape(shape).expand_as(output)

    def _score(self, outputs: Iterator[Tensor], target: Tensor, score: Score | None, loss: float | None) -> None:
        """The least loss of the guesses, averaged over batches; none where the loss does not take them."""
        if score is None:
            return
        found: list[float] = []
        with unbroken(torch.no_grad()):
            for output in outputs:
                if output.numel() <= LARGEST:
                    with suppress(Exception):
                        found.append(float(score(output, target)))
        least = min((value for value in found if math.isfinite(value)), default=None)
        if least is not None:
            self._scored = min(self._scored + 1, MEMORY)
            self.value = least if self.value is None else self.value + (least - self.value) / self._scored
            self._compare(least, loss)

    def _entropy_of(self, target: Tensor) -> float:
        """The cross entropy of the labels of one batch under the frequencies so far."""
        assert self._counts is not None
        labels = target.reshape(-1)
        labels = labels[labels != ignored_label(self.loss)].cpu()
        return -float((self._counts / self._counts.sum()).log()[labels].mean())

    def _compare(self, guess: float, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss) and guess > 0.0:
            self._gains.append((guess - loss) / guess)


def _tensor(output: Any) -> Tensor | None:
    """The main tensor of what a model returned; None where there is none."""
    with suppress(Exception):
        return main_output(output)
    return None


def _is_plain_cross_entropy(loss: Any) -> bool:
    """A mean cross entropy of whole numbers, without weights or smoothing."""
    inner = getattr(loss, "loss", loss)  # as the monitor wraps it for tokens
    if inner is nn.functional.cross_entropy:
        return True
    plain = type(inner) in (nn.CrossEntropyLoss, nn.NLLLoss) and inner.weight is None and inner.reduction == "mean"
    return plain and not getattr(inner, "label_smoothing", 0.0)
