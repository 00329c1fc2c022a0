"""
The curvature of a small network on digits
==========================================

Train a small network on scikit-learn's digits, then measure its exact Hessian: the sharpest directions with true
residuals, the whole spectrum with its error band, and the blocks of the layers.

Run it as ``python examples/plot_first_spectrum.py --out survey`` to keep the figures and the results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import theodolite as th

parser = argparse.ArgumentParser(description="Measure the curvature of a small network on digits.")
parser.add_argument("--out", type=Path, help="folder for the figures and results; none: nothing is written")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

# %%
# The model
# ---------
# A 64-48-48-10 network, trained by plain SGD. Any ``nn.Module`` will do.

digits = th.data.load("digits").scaled().flat()
x, y = digits.x_train, digits.y_train
loss = nn.CrossEntropyLoss()
model = th.models.build("F-48^2", inputs=64, seed=arguments.seed)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
print(th.train(model, loss, (x, y), sgd, steps=400, batch_size=64, seed=arguments.seed))

# %%
# The measurement
# ---------------
# A problem, its Hessian, and what to ask of it. Each result prints as a sentence.

problem = th.Problem(model, loss, (x, y))
hessian = th.hessian(problem)
pairs = th.top_eigenpairs(hessian, k=12)
density = th.spectral_density(hessian, probes=10, steps=64)
trace = th.trace(hessian)
layers = th.top_eigenpairs(th.layer_hessians(problem), k=10)

print(f"{problem}\nloss {problem.loss():.4f}\n\n  i   eigenvalue    residual")
for i, (value, residual) in enumerate(zip(pairs.values, pairs.residuals)):
    print(f"{i + 1:3d}   {float(value):10.4f}    {float(residual):.1e}")
print(f"\n{pairs}\n{trace}")
print(f"gradient descent is stable up to a learning rate of about 2/λ = {2 / float(pairs.values[0]):.3g}")

# %%
# The spectrum
# ------------
# With ten classes nine directions stand out: one per class, less one.

with th.plots.style():
    spectrum, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
th.plots.eigenvalues(pairs, title="The sharpest directions", ax=left)
th.plots.reference(left, x=9.5, label="classes − 1")
th.plots.density(density, nodes=pairs.values, title="The whole spectrum", ax=right)
plt.show()

# %%
# The layers
# ----------
# The exact diagonal block of each layer's weight; all blocks are solved in lockstep.

with th.plots.style():
    blocks, axes = plt.subplots(figsize=(6.4, 3.9), layout="constrained")
th.plots.eigenvalues(layers, by="layer", log=True, title="Which layers hold the sharpness", ax=axes)
plt.show()

# %%
# Keeping it
# ----------
# Results are saved without pickle; ``th.load`` reads them.

if arguments.out is not None:
    th.plots.save(spectrum, arguments.out / "spectrum.png")
    th.plots.save(blocks, arguments.out / "layers.png")
    for name, result in {"eigenpairs": pairs, "density": density, "trace": trace, "layers": layers}.items():
        result.save(arguments.out / name)
    print(f"Figures and results are in {arguments.out}/: spectrum.png, layers.png, eigenpairs.json, ...")
