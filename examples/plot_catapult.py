"""
A network and its linear and quadratic twins
============================================

Below the critical learning rate a wide network trains like its linear twin, the first Taylor model at its initial weights.
Above it the linear twin diverges. The network does not, and neither does its quadratic twin: the loss rises, the tangent
kernel shrinks, and training settles. So the quadratic term is what makes a catapult (Zhu and others, 2022).
"""

from __future__ import annotations

import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# Three models with the same weights
# ----------------------------------
# An odd-or-even question about 48 digits, a squared loss, and 256 ReLU units in the parameterisation of the neural tangent
# kernel. Twins are modules; they start at the network's weights.

digits = th.data.load("digits").scaled().flat()
x = (digits.x_train[:48] - digits.x_train[:48].mean(0)).double()
y = (digits.y_train[:48, None] % 2).double() * 2 - 1
model = th.models.ntk_fcn(64, width=256, depth=2, seed=1).double()
loss = nn.MSELoss()
problem = th.Problem(model, loss, (x, y))

critical = th.critical_learning_rate(problem, by="kernel")
print(critical)
print(f"by the Hessian: {th.critical_learning_rate(problem).value:.4g}")

makers = {"network": copy.deepcopy, "linear twin": th.linearize, "quadratic twin": th.quadratize}


def trained(kind: str, ratio: float) -> list[dict[str, float | str]]:
    """The losses of one run, as rows."""
    network = makers[kind](model)
    sgd = torch.optim.SGD(network.parameters(), lr=ratio * critical.value)
    run = th.train(network, loss, (x, y), sgd, steps=60)
    word = th.classify_run(run, quadratic=kind == "quadratic twin")
    print(f"{ratio:g} × critical, {kind}: {word}, highest loss {max(run.loss):.3g}, last {run.loss[-1]:.3g}")
    return [{"step": step, "loss": value, "model": kind} for step, value in enumerate(run.loss)]


# %%
# Two rates
# ---------
# At 0.8 times the critical rate the three curves run close together. At 1.5 times it the linear twin leaves the picture.

rows = {ratio: [row for kind in makers for row in trained(kind, ratio)] for ratio in (0.8, 1.5)}

with th.plots.style():
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for ax, (ratio, found) in zip(panels, rows.items(), strict=True):
    th.plots.curves(
        found, "step", "loss", by="model", log="y", title=f"{ratio:g} × critical", labels="legend", markers=False, ax=ax
    )
panels[0].set_ylim(1e-4, 1e4)
plt.show()
