"""Best test loss with smooth activations: the picture of ReLU networks again."""

from __future__ import annotations

from dataclasses import replace

from theodolite.experiments.catapult.sweeping import LAPTOP, PAPER, TINY, Panel, Sweep, claims

#: No closed form is known here: the twins cost more than those of ReLU networks.
SIZES = {
    "tiny": replace(TINY, ratios=(0.4, 0.8, 1.2, 1.5)),
    "laptop": replace(LAPTOP, n_test=500, steps=200),
    "paper": PAPER,
}


def _both(data: str, architecture: str = "fc") -> tuple[Panel, ...]:
    return Panel(data, architecture, activation="swish"), Panel(data, architecture, activation="tanh")


class FigureB10(Sweep):
    """Best test loss with Swish and Tanh: two-layer fully connected networks on AG NEWS."""

    id = "catapult/figure-B.10"
    source = "003, appendix B.14, Figure B.10"
    item = "zhu-2024 Figure B.10"
    panels = _both("ag_news")
    claims = claims("003, Figure B.10", also_at=1.2)
    sizes = SIZES


class FigureB11(Sweep):
    """Best test loss with Swish and Tanh: two-layer fully connected networks on FSDD."""

    id = "catapult/figure-B.11"
    source = "003, appendix B.14, Figure B.11"
    item = "zhu-2024 Figure B.11"
    panels = _both("fsdd")
    claims = claims("003, Figure B.11", also_at=1.2)
    sizes = SIZES


class FigureB12(Sweep):
    """Best test loss with Swish and Tanh: two-layer convolutional networks on CIFAR-2."""

    id = "catapult/figure-B.12"
    source = "003, appendix B.14, Figure B.12"
    item = "zhu-2024 Figure B.12"
    panels = _both("cifar10", "cnn")
    claims = claims("003, Figure B.12", also_at=1.2)
    sizes = SIZES


class FigureB13(Sweep):
    """Best test loss with Swish and Tanh: two-layer convolutional networks on SVHN-2."""

    id = "catapult/figure-B.13"
    source = "003, appendix B.14, Figure B.13"
    item = "zhu-2024 Figure B.13"
    panels = _both("svhn", "cnn")
    claims = claims("003, Figure B.13", also_at=1.2)
    sizes = SIZES
