"""States in, sums out: what an anchor probe keeps of a stream of hidden states, whose size does not grow with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.bulk import log_bulk_partition
from theodolite.measures.anchors.normal_equations import NormalEquations
from theodolite.measures.anchors.reservoir import Reservoir, rows_within_budget

#: Numbers of logits held at a time (one large product is faster), of those sorted at a time (which should fit into the cache),
#: and states added to the sums at a time.
LOGITS, SORTED, ROWS = 2**24, 2**21, 4096


class ProbeStream:
    """Takes states (N, d) chunk by chunk; holds normal equations of two parts, running extremes and a sample of positions.

    `cut` is the number of the first held-out position. Where the length of the stream is not known (`cut` None), the last
    share `held_out` of the positions of every call is held out. `cap` c is for the perplexity only, where the model says
    c · tanh(z/c) instead of its logits z.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        top: Sequence[int],
        *,
        exclude: Tensor | None = None,
        held_out: float = 0.2,
        cut: int | None = None,
        chunk: int | None = None,
        sample: int | None = None,
        seed: int = 0,
        cap: float | None = None,
    ) -> None:
        n, d = weight.shape
        self.weight, self.bias, self.top, self.exclude = weight, bias, tuple(top), exclude
        self.held_out, self.cut, self.cap = held_out, cut, cap
        self.chunk = min(ROWS, max(1, LOGITS // n)) if chunk is None else chunk
        self._logits = weight.new_empty(0, n)  # one buffer for all chunks: fresh memory costs as much as the product
        self.train, self.test = NormalEquations(d, len(top)), NormalEquations(d, len(top))
        self.sample = Reservoir(rows_within_budget(d) if sample is None else sample, seed)
        self.positions = 0
        self.mass_sum = torch.zeros(len(top), dtype=torch.float64)
        self.mass_low = torch.ones(len(top), dtype=torch.float64)
        self.loss_sum, self.predicted = 0.0, 0

    def add(self, states: Tensor, targets: Tensor | None = None, places: Tensor | None = None) -> None:
        """States (N, d), the tokens (N,) that came there (−100: none), and their places (N,) in their windows."""
        fresh = 0 if self.cut is not None else math.ceil((1 - self.held_out) * len(states))
        border = max(0, self.cut - self.positions) if self.cut is not None else fresh
        for start in range(0, len(states), ROWS):
            part = slice(start, start + ROWS)
            self._add(
                states[part], None if targets is None else targets[part], None if places is None else places[part], border - start
            )

    def _add(self, states: Tensor, targets: Tensor | None, places: Tensor | None, border: int) -> None:
        """One block; rows from `border` on are held out."""
        total, bulk = self.values(states, targets)
        border = min(max(border, 0), len(states))
        if not self.positions:
            self.train.reference = self.test.reference = self._first_fit(states, bulk)
        self.train.update(states[:border], bulk[:border])
        self.test.update(states[border:], bulk[border:])
        mass = (bulk - total[:, None]).double().exp()
        self.mass_sum += mass.sum(0).cpu()
        self.mass_low = torch.minimum(self.mass_low, mass.amin(0).cpu())
        numbers = torch.arange(self.positions, self.positions + len(states))
        where = numbers if places is None else places.cpu()
        held_out = torch.arange(len(states)) >= border
        self.sample.offer(states.cpu(), bulk.double().cpu(), total.double().cpu(), where, numbers, held_out)
        self.positions += len(states)

    def _first_fit(self, states: Tensor, bulk: Tensor) -> Tensor:
        """Coefficients (d + 1, tops) without a constant from the first block, which the sums are taken relative to.

        A little ridge saves the search for directions that the states do not hold; solving again for what is left undoes it in
        those they do.
        """
        h, y = states.double(), bulk.double()
        gram = h.mT @ h
        gram.diagonal().add_(1e-8 * gram.diagonal().mean() + torch.finfo(torch.float64).tiny)
        factor = torch.linalg.cholesky(gram)
        fit = torch.cholesky_solve(h.mT @ y, factor)
        fit += torch.cholesky_solve(h.mT @ (y - h @ fit), factor)
        return torch.cat([fit, torch.zeros_like(fit[:1])]).cpu()

    def values(self, states: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log Z (N,) and the log bulk sums (N, tops) of states (N, d)."""
        parts = []
        for start in range(0, len(states), self.chunk):
            rows = slice(start, start + self.chunk)
            logits = self._product(states[rows])
            step = max(1, SORTED // logits.shape[1])
            found = [log_bulk_partition(some, self.top, self.exclude) for some in logits.split(step)]
            parts += found
            if targets is not None:
                self._predict(logits, torch.cat([part.total for part in found]), targets[rows])
        total, bulk = torch.cat([p.total for p in parts]), torch.cat([p.bulk for p in parts])
        if not bool(torch.isfinite(bulk).all()):
            row = int((~torch.isfinite(bulk)).any(1).nonzero()[0])
            raise NonFiniteError(
                f"The log bulk partition function of position {self.positions + row} is {float(bulk[row].sum()):g}: NaN or "
                "infinity in the states or the head. Look for them in the model's weights, or for half precision that overflows."
            )
        return total, bulk

    def _product(self, states: Tensor) -> Tensor:
        """The logits (N, n) of states (N, d); good until the next call."""
        if len(self._logits) < len(states):
            self._logits = self.weight.new_empty(len(states), len(self.weight))
        out = self._logits[: len(states)]
        if self.bias is None:
            return torch.mm(states, self.weight.mT, out=out)
        return torch.addmm(self.bias, states, self.weight.mT, out=out)

    def _predict(self, logits: Tensor, total: Tensor, targets: Tensor) -> None:
        """Add −log p of the tokens that came, where one of the vocabulary did."""
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
            total = logits.logsumexp(-1)
        known = ((targets >= 0) & (targets < logits.shape[1])).to(logits.device)
        chosen = logits.gather(1, targets.to(logits.device).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.loss_sum += float((total - chosen)[known].double().sum())
        self.predicted += int(known.sum())
