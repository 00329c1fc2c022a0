"""One sample that is steeper than the others: the loss of SGD rises when it is visited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import Measured
from theodolite.measures.dynamics import Proportion
from theodolite.models import ntk_fcn
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The rate over the critical one of the steep sample, how much longer that sample is, and a rise that counts.
RATIO, LONGER, RISE = 1.3, 2.0, 1e-3


@dataclass(frozen=True)
class Params:
    width: int = 2000
    n: int = 100
    steps: int = 1000


def rises_at_the_sample(rows: list[Row]) -> Measured:
    """Of the steps that raise the loss by more than a thousandth, the share that visits the steep sample."""
    up = [row for row in rows if row["after"] - row["loss"] > RISE]
    found = Proportion(sum(row["steep"] for row in up), len(up))
    return Measured(found.value, found.error)


def critical_ratio(rows: list[Row]) -> float:
    """Critical rate of the steep sample over the median of the others, at the start."""
    return float(rows[0]["critical_steep"] / rows[0]["critical_others"])


class Figure45(Experiment):
    """One steep sample: SGD of batch size one rises exactly when it is visited.

    Points on the unit sphere with targets 1; one of them, with its target, is doubled, which makes its critical rate four
    times smaller. The rate lies between that and the critical rates of the others. The output layer is fixed.
    """

    id = "catapult-features/figure-4.5"
    source = "003, section 4.3, Figure 4.5"
    item = "zhu-2024 Figure 4.5"
    sizes = {"tiny": Params(), "laptop": Params(width=8000), "paper": Params(width=20_000)}
    departs = "Width, steps and rate are not stated; ours is 1.3 times the critical rate of the doubled sample at the start."
    claims = (
        Claim(
            "rises of the loss by more than 0.001 that happen at the doubled sample (share)",
            rises_at_the_sample,
            rule="at least",
            expected=0.98,
            reported=Reported("the loss rises exactly at the visits", "003, Figure 4.5", read_from="plot"),
        ),
        Claim(
            "its critical rate is a quarter of the others'",
            critical_ratio,
            rule="relative",
            expected=0.25,
            tolerance=0.1,
            reported=Reported("four times smaller", "003, appendix C.6"),
        ),
        Claim(
            "visits of other samples whose critical rate was exceeded",
            lambda rows: sum(not row["critical"] >= row["rate"] and not row["steep"] for row in rows),
            rule="equal",
            expected=0,
            reported=Reported("no catapult on the other samples", "003, appendix C.6"),
        ),
        Claim(
            "visits of the doubled sample that raise the loss (share)",
            lambda rows: sum(row["after"] > row["loss"] for row in rows if row["steep"]) / sum(row["steep"] for row in rows),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        yield {"width": p.width, "n": p.n, "steps": p.steps, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        generator = torch.Generator().manual_seed(job["seed"])
        x = torch.nn.functional.normalize(torch.randn(job["n"], job["n"], generator=generator), dim=1)
        y = torch.ones(job["n"])
        x[0] *= LONGER
        y[0] *= LONGER
        model = ntk_fcn(job["n"], job["width"], 2, seed=job["seed"])
        hidden = model.get_parameter("fc1.weight")
        criticals = [_critical(model, hidden, x[i])[0] for i in range(job["n"])]
        rate = RATIO * criticals[0]
        start = {"critical_steep": criticals[0], "critical_others": median(criticals[1:]), "rate": rate, "seed": job["seed"]}
        loss = _loss(model, x, y)
        for step in range(job["steps"]):
            i = int(torch.randint(job["n"], (), generator=generator))
            critical, output, gradient = _critical(model, hidden, x[i])
            with torch.no_grad():
                hidden.sub_(2 * rate * (output - y[i]) * gradient)
            after = _loss(model, x, y)
            seen = {"step": step, "loss": loss, "after": after, "steep": i == 0, "critical": critical}
            yield {**start, **seen, "exceeded": rate - critical > 1e-8}
            loss = after

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, [ax] = plots.panels(1, size=(6.4, 3.2), letters=False)
        plots.curves(rows, "step", "loss", log="y", markers=False, labels="none", ylabel="loss on all points", ax=ax)
        floor = min(row["loss"] for row in rows)
        for exceeded, colour in ((False, "grey"), (True, "C3")):
            visits = [row["step"] for row in rows if row["steep"] and row["exceeded"] == exceeded]
            ax.plot(visits, [floor] * len(visits), "|", color=colour, markersize=10, markeredgewidth=1.6, clip_on=False)
        ax.set_title("ticks: visits of the doubled sample, red where the rate exceeds its critical one", fontsize=9)
        return figure


def _critical(model: torch.nn.Module, hidden: torch.Tensor, x: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """1/‖∇f‖², the critical rate of a batch of one sample, with output and gradient by the trained layer."""
    output = model(x[None])[0, 0]
    [gradient] = torch.autograd.grad(output, hidden)
    return 1.0 / float(gradient.square().sum()), output.detach(), gradient


def _loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x)[:, 0] - y).double().square().mean())
