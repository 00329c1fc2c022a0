"""
Which step size, and chosen on which data?
==========================================

One learning rate is tuned twice: with plenty of clean data, and with few samples whose labels are noisy. Then momentum and weight
decay join it, and the gradient of the whole training is looked at.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from torch import nn

import theodolite as th

digits = th.data.load("digits").scaled().flat()
x, y = digits.x_train, digits.y_train


def build(seed):
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


# %%
# Plenty of clean data
# --------------------
# Every rate starts from the same weights and sees the same batches. The loss on the data trained on and that on held-out data
# choose nearly the same rate.

options = {"steps": 100, "batch_size": 32, "loss": nn.CrossEntropyLoss(), "compare": False}
clean = th.tune_step_size(build, "sgd", (x[:900], y[:900]), (x[900:], y[900:]), **options)
print(clean)
_, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
th.plots.plot_step_size(clean, ax=axes)
plt.show()

# %%
# Few noisy samples
# -----------------
# A fifth of the labels is drawn anew. The loss on the data trained on asks for a rate that learns the wrong labels by heart.

y_noisy = th.data.generators.noisy_labels(y, 10, 0.2, seed=0)
few, held_out = (x[:150], y_noisy[:150]), (x[150:450], y_noisy[150:450])
noisy = th.tune_step_size(build, "sgd", few, held_out, **{**options, "steps": 400})
print(noisy)
_, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
th.plots.plot_step_size(noisy, ax=axes)
plt.show()

# %%
# Momentum too
# ------------
# Two hyperparameters are swept on a grid; beyond that the search follows the meta-gradient, where it can be believed.

both = th.tune_step_size(build, "sgd", (x[:900], y[:900]), (x[900:], y[900:]), hyper=["lr", "momentum"], seeds=1, **options)
print(both)
_, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
th.plots.plot_step_size(both, ax=axes)
plt.show()

# %%
# May the gradient be believed?
# -----------------------------
# At a small rate a change of the weights dies out, at a large one it grows, and the derivative of the training with it.

data = (x[:900], y[:900])
for lr in (0.1, 2.5):
    slope = th.meta_gradient(build, "sgd", data, lr=lr, steps=100, batch_size=32, loss=nn.CrossEntropyLoss())
    print(lr, slope.health, slope.horizon)
