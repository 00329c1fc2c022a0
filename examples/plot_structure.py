"""
Two small factors behind a layer's sharp directions
===================================================

The Hessian block of a linear layer is the mean of M ⊗ xxᵀ over the samples: what the loss feels at the layer's output, times
what comes in. If the two means can be taken apart, two small matrices explain every sharp direction of the layer. Here is
how far they do, along a training run and between two runs.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# Two runs that differ in their seed
# ----------------------------------

digits = th.data.load("digits").scaled().flat()
data = digits.x_train[:300].double(), digits.y_train[:300]
loss = nn.CrossEntropyLoss()


def trained(seed: int) -> nn.Module:
    model = th.models.build("F-20^2", inputs=64, seed=seed).double()
    th.train(model, loss, data, torch.optim.SGD(model.parameters(), lr=0.1), epochs=20, batch_size=30, seed=seed)
    return model


problems = {name: th.Problem(trained(seed), loss, data) for seed, name in enumerate(("first", "second"))}

# %%
# What they share
# ---------------
# :func:`theodolite.compare` measures the exact eigenvectors of every layer's block in both models, and predicts their
# overlap from the factors alone. Each layer prints as a sentence.

comparison = th.compare(problems, k=40)
print(comparison)
for name, layer in comparison.models["first"].items():
    print(f"{name}: decoupling error {layer.decoupling_error:.2f}, inputs along their mean {layer.squared_dot:.3f}")

# %%
# Along a run
# -----------
# :func:`theodolite.track_eigenpairs` follows the sharpest directions of every layer. Checkpoints are made on the way, and
# each look starts from the last one.

model = th.models.build("F-20^2", inputs=64, seed=0).double()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
steps = range(0, 200, 20)


def run():
    for _ in steps:
        yield model
        th.train(model, loss, data, sgd, steps=20)


track = th.measures.hessian.track_eigenpairs(th.Problem(model, loss, data), run(), k=5, labels=steps, layers="*")
print(track)

# %%
# The pictures
# ------------
# Left: eigenvectors of a block against those of its output Hessian, a diagonal where the factors hold. Middle: overlap of
# the two models in that layer. Right: how much of the first sharp subspace of each layer is left.

with th.plots.style():
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.5, 4.0), layout="constrained")
corner = comparison.models["first"]["fc2"].correspondence().outputs[:9, :9]
th.plots.matrix(
    corner,
    limits=(0.0, 1.0),
    center=None,
    number=".1f",
    row_names=range(1, 10),
    column_names=range(1, 10),
    xlabel="eigenvector of the block",
    ylabel="eigenvector of E[M]",
    title="fc2 of the first model",
    ax=left,
)
pair = next(pair for pair in comparison.pairs if pair.layer == "fc2")
th.plots.curves(
    pair.rows(),
    "dimension",
    "overlap",
    by="curve",
    xlabel="sharpest directions taken",
    title="fc2 of both models",
    markers=False,
    ax=middle,
)
th.plots.curves(
    [row for row in track.rows() if row["index"] == 0],
    "label",
    "overlap_first",
    by="layer",
    xlabel="step",
    ylabel="overlap with the first subspace",
    title="5 sharpest directions along training",
    ax=right,
)
plt.show()
