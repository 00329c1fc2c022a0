"""
How much does one example matter?
=================================

Pairs of models are trained on sets that differ in a single example, with the same start and the same order. For logistic
regression the models end the nearer to each other the more examples there are. For a small network they do not, though its
generalisation gap falls all the same. Both are trained on the digits.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from torch import nn

import theodolite as th

digits = th.data.load("digits").scaled().flat()
train, test = (digits.x_train, digits.y_train), (digits.x_test, digits.y_test)

# %%
# A linear model
# --------------
# Ten pairs at each of four sizes, 600 updates of plain SGD. Everything is a function of its seeds.


def line(seed: int) -> nn.Module:
    return nn.Linear(64, 10)


SIZES = [150, 300, 600, 1200]
convex = th.stability(line, "sgd", train, test, sizes=SIZES, pairs=10, steps=600, loss=nn.CrossEntropyLoss(), rate=0.1)
print(convex)

# %%
# A network
# ---------
# The same with two hidden layers and momentum: now the loss is not convex. Two pairs of the smallest and of the largest size are
# joined by a straight line.


def network(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))


deep = th.stability(
    network, "sgd", train, test, sizes=SIZES, pairs=10, steps=600, loss=nn.CrossEntropyLoss(), rate=0.1, momentum=0.9, paths=2
)
print(deep)

# %%
# The laws
# --------
# Dots are pairs, diamonds the largest of each size, lines the fitted power laws with the interval of their exponents.

rows = [{**row, "model": name} for name, found in (("linear", convex), ("network", deep)) for row in found.rows()]
th.plots.stability_panels(rows, ["gap_loss", "stab", "dist"], by="model", figure=plt.figure(layout="constrained"))
plt.show()

# %%
# One basin
# ---------
# The two networks of a pair may be far apart on single examples and still lie in one basin: between them accuracy does not fall.

profile = [{**row, "pair": name} for name, path in deep.paths.items() for row in path.rows()]
th.plots.linear_path(profile, "accuracy", ends=("S", "S'"))
plt.show()
print(f"{sum(path.connected for path in deep.paths.values())} of {len(deep.paths)} pairs lie in one basin")
