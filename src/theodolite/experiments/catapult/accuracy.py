"""Best test accuracy of networks and their Taylor models against the learning rate."""

from __future__ import annotations

from dataclasses import replace

from theodolite.experiments.catapult.best_loss import AG_NEWS, CIFAR_CNN, CIFAR_SGD, FSDD, MNIST, SVHN_CNN
from theodolite.experiments.catapult.sweeping import LAPTOP, PAPER, TINY, Panel, Sweep, claims


class FigureB5(Sweep):
    """Best test accuracy against the learning rate: two-layer networks on MNIST and AG NEWS.

    The runs of the first two settings of Figure 3.4.
    """

    id = "catapult/figure-B.5"
    source = "003, appendix B.14, Figure B.5"
    item = "zhu-2024 Figure B.5"
    panels = (MNIST, AG_NEWS)
    column = "best_test_accuracy"
    claims = claims("003, Figure B.5", accuracy=True)


class FigureB6(Sweep):
    """Best test accuracy against the learning rate: SGD on CIFAR-2, and a convolutional network on SVHN-2.

    The runs of the third and fourth setting of Figure 3.4.
    """

    id = "catapult/figure-B.6"
    source = "003, appendix B.14, Figure B.6"
    item = "zhu-2024 Figure B.6"
    panels = (CIFAR_SGD, SVHN_CNN)
    column = "best_test_accuracy"
    claims = claims("003, Figure B.6", accuracy=True)


class FigureB7(Sweep):
    """Best test accuracy against the learning rate: FSDD, and a convolutional network on CIFAR-2.

    The runs of the last two settings of Figure 3.4.
    """

    id = "catapult/figure-B.7"
    source = "003, appendix B.14, Figure B.7"
    item = "zhu-2024 Figure B.7"
    panels = (FSDD, CIFAR_CNN)
    column = "best_test_accuracy"
    claims = claims("003, Figure B.7", accuracy=True)


#: Hundred training points; the width is not stated.
THREE_LAYERS = {
    "tiny": replace(TINY, width=64, ratios=(0.4, 0.8, 1.2, 1.5)),
    "laptop": replace(LAPTOP, width=128, n_test=500),
    "paper": replace(PAPER, width=512, n=100, n_test=500),
}


class FigureB8(Sweep):
    """Best test accuracy of three-layer networks against the learning rate: CIFAR-2 and SVHN-2.

    No closed form is known here: f_lin and f_quad are expansions by automatic differentiation.
    """

    id = "catapult/figure-B.8"
    source = "003, appendix B.14, Figure B.8"
    item = "zhu-2024 Figure B.8"
    panels = (Panel("cifar10", depth=3), Panel("svhn", depth=3))
    column = "best_test_accuracy"
    sizes = THREE_LAYERS
    claims = claims("003, Figure B.8", accuracy=True, also_at=1.2)
    departs = f"The width is not stated; ours is 512. {Sweep.departs}"


class FigureB9(Sweep):
    """Best test accuracy of three-layer networks against the learning rate: FSDD-2 and AG NEWS."""

    id = "catapult/figure-B.9"
    source = "003, appendix B.14, Figure B.9"
    item = "zhu-2024 Figure B.9"
    panels = (Panel("fsdd", depth=3), Panel("ag_news", depth=3))
    column = "best_test_accuracy"
    sizes = THREE_LAYERS
    claims = claims("003, Figure B.9", accuracy=True, also_at=1.2)
    departs = FigureB8.departs
