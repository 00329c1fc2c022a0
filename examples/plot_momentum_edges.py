"""
Where the edge is for other optimizers
======================================

The largest stable learning rate depends on the optimizer: 2/λ for gradient descent, 2(1+β)/λ for heavy-ball momentum,
2(1+β)/((1+2β)λ) for Nesterov's. For Adam the Hessian is seen through its second moment, held as it stands. Each formula
is tried here by real runs just below and just above the edge.
"""

from __future__ import annotations

import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# A problem with an exact edge
# ----------------------------
# A linear model with a squared loss: the loss is quadratic, so the edge is sharp. Two hundred samples of ten features of
# different size.

torch.manual_seed(0)
x = torch.randn(200, 10, dtype=torch.float64) * torch.linspace(0.3, 2.0, 10, dtype=torch.float64)
y = x @ torch.randn(10, 1, dtype=torch.float64)
model = nn.Linear(10, 1, bias=False).double()
loss = nn.MSELoss()
problem = th.Problem(model, loss, (x, y))

# %%
# The critical rates
# ------------------
# The optimizer is handed over as it stands: its momentum, its weight decay and, for Adam, its second moment count. Adam
# therefore takes a few steps first.

makers = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "heavy ball, β = 0.9": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Nesterov, β = 0.9": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
}
rates = {name: th.critical_learning_rate(problem, optimizer=make(model.parameters(), 0.01)) for name, make in makers.items()}

warm = copy.deepcopy(model)
adam = torch.optim.Adam(warm.parameters(), lr=0.01)
th.train(warm, loss, (x, y), adam, steps=20)
rates["Adam after 20 steps"] = th.critical_learning_rate(th.Problem(warm, loss, (x, y)), optimizer=adam)
for name, rate in rates.items():
    print(f"{name}: {rate}")

# %%
# Tried
# -----
# A hundred and fifty steps at 0.97 and at 1.03 times the critical rate. Below it the loss falls, above it grows without
# end. (Live Adam adapts its second moment and tolerates more than the frozen edge, so it has no such test here.)

rows = []
for name, make in makers.items():
    for ratio in (0.97, 1.03):
        network = copy.deepcopy(model)
        run = th.train(network, loss, (x, y), make(network.parameters(), ratio * rates[name].value), steps=150)
        rows += [{**row, "optimizer": name, "ratio": f"{ratio:g}"} for row in run.rows()]

# %%
# The picture
# -----------

with th.plots.style():
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained", width_ratios=(1, 1.3))
    left.barh(list(rates), [rate.value for rate in rates.values()], color=th.plots.PALETTE[: len(rates)])
    left.invert_yaxis()
    left.bar_label(left.containers[0], fmt="%.3g", padding=3)
    left.set(title="Critical learning rates", xlabel="learning rate")
    left.margins(x=0.15)
    left.grid(axis="y", visible=False)
    for name, colour in zip(makers, th.plots.PALETTE):
        for ratio, line in (("1.03", "-"), ("0.97", "--")):
            run = [row for row in rows if row["optimizer"] == name and row["ratio"] == ratio]
            right.semilogy([row["step"] for row in run], [row["loss"] for row in run], line, color=colour)
    right.set(title="1.03 (solid) and 0.97 (dashed) times the critical rate", xlabel="step", ylabel="loss")
    right.set_ylim(1e-12, 1e15)
plt.show()
