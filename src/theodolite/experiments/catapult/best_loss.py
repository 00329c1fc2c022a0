"""Best test loss of networks and their Taylor models against the learning rate."""

from __future__ import annotations

from theodolite.experiments.catapult.sweeping import Panel, Sweep, claims

#: The six settings of Figure 3.4, which Figures B.5 to B.7 show again by accuracy.
MNIST = Panel("mnist")
AG_NEWS = Panel("ag_news")
CIFAR_SGD = Panel("cifar10", batch_size=32)
SVHN_CNN = Panel("svhn", "cnn")
FSDD = Panel("fsdd")
CIFAR_CNN = Panel("cifar10", "cnn")


class Figure32(Sweep):
    """Best test loss of a two-layer network and its Taylor models against the learning rate.

    f and f_quad converge above the critical rate, after a catapult, and reach a smaller test loss than below it; f_lin
    diverges there. Below it the three are nearly the same. Part (a) of the source's figure is a sketch of the path of the
    weights and is not drawn.
    """

    id = "catapult/figure-3.2"
    source = "003, section 3.1, Figure 3.2(b), and appendix B.14"
    item = "zhu-2024 Figure 3.2"
    panels = (Panel("cifar10"),)
    claims = claims("003, Figure 3.2")
    departs = f"The data set of Figure 3.2(b) is not named; ours is CIFAR-2. {Sweep.departs}"


class Figure34(Sweep):
    """Best test loss of f, f_lin and f_quad against the learning rate, six settings.

    Two-layer networks, fully connected and convolutional, on images, texts and spoken digits, by gradient descent and by
    mini-batches of 32. With mini-batches the critical rate is still that of all points.
    """

    id = "catapult/figure-3.4"
    source = "003, section 3.4, Figure 3.4, and appendix B.14"
    item = "zhu-2024 Figure 3.4"
    panels = (MNIST, AG_NEWS, CIFAR_SGD, SVHN_CNN, FSDD, CIFAR_CNN)
    claims = claims("003, Figure 3.4")
