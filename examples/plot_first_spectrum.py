"""
The curvature of a small network on digits
==========================================

Train a small network on scikit-learn's digits, then measure its exact Hessian: the sharpest directions with true
residuals, the whole spectrum with its error band, and the blocks of the layers. Everything runs on a laptop in seconds.

Run it as ``python examples/plot_first_spectrum.py --out survey``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import theodolite as th

# %%
# The model: any ``nn.Module`` will do.


def train(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A 64-48-48-10 network trained by plain SGD."""
    digits = th.data.load("digits").scaled().flat()
    x, y = digits.x_train, digits.y_train
    model = th.models.build("F-48^2", inputs=64, seed=seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    th.train(model, nn.CrossEntropyLoss(), (x, y), sgd, steps=400, batch_size=64, seed=seed)
    return model, x, y


# %%
# The measurement: a problem, its Hessian, and what to ask of it.


def measure(model: nn.Module, x: Tensor, y: Tensor):
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, y))
    hessian = th.hessian(problem)
    pairs = th.top_eigenpairs(hessian, k=12)
    density = th.spectral_density(hessian, probes=10, steps=64)
    trace = th.trace(hessian)
    layers = th.top_eigenpairs(th.layer_hessians(problem), k=10)
    return problem, pairs, density, trace, layers


def report(problem: th.Problem, pairs: th.Eigenpairs, trace: th.TraceEstimate) -> str:
    """The findings as text: each number with its error."""
    lines = [f"{problem}", f"loss {problem.loss():.4f}", "", "  i   eigenvalue    residual"]
    lines += [f"{i + 1:3d}   {float(v):10.4f}    {float(r):.1e}" for i, (v, r) in enumerate(zip(pairs.values, pairs.residuals))]
    sharpness = float(pairs.values[0])
    lines += ["", str(pairs), str(trace), f"gradient descent is stable up to a learning rate of about 2/λ = {2 / sharpness:.3g}"]
    return "\n".join(lines)


# %%
# The pictures.


def draw_spectrum(pairs: th.Eigenpairs, density: th.Density):
    figure, (left, right) = th.plots.panels(2, size=(5.0, 3.8))
    th.plots.eigenvalues(pairs, title="The sharpest directions", ax=left)
    th.plots.reference(left, x=9.5, label="classes − 1")
    th.plots.density(density, nodes=pairs.values, title="The whole spectrum", ax=right)
    return figure


def draw_layers(layers):
    return th.plots.eigenvalues(layers, by="layer", log=True, title="Which layers hold the sharpness").figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the curvature of a small network on digits.")
    parser.add_argument("--out", type=Path, default=Path("survey"), help="folder for the figures and results")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    problem, pairs, density, trace, layers = measure(*train(seed=arguments.seed))
    print(report(problem, pairs, trace))
    th.plots.save(draw_spectrum(pairs, density), arguments.out / "spectrum.png")
    th.plots.save(draw_layers(layers), arguments.out / "layers.png")
    for name, result in {"eigenpairs": pairs, "density": density, "trace": trace, "layers": layers}.items():
        result.save(arguments.out / name)
    print(f"\nFigures and results are in {arguments.out}/: spectrum.png, layers.png, eigenpairs.json, ...")


if __name__ == "__main__":
    main()
