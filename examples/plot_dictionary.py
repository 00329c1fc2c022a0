"""
Filling in a broken picture
===========================

A picture is noisy and two fifths of its pixels are lost. Small patches of it are sums of a few atoms, and a dictionary of such
atoms can be learned from the broken picture itself: `MaskedDictionaryLearning` takes NaN as never seen. How many atoms should a
patch have, and does it pay to hide further pixels on purpose while learning? The error on hidden pixels answers without the true
picture, which is used here only to see how far the answer can be trusted.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image
from sklearn.feature_extraction.image import reconstruct_from_patches_2d

import theodolite as th

random = np.random.default_rng(0)
truth = load_sample_image("china.jpg").mean(2)[190:390:2, 0:240:2] / 255
noisy = truth + 0.05 * random.standard_normal(truth.shape)
broken = np.where(random.random(truth.shape) < 0.4, np.nan, noisy)

# %%
# Patches
# -------
# All patches of 8 × 8 pixels, each less the mean of the pixels that are there. 2000 of them teach, 1500 others judge.


def patches(picture: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(picture, (8, 8)).reshape(-1, 64)


brightness = np.nanmean(patches(broken), axis=1, keepdims=True)
signals = patches(broken) - brightness
order = random.permutation(len(signals))
train, judges = order[:2000], order[2000:3500]

# %%
# Two objectives, four sparsities
# -------------------------------
# 192 atoms are three times as many as a patch has pixels. The usual objective, reconstruction, is charged on the pixels that the
# code was read from; the masked one on pixels that were hidden from it. Three errors are noted: on hidden pixels, which needs no
# truth; on the lost pixels of single patches; and of the whole picture, where 64 patches are averaged in each pixel.

lost = np.isnan(signals[judges])
rows, pictures, dictionaries = [], {}, {}
for sparsity in (1, 2, 4, 8):
    for objective in ("masked", "reconstruction"):
        learner = th.MaskedDictionaryLearning(
            192, sparsity=sparsity, objective=objective, missing="mask", max_iter=20, learning_rate=3e-3, random_state=0
        ).fit(signals[train])
        whole = learner.reconstruct(signals) + brightness
        picture = reconstruct_from_patches_2d(whole.reshape(-1, 8, 8), truth.shape)
        hidden = learner.hidden_error(signals[judges])
        missed = (whole - patches(truth))[judges][lost]
        rows.append(
            {
                "sparsity": sparsity,
                "objective": objective,
                "hidden": hidden.value,
                "stderr": hidden.stderr,
                "lost": np.mean(missed**2),
                "picture": np.mean((picture - truth) ** 2),
            }
        )
        pictures[sparsity, objective], dictionaries[sparsity, objective] = picture, learner.components_
for row in rows:
    print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items()))

# %%
# What the hidden error knows
# ---------------------------
# It ranks the dictionaries as the lost pixels of single patches do: few atoms are best, and with more of them than that the
# masked objective loses less. It does not know of the averaging, which forgives each patch its noise: in the whole picture more
# atoms are better, and masking does not help.

figure, axes = th.plots.panels(3, figure=plt.figure(layout="constrained"))
titles = ("hidden pixels, no truth needed", "lost pixels, patch by patch", "the picture, patches averaged")
for ax, name, title in zip(axes, ("hidden", "lost", "picture"), titles):
    error = "stderr" if name == "hidden" else None
    th.plots.curves(rows, "sparsity", name, by="objective", error=error, labels="legend", log="x", ylabel="squared error", ax=ax)
    ax.set(xlabel="atoms per patch", title=title)
plt.show()

# %%
# The picture
# -----------
# Restored by the masked dictionary with one atom per patch, and by the one with eight.

figure, axes = plt.subplots(2, 2, figsize=(8, 7.2), layout="constrained")
shown = {"broken": broken, "one atom per patch": pictures[1, "masked"], "eight": pictures[8, "masked"], "truth": truth}
for ax, (title, picture) in zip(axes.flat, shown.items()):
    ax.imshow(picture, cmap="gray", vmin=0, vmax=1)
    ax.set_title(title)
    ax.set_axis_off()
plt.show()

# %%
# Its atoms
# ---------
# Those learned with four per patch, by each objective.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for ax, objective in zip(axes, ("masked", "reconstruction")):
    th.plots.plot_atoms(dictionaries[4, objective], (8, 8), count=84, columns=14, title=objective, ax=ax)
plt.show()
