"""Figures C.18, C.20 and C.21: SGD with small batches in torch's own parameterisation, and on further tasks."""

from __future__ import annotations

from dataclasses import replace

from theodolite.experiments.catapult_features.feature_sgd import BatchSizes, Panel, Params, ValidationCurves
from theodolite.experiments.catapult_features.feature_sgd_figures import FOUR, best_falls, trends
from theodolite.experiments.catapult_features.feature_tasks import Setting

SCALED = {
    "tiny": replace(FOUR["tiny"], init="torch"),
    "laptop": replace(
        FOUR["laptop"],
        panels=(Panel(Setting("rank-2", 500, 2000, 50, 512), (5, 20, 500), 10_000), *FOUR["laptop"].panels[1:]),
        init="torch",
    ),
    "paper": replace(FOUR["paper"], init="torch"),
}
_TORCH = (
    f"{BatchSizes.departs} Networks have torch's biases here. The source's rates (0.01, 0.01, 0.05, 1) are replaced by half "
    "the measured critical rate."
)


class FigureC18(BatchSizes):
    """SGD in torch's own parameterisation: smaller batches, more catapults, better features."""

    id = "catapult-features/figure-C.18"
    source = "003, appendix C.5, Figure C.18"
    item = "zhu-2024 Figure C.18"
    sizes = SCALED
    claims = tuple(claim for panel in ("rank-2", "rank-3", "SVHN-2", "CelebA") for claim in trends(panel, "Figure C.18"))
    departs = _TORCH


class FigureC20(ValidationCurves):
    """SGD in torch's own parameterisation: validation loss during training; the runs of Figure C.18."""

    id = "catapult-features/figure-C.20"
    source = "003, appendix C.5, Figure C.20"
    item = "zhu-2024 Figure C.20"
    sizes = SCALED
    claims = tuple(best_falls(panel, "Figure C.20") for panel in ("rank-2", "rank-3", "SVHN-2", "CelebA"))
    departs = _TORCH


class FigureC21(BatchSizes):
    """SGD on further tasks: rank-4, USPS and Fashion-MNIST, the last two with a tenth of the training labels flipped."""

    id = "catapult-features/figure-C.21"
    source = "003, appendix C.5, Figure C.21"
    item = "zhu-2024 Figure C.21"
    sizes = {
        "tiny": Params(
            (
                Panel(Setting("rank-4", 150, 500, 20, 64), (5, 20, 150), 400),
                Panel(Setting("usps", 60, 100, 8, 64, "stand-in", 0.1), (5, 60), 300),
                Panel(Setting("fashion", 60, 100, 6, 64, "stand-in", 0.1), (5, 60), 300),
            )
        ),
        "laptop": Params(
            (
                Panel(Setting("rank-4", 500, 2000, 50, 256), (5, 20, 500), 4000),
                Panel(Setting("usps", 100, 100, 8, 256, "either", 0.1), (5, 20, 100), 3000),
                Panel(Setting("fashion", 500, 2000, 14, 256, "either", 0.1), (5, 20, 500), 3000),
            )
        ),
        "paper": Params(
            (
                Panel(Setting("rank-4", 2000, 5000, 100, 256), (5, 10, 50, 100, 2000)),
                Panel(Setting("usps", 100, 100, 8, 256, "either", 0.1), (5, 10, 50, 100)),
                Panel(Setting("fashion", 2000, 5000, 28, 256, "files", 0.1), (5, 10, 50, 100, 2000)),
            )
        ),
    }
    claims = tuple(claim for panel in ("rank-4", "USPS", "Fashion-MNIST") for claim in trends(panel, "Figure C.21"))
    departs = f"{BatchSizes.departs} The rate is half the critical one; classes 0 and 2 are taken of Fashion-MNIST."
