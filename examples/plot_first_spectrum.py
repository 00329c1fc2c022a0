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

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import theodolite as th

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"

# %%
# The model: any ``nn.Module`` will do.


def train(steps: int = 400, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A 64-48-48-10 network trained by plain SGD."""
    torch.manual_seed(seed)
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model, x, y


# %%
# The measurement: a problem, its Hessian, and what to ask of it.


def measure(model: nn.Module, x: torch.Tensor, y: torch.Tensor):
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


def draw_spectrum(pairs: th.Eigenpairs, density: th.Density) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    left.errorbar(
        range(1, len(pairs.values) + 1),
        pairs.values,
        yerr=pairs.residuals,
        fmt="o",
        color=BLUE,
        capsize=3,
        label="eigenvalue ± residual",
    )
    left.axvline(9.5, color=GREY, linestyle=":", linewidth=1)
    left.annotate("classes − 1", (9.5, float(pairs.values[0])), xytext=(4, -4), textcoords="offset points", color=GREY, va="top")
    left.set(xlabel="index", ylabel="Hessian eigenvalue", title="The sharpest directions", ylim=(0, None))
    left.legend(frameon=False, loc="lower left")
    low, high = (density.density - 2 * density.stderr).clamp(min=1e-9), density.density + 2 * density.stderr
    right.fill_between(density.grid, low, high, color=BLUE, alpha=0.25, linewidth=0, label="± 2 standard errors")
    right.plot(density.grid, density.density, color=BLUE, linewidth=1.5, label=f"density, kernel {density.bandwidth:.2g}")
    right.plot(pairs.values, torch.full_like(pairs.values, 2e-5), "|", color=ORANGE, markersize=12, label="eigenpairs")
    right.set(xlabel="eigenvalue", ylabel="density", title="The whole spectrum", yscale="log", ylim=(1e-5, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_layers(layers) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for (name, pairs), colour, marker in zip(layers.items(), (BLUE, ORANGE, "#009E73"), "os^"):
        axes.semilogy(range(1, len(pairs.values) + 1), pairs.values, marker=marker, color=colour, label=f"layer {name}")
    axes.set(xlabel="index", ylabel="eigenvalue of the layer's block", title="Which layers hold the sharpness")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the curvature of a small network on digits.")
    parser.add_argument("--out", type=Path, default=Path("survey"), help="folder for the figures and results")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    problem, pairs, density, trace, layers = measure(*train(seed=arguments.seed))
    print(report(problem, pairs, trace))
    draw_spectrum(pairs, density).savefig(arguments.out / "spectrum.png", dpi=150)
    draw_layers(layers).savefig(arguments.out / "layers.png", dpi=150)
    for name, result in {"eigenpairs": pairs, "density": density, "trace": trace, "layers": layers}.items():
        result.save(arguments.out / name)
    print(f"\nFigures and results are in {arguments.out}/: spectrum.png, layers.png, eigenpairs.json, ...")


if __name__ == "__main__":
    main()
