"""
Why did the loss spike?
=======================

A small transformer learns to add with AdamW, at a learning rate that is a little too bold. One batch is spoilt on the way. The
loss curve shows a few spikes that look alike; a monitor in the loop says which of them were catapults and which one was not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import theodolite as th

# %%
# A training run as anyone would write it
# ---------------------------------------
# Sums in words, a GPT of two layers, AdamW. Batch 360 has its targets shuffled.

text = " ".join(f"{a} plus {b} is {a + b}." for a in range(10) for b in range(10))
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
draws = torch.Generator().manual_seed(0)


def batch(step: int) -> tuple[Tensor, Tensor]:
    places = torch.randint(0, len(ids) - 33, (16, 1), generator=draws)
    windows = ids[places + torch.arange(33)]
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return inputs, targets[:, torch.randperm(32, generator=draws)] if step == 360 else targets


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


model = th.models.gpt(vocabulary=len(letters), context=32, dim=32, depth=2, heads=2, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, betas=(0.9, 0.99), weight_decay=0.1)

# %%
# The monitor
# -----------
# Two lines are added to the loop. Losses are recorded, the curvature is measured where it matters most (here for half of
# the training time, a quarter by default), and not a bit of the training is changed. The log is what ``theodolite watch`` shows.

log = Path(tempfile.mkdtemp())
with th.Monitor(loss, log=log, budget=0.5) as monitor:
    for step in range(420):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        monitor.observe(step, model, (inputs, targets), optimizer)
        optimizer.step()

report = monitor.report()
print(report)

# %%
# What it saw
# -----------
# Spikes are marked by their cause. Catapults come where the learning rate passes the critical one of the batch, in the metric of
# AdamW's preconditioner, and leave the sharpness lower than it was.

th.plots.plot_monitor(report, title="AdamW on a small transformer", figure=plt.figure(layout="constrained"))
plt.show()

# %%
# The same in numbers, one row per spike.

for row in report.rows():
    print(f"step {row['start']}: {row['cause']}, {row['height']:.2f} times the loss before")
