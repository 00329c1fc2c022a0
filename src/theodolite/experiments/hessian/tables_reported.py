"""The numbers of 002 Tables 6, 7 and 8 (000 Tables C.5, C.6 and C.7), line by line."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """Layers counted, then mean, smallest and largest of (v₁·μ̂)² and of λ₁/λ₂."""

    layers: int
    dot: float
    dot_min: float
    dot_max: float
    ratio: float
    ratio_min: float
    ratio_max: float


#: Fully connected layers but the first. The source prints CIFAR10 VGG11-W64 twice; the second is marked here.
TABLE_6: dict[str, Line] = {
    "MNIST F-200^2": Line(2, 1.000, 1.000, 1.000, 12.29, 9.65, 16.16),
    "MNIST F-600^2": Line(2, 0.999, 0.999, 0.999, 12.00, 11.42, 13.00),
    "MNIST F-600^4": Line(4, 1.000, 0.999, 1.000, 17.81, 7.33, 28.00),
    "MNIST F-600^8": Line(8, 0.991, 0.965, 1.000, 6.63, 2.28, 11.15),
    "CIFAR10 F-600^2": Line(2, 0.999, 0.998, 1.000, 9.24, 4.74, 13.74),
    "CIFAR10 F-1500^3": Line(3, 0.999, 0.997, 1.000, 13.27, 6.10, 18.41),
    "CIFAR10 LeNet5": Line(3, 0.998, 0.997, 0.999, 7.21, 5.88, 9.02),
    "CIFAR10 LeNet5-(fc1-80)": Line(3, 0.998, 0.996, 0.999, 7.80, 6.77, 11.01),
    "CIFAR10 LeNet5-(fc1-100)": Line(3, 0.997, 0.995, 0.999, 7.42, 6.20, 9.10),
    "CIFAR10 LeNet5-(fc1-150)": Line(3, 0.998, 0.992, 0.999, 7.35, 5.34, 9.62),
    "CIFAR10 VGG11-W32": Line(1, 0.990, 0.988, 0.993, 6.02, 5.57, 6.51),
    "CIFAR10 VGG11-W64": Line(1, 0.996, 0.993, 0.999, 5.87, 5.32, 6.26),
    "CIFAR10 VGG11-W64 (second)": Line(1, 0.995, 0.993, 0.996, 6.24, 5.97, 6.70),
    "CIFAR100 VGG11-W48": Line(1, 0.999, 0.999, 0.999, 17.861, 15.456, 20.491),
    "CIFAR100 VGG11-W64": Line(1, 0.999, 0.999, 1.000, 19.185, 18.358, 20.410),
    "CIFAR100 VGG11-W80": Line(1, 0.999, 0.999, 1.000, 19.455, 18.120, 21.450),
    "CIFAR100 ResNet18-W48": Line(1, 1.000, 1.000, 1.000, 28.23, 27.37, 29.27),
    "CIFAR100 ResNet18-W64": Line(1, 1.000, 1.000, 1.000, 27.07, 25.72, 29.50),
    "CIFAR100 ResNet18-W80": Line(1, 1.000, 1.000, 1.000, 28.23, 25.98, 30.03),
}

#: Convolutions but the first.
TABLE_7: dict[str, Line] = {
    "CIFAR10 LeNet5": Line(1, 0.999, 0.998, 0.999, 15.87, 11.15, 27.20),
    "CIFAR10 LeNet5-(fc1-80)": Line(1, 0.998, 0.998, 0.999, 12.36, 9.53, 13.36),
    "CIFAR10 LeNet5-(fc1-100)": Line(1, 0.999, 0.999, 0.999, 19.49, 16.69, 21.92),
    "CIFAR10 LeNet5-(fc1-150)": Line(1, 0.999, 0.998, 0.999, 12.86, 7.65, 16.34),
    "CIFAR10 VGG11-W32": Line(7, 0.995, 0.991, 0.999, 5.31, 2.39, 9.09),
    "CIFAR10 VGG11-W64": Line(7, 0.997, 0.993, 1.000, 5.76, 2.50, 9.98),
    "CIFAR10 VGG11-W64 (second)": Line(7, 0.998, 0.995, 1.000, 5.81, 2.53, 10.62),
    "CIFAR100 VGG11-W48": Line(7, 0.996, 0.991, 0.999, 5.72, 2.46, 9.90),
    "CIFAR100 VGG11-W64": Line(7, 0.995, 0.991, 0.999, 5.66, 2.50, 10.79),
    "CIFAR100 VGG11-W80": Line(7, 0.994, 0.988, 0.998, 5.18, 2.50, 8.45),
    "CIFAR100 ResNet18-W48": Line(19, 0.981, 0.917, 0.998, 3.79, 1.89, 7.56),
    "CIFAR100 ResNet18-W64": Line(19, 0.985, 0.910, 0.998, 3.96, 1.81, 7.53),
    "CIFAR100 ResNet18-W80": Line(19, 0.987, 0.954, 0.997, 4.16, 2.11, 7.04),
}

#: Fully connected layers but the first, of networks with batch norm.
TABLE_8: dict[str, Line] = {
    "MNIST F-200^2-BN": Line(2, 0.062, 0.001, 0.260, 1.16, 1.04, 1.30),
    "MNIST F-600^2-BN": Line(2, 0.026, 0.000, 0.063, 1.13, 1.02, 1.26),
    "MNIST F-600^4-BN": Line(4, 0.027, 0.000, 0.146, 1.11, 1.03, 1.19),
    "CIFAR10 LeNet5-BN": Line(3, 0.210, 0.001, 0.803, 1.54, 1.20, 1.89),
}
