"""
Where do new layers go?
=======================

A small GPT with two layers gets a third one. Every place and start is tried for a few steps on the same batches; the loss right
after growing, which people go by, is compared with the loss a little later.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

# %%
# A model that has been trained
# -----------------------------
# It reads ten tokens and repeats them, which takes two layers to begin with.

torch.manual_seed(0)
tokens = torch.randint(12, (1200, 10)).repeat(1, 2)
train, valid = ((rows[:, :-1], rows[:, 1:]) for rows in (tokens[:1000], tokens[1000:]))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = th.models.gpt(vocabulary=12, context=20, dim=32, depth=2, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
th.train(model, loss, train, optimizer, steps=150, batch_size=32)

# %%
# What each layer does
# --------------------
# Left out, or called twice in a row. This is no forecast of growing.

ablation = th.measures.growth.ablate_layers(th.Problem(model, loss, valid))
print(ablation)
_, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
th.plots.plot_layer_ablation(ablation, ax=axes)
plt.show()

# %%
# A short trial
# -------------
# All candidates see the same batches in the same order. The small model, trained on for as many steps as their FLOPs buy, is the
# dashed line.

choice = th.landscape_aware_growth(
    model, loss, train, optimizer, layers=3, lag=60, every=5, batch_size=32, first=150, validation=valid, prune=False
)
print(choice)
_, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
th.plots.plot_growth_choice(choice, ax=axes)
plt.show()

# %%
# What was chosen
# ---------------
# The winner goes on from where its trial ended.

for operator in choice.ranking:
    print(operator)
print(choice.paid, choice.gaining)
