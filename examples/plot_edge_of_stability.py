"""
Below the edge, above it, and far above
=======================================

Gradient descent on a quadratic loss diverges above the learning rate 2/λ, λ the largest eigenvalue of the Hessian. A wide
network does something else just above that edge: the loss shoots up, the curvature falls, and training settles in a
flatter place. This is a catapult (Lewkowycz and others, 2020). Far above the edge it diverges like the quadratic.
"""

from __future__ import annotations

import copy
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# A wide network
# --------------
# Two layers, ReLU, 1024 hidden units in the parameterisation of the neural tangent kernel, and a squared loss on an
# odd-or-even question about 64 digits.

digits = th.data.load("digits").scaled().flat()
x = digits.x_train[:64] - digits.x_train[:64].mean(0)
y = (digits.y_train[:64, None] % 2).float() * 2 - 1
model = th.models.ntk_fcn(64, width=1024, depth=2, seed=0)
loss = nn.MSELoss()

critical = th.critical_learning_rate(th.Problem(model, loss, (x, y)))
print(critical)

# %%
# Three runs
# ----------
# At half the critical rate, a little above it, and far above it. The sharpness is measured on the way.


def sharpness(network: nn.Module) -> float:
    if not all(bool(p.isfinite().all()) for p in network.parameters()):
        return math.nan
    return float(th.top_eigenpairs(th.hessian(th.Problem(network, loss, (x, y))), k=1).values[0])


rows = []
for ratio in (0.5, 1.5, 5.0):
    network = copy.deepcopy(model)
    steps = 40 if ratio < 4 else 8
    sgd = torch.optim.SGD(network.parameters(), lr=ratio * critical.value)
    run = th.train(network, loss, (x, y), sgd, steps=steps, measure={"sharpness": sharpness}, every=2)
    rows += [{**row, "rate": f"{ratio:g} × critical"} for row in run.rows()]
    print(f"{ratio:g} × critical: loss {run.loss[0]:.3g}, highest {max(run.loss):.3g}, last {run.loss[-1]:.3g}")

# %%
# :func:`theodolite.expected_regime` says the same in a word, from a run on a copy of the model.

for ratio in (0.5, 1.5, 5.0):
    print(th.measures.dynamics.expected_regime(th.Problem(model, loss, (x, y)), ratio * critical.value, critical=critical))

# %%
# The picture
# -----------
# The catapult ends where the curvature is low enough for its rate: below 2 over the rate, the dashed line on the right.
# The curvature of the run that diverges leaves the picture at once and is not shown.

shown = [row for row in rows if math.isfinite(row["loss"]) and row["loss"] < 1e6]
settled = [row for row in rows if row["sharpness"] is not None and not row["rate"].startswith("5")]
with th.plots.style():
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
th.plots.curves(shown, "step", "loss", by="rate", log="y", title="Loss", labels="legend", markers=False, ax=left)
left.set_ylim(1e-3, 1e3)
th.plots.curves(
    settled,
    "step",
    "sharpness",
    by="rate",
    title="Sharpness",
    ylabel="largest eigenvalue",
    labels="legend",
    ax=right,
)
right.set_ylim(bottom=0)
th.plots.reference(right, y=critical.sharpness / 1.5, label="2 / rate, at 1.5 × critical")
plt.show()
