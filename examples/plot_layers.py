"""
Which layer is sharp, and when
==============================

The curvature grows and moves through a network while it trains. The exact block of every layer is measured every ten
steps, and each measurement starts from the eigenvectors of the last one.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# A network of four layers
# ------------------------

digits = th.data.load("digits").scaled().flat()
x, y = digits.x_train[:500], digits.y_train[:500]
loss = nn.CrossEntropyLoss()
model = th.models.build("F-32^3", inputs=64, seed=0)
descent = torch.optim.SGD(model.parameters(), lr=0.05)
for name, layer in th.Problem(model, loss, (x, y)).layers.items():
    print(f"{name}: {layer.kind}")

# %%
# Training, with a look every ten steps
# -------------------------------------
# :func:`theodolite.top_eigenpairs` takes the mapping of all blocks at once and solves them in lockstep; ``start`` is the
# result of the last look. To see what that saves, each look is also made from a random start.

rows, warm, cold = [], 0, 0
pairs = None
for step in range(0, 301, 10):
    problem = th.Problem(model, loss, (x, y))
    pairs = th.top_eigenpairs(th.layer_hessians(problem), k=3, start=pairs)
    afresh = th.top_eigenpairs(th.layer_hessians(problem), k=3)
    rows += [{"step": step, "layer": name, "sharpness": float(found.values[0])} for name, found in pairs.items()]
    warm += max(found.matvecs for found in pairs.values())
    cold += max(found.matvecs for found in afresh.values())
    if step < 300:
        th.train(model, loss, (x, y), descent, steps=10)
print(f"rounds of products: {warm} with warm starts, {cold} from random ones")

# %%
# The picture
# -----------

with th.plots.style():
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
th.plots.curves(
    rows,
    "step",
    "sharpness",
    by="layer",
    ylabel="largest eigenvalue of the layer's block",
    title="Sharpness of each layer along training",
    markers=False,
    ax=axes,
)
plt.show()
