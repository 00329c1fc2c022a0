"""
How large should a batch be?
============================

The gradients of single samples scatter about their mean. Their variance over the squared length of the mean is the noise
scale, in samples: smaller batches mostly average noise, much larger ones repeat what is known (McCandlish and others,
2018). In this run it grows from dozens of samples to more than a thousand, as the gradient shrinks and the samples come
to disagree.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# A network, measured on its way
# ------------------------------
# Gradient descent on all of digits, so that the path itself is smooth.

digits = th.data.load("digits").scaled().flat()
data = digits.x_train, digits.y_train
loss = nn.CrossEntropyLoss()
model = th.models.build("F-48^2", inputs=64, seed=0)
descent = torch.optim.SGD(model.parameters(), lr=0.05)

rows = []
for step in range(0, 201, 20):
    noise = th.measures.dynamics.gradient_noise(th.Problem(model, loss, data), groups=32)
    rows.append(
        {
            "step": step,
            "norm": noise.norm,
            "norm error": noise.norm_error,
            "scale": noise.noise_scale,
            "scale error": noise.noise_scale_error,
        }
    )
    th.train(model, loss, data, descent, steps=20)
print(f"after {step} steps: {noise}")

# %%
# Training goes on, and in the end the whole set cannot tell the gradient from zero: the noise scale is then infinite, and
# the result says so.

th.train(model, loss, data, descent, steps=280)
print(f"after 500 steps: {th.measures.dynamics.gradient_noise(th.Problem(model, loss, data), groups=32)}")

# %%
# The picture
# -----------
# Bands are one standard error, by the jackknife over the groups.

with th.plots.style():
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
th.plots.curves(rows, "step", "norm", error="norm error", title="Norm of the gradient", ylabel="‖g‖", ax=left)
left.set_ylim(bottom=0)
th.plots.curves(rows, "step", "scale", error="scale error", log="y", title="Noise scale, tr Σ / ‖g‖²", ylabel="samples", ax=right)
th.plots.reference(right, y=64, label="a batch of 64")
plt.show()
