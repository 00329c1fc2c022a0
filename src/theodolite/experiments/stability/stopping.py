"""Three stopping rules: a number of updates, of epochs, or a training loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.stability.configurations import Setting
from theodolite.experiments.stability.laws import Measure, chosen, delta, reading
from theodolite.experiments.stability.pair_figures import DEEP_STUDY, DEPARTS, Cell, grid
from theodolite.experiments.stability.trained_pairs import measured, stopped
from theodolite.measures.stability.config import STOPPING
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "004, appendix A.1, on stopping criteria"
#: In words.
RULES = {"updates": "after T updates", "epochs": "after a number of epochs", "train_loss": "at a training loss"}


@dataclass(frozen=True)
class Params:
    """Configuration 1a at the sizes of Figure 2.2, `shown` of its pairs."""

    setting: Setting
    sizes: tuple[int, ...]
    pairs: int
    shown: int
    epochs: int
    loss_target: float


def _params(size: str, epochs: int, loss_target: float) -> Params:
    study = DEEP_STUDY[size]
    return Params(study.settings[0], study.sizes, study.pairs, study.further, epochs, loss_target)


def harder(rule: str) -> Measure:
    """Δb under a rule less Δb after a number of updates."""
    return lambda rows: reading(rows, rule=rule).delta_b - reading(rows, rule="updates").delta_b


def longer(rule: str) -> Measure:
    """Updates at the largest size over those at the smallest, means over the pairs."""

    def measure(rows: list[Row]) -> float:
        table = chosen(rows, rule=rule)
        sizes = sorted({row["m"] for row in table})
        ends = [[row["steps_taken"] for row in table if row["m"] == m] for m in (sizes[0], sizes[-1])]
        return fmean(ends[1]) / fmean(ends[0])

    return measure


def _claims(rule: str) -> tuple[Claim, ...]:
    return (
        Claim(
            f"{RULES[rule]}: larger sets take more updates (largest over smallest m)",
            longer(rule),
            rule="at least",
            expected=1.0,
            reported=Reported("larger sets take more steps", WHERE),
        ),
        Claim(
            f"{RULES[rule]}: stability explains less than with a fixed number of updates (difference of Δb)",
            harder(rule),
            rule="at least",
            expected=0.0,
            reported=Reported("easier to fail", WHERE),
            since="laptop",
        ),
    )


class StoppingRules(Experiment):
    """Stopping by updates, epochs or training loss: which rule favours stability.

    The source holds that a fixed number of updates gives stability its best chance. A line of panels for each rule.
    """

    id = "stability/stopping"
    source = "004, appendix A.1, line 1354"
    sizes = {
        "tiny": _params("tiny", epochs=10, loss_target=0.5),
        "laptop": _params("laptop", epochs=48, loss_target=0.1),
        "paper": _params("paper", epochs=100, loss_target=0.01),
    }
    departs = (
        f"{DEPARTS} The source gives neither epochs nor losses; runs stopped by their loss end after 5T updates at the latest."
    )
    claims = (
        Claim(
            "after T updates: stability falls more slowly than the gap (Δb)",
            delta(rule="updates"),
            rule="at least",
            expected=0.05,
            reported=Reported(0.09, "004, section 2.3.2"),
        ),
        *_claims("epochs"),
        *_claims("train_loss"),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for rule, m in product(STOPPING, p.sizes):
            yield {
                "setting": asdict(p.setting),
                "m": m,
                "rule": rule,
                "pairs": p.pairs,
                "shown": p.shown,
                "epochs": p.epochs,
                "loss_target": p.loss_target,
                "seed": 0,
            }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting.of(job["setting"])
        if job["rule"] == "updates":
            rows = [row for row in measured(setting, 0, job["m"], job["pairs"]) if row["step"] == setting.steps]
        else:
            rows = list(stopped(setting, job["m"], job["shown"], job["rule"], job["epochs"], job["loss_target"]))
        yield from ({**row, "rule": job["rule"]} for row in rows if row["pair"] < job["shown"])

    def draw(self, rows: list[Row]) -> Figure:
        def line(rule: str) -> list[Cell]:
            mine = chosen(rows, rule=rule)
            title = f"by {rule.replace('_', ' ')} ({mine[0]['data']})"
            return [Cell(mine, quantity, title) for quantity in ("gap_loss", "stab")]

        return grid([line(rule) for rule in STOPPING])
