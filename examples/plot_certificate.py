"""
How often will it be wrong on new data?
=======================================

A certificate bounds the error rate on new data with stated confidence. Three priors are compared on the digits: the weights
before training, held-out samples, and a network that is trained on half of the data.
"""

from __future__ import annotations

import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

digits = th.data.load("digits").scaled().flat()
train, test = (digits.x_train, digits.y_train), (digits.x_test, digits.y_test)

# %%
# Train, and keep the start
# -------------------------
# The weights before training had no part in the data, so a prior around them may be certified on the training data itself.

model = th.models.build("F-32", inputs=64, seed=0)
start = copy.deepcopy(model.state_dict())
sgd = torch.optim.SGD(model.parameters(), lr=0.5)
th.train(model, nn.CrossEntropyLoss(), train, sgd, steps=400, batch_size=64)
problem = th.Problem(model, nn.CrossEntropyLoss(), train)

# %%
# From the training data alone
# ----------------------------
# The network has more weights than there are samples, and is certified all the same: with noise in its weights, of which most
# directions take a lot. The test samples only bound the network without noise, by counting.

found = th.pac_bayes_bound(problem, start=start, epochs=60, batch_size=200, test=problem.on(test))
print(found)
_, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
th.plots.plot_certificate(found, ax=axes)
plt.show()

# %%
# The fit follows the bound itself.

_, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
th.plots.plot_bound_fit(found.trace, bound=found.value, ax=axes)
plt.show()

# %%
# Where the weights may vary
# --------------------------
# Coordinates are those of each layer's Kronecker factors. Where curvature is small the posterior keeps the width of the prior,
# which costs nothing; along the sharp directions it is narrow.

_, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
th.plots.plot_posterior(found.posterior, ax=axes)
plt.show()

# %%
# Two other priors
# ----------------
# Around the trained weights, on samples that were held out; and around weights that are trained here on one half of the data.

held_out = th.pac_bayes_bound(problem.on(test), prior="held-out", trained_on=problem)
split = th.pac_bayes_bound(problem, prior="split")
for name, one in (("start", found), ("held-out", held_out), ("split", split)):
    print(f"{name}: at most {100 * one.value:.1f} % with noise in the weights, {one.kl:.0f} nats on {one.n} samples")
