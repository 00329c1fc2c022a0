"""
What a network's own activations are made of
============================================

The hidden units of a network need not each stand for one thing; directions among them may. A dictionary of the activations finds
such directions: each input is then a sum of a few atoms. How many atoms there are nobody knows, but sizes can be compared by the
error on hidden coordinates, without labels: units of the layer are hidden, and the code of the others has to predict them.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import theodolite as th

# %%
# A trained network
# -----------------
# Handwritten digits, one hidden layer of 64 units, 400 steps of Adam. Its activations, less their mean, are the signals.

torch.manual_seed(0)
digits = th.data.load("digits").scaled().flat()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adam = torch.optim.Adam(model.parameters(), lr=3e-3)
trace = th.train(
    model, nn.CrossEntropyLoss(), (digits.x_train, digits.y_train), adam, steps=400, batch_size=64, seed=0, progress=False
)
with torch.no_grad():
    hidden = model[:2](digits.x_train).double().numpy()
    right = float((model(digits.x_test).argmax(1) == digits.y_test).double().mean())
signals = hidden - hidden.mean(0)
labels = digits.y_train.numpy()
print(f"accuracy {right:.1%}; activations {signals.shape}")

# %%
# How many atoms
# --------------
# Sizes up to four times the width of the layer, judged on activations that were held out. Nothing here is noisy, and the largest
# dictionary that was tried predicts best: a still larger one may be better.

choice = th.dictionary.choose_dictionary(signals, [64, 128, 256], [4, 8], max_iter=20, learning_rate=3e-3, seed=0)
print(choice)
th.plots.plot_dictionary_choice(choice.rows(), figure=plt.figure(layout="constrained"))
plt.show()

# %%
# What they respond to
# --------------------
# A dictionary of that size, of all activations. For the twelve atoms with the largest part of the energy: the mean of the inputs,
# weighted by the code, less the mean input; and the digit that has most of the weight. No label was used to learn them.

learner = th.MaskedDictionaryLearning(
    choice.n_components, sparsity=choice.sparsity, max_iter=20, learning_rate=3e-3, random_state=0
).fit(signals)


def one_sided(values: np.ndarray) -> np.ndarray:
    """The part of each column with the sign that has more of the energy: directions have no sign of their own."""
    up, down = np.maximum(values, 0), np.maximum(-values, 0)
    return np.where(np.square(up).sum(0) >= np.square(down).sum(0), up, down)


def strongest(values: np.ndarray) -> np.ndarray:
    """The twelve columns with most of the energy."""
    return np.argsort(-np.square(values).sum(0))[:12]


def shares(weights: np.ndarray) -> np.ndarray:
    """How the weight of each column is shared among the ten digits, (columns, 10)."""
    return weights.T @ np.eye(10)[labels] / weights.sum(0)[:, None]


codes = learner.transform(signals)
top = strongest(codes)
weights = one_sided(codes[:, top])
images = digits.x_train.numpy() - digits.x_train.numpy().mean(0)
figure, axes = plt.subplots(3, 4, figsize=(7.5, 6.2), layout="constrained")
for ax, atom, weight, share in zip(axes.flat, top, weights.T, shares(weights)):
    th.plots.plot_atoms((weight @ images)[None], (8, 8), title=f"atom {atom}: {share.argmax()} ({share.max():.0%})", ax=ax)
plt.show()

# %%
# Beside units and principal components
# -------------------------------------
# The largest share of one digit, for the twelve strongest of each, treated alike. A sparse code is on for few inputs, and that
# alone makes it pure: activations drawn at random that serve as atoms without any learning are as much about one digit. Purity
# is no proof of a good dictionary. By the hidden error the learned atoms are a little ahead; the two errors are on different
# activations, and that of the learned atoms is the lowest of the six tried.

drawn, others = np.split(np.random.default_rng(0).permutation(len(signals)), [choice.n_components])
unlearned = np.zeros_like(codes)
atoms = signals[drawn] / np.linalg.norm(signals[drawn], axis=1, keepdims=True)
unlearned[others] = th.orthogonal_matching_pursuit(signals[others], atoms, choice.sparsity)
scores = signals @ np.linalg.svd(signals, full_matrices=False)[2].T
compared = {"atoms": codes, "drawn atoms": unlearned, "units": signals, "principal components": scores}
for name, values in compared.items():
    found = shares(one_sided(values[:, strongest(values)])).max(1)
    print(f"{name}: {found.mean():.0%} on average, from {found.min():.0%} to {found.max():.0%}")
learned = min(row["hidden_error"] for row in choice.rows())
print(
    f"hidden error: learned {learned:.4g}, drawn {th.dictionary.hidden_error(signals[others], atoms, choice.sparsity).value:.4g}"
)
