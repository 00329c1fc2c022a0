"""Which layers hold the sharpness?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.operators import layer_hessians
from theodolite.operators.layers import LayerHessians
from theodolite.results import Finding, ResultMapping, Row, Severity, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More layers than this are drawn by their place in the network, fewer each by its spectrum.
FEW = 6


class Layers(Instrument):
    name = "layers"
    title = "Curvature layer by layer"
    question = "Which layers are sharp, and which are flat?"
    how = (
        "The exact diagonal block of the Hessian of each layer's weight; the largest eigenpairs of "
        "all blocks are found in lockstep on "
        "one graph. The error is the true residual."
    )
    source = "Wu and others (2020), Dissecting Hessian: layer-wise structure and its eigenspaces."
    efforts = ({"k": 3}, {"k": 1})

    def __init__(self) -> None:
        self._site: Site | None = None

    def applies(self, site: Site) -> str:
        return "" if len(site.problem.layers) > 1 else "the model has a single layer"

    def cost(self, site: Site, **effort: Any) -> Work:
        self._site = site
        rounds = 18 + 12 * effort["k"]
        count = len(site.problem.layers)
        beside = 4e-4 * count + 3e-8 * site.problem.size  # each layer's solver
        return Work(products=0.01, seconds=rounds * (self._round + beside), bytes=site.problem.size * (4 * effort["k"] + 60) * 12)

    @cached_property
    def _blocks(self) -> LayerHessians:
        assert self._site is not None
        return layer_hessians(self._site.problem)

    @cached_property
    def _round(self) -> float:
        """Seconds of one product with every block: timed where that is quick, else guessed from the depth."""
        assert self._site is not None
        if self._site.sounding.operator is None or self._site.sounding.refused:
            return self._site.sounding.product * max(2.0, len(self._site.problem.layers) / 4)
        generator = torch.Generator().manual_seed(0)
        columns = {
            name: torch.randn(op.shape[0], 1, generator=generator, dtype=torch.float32).to(op.device, op.dtype)
            for name, op in self._blocks.items()
        }
        self._blocks.products(columns)
        began = time.perf_counter()
        self._blocks.products(columns)
        return time.perf_counter() - began

    def run(self, site: Site, **effort: Any) -> ResultMapping:
        self._site = site
        cap = None
        if site.allowance is not None:
            cap = max(6, int(site.allowance / max(self._round + 4e-4 * len(site.problem.layers), 1e-9)))
        return top_eigenpairs(self._blocks, effort["k"], max_matvecs=cap, seed=site.seed, progress=False)

    def rows(self, result: ResultMapping) -> list[Row]:
        return [
            {
                "layer": name,
                "largest eigenvalue": float(pairs.values[0]),
                "residual": float(pairs.residuals[0]),
                "parameters": pairs.vectors.shape[0],
                "converged": pairs.converged,
            }
            for name, pairs in result.items()
        ]

    def findings(self, site: Site, result: ResultMapping) -> list[Finding]:
        tops = {name: (float(pairs.values[0]), float(pairs.residuals[0])) for name, pairs in result.items()}
        sharpest = max(tops, key=lambda name: tops[name][0])
        flattest = min(tops, key=lambda name: tops[name][0])
        value, error = tops[sharpest]
        whole = site.results.get("curvature")
        share = ""
        if isinstance(whole, Eigenpairs) and float(whole.values[0]) > 0:
            share = f", {100 * value / float(whole.values[0]):.3g} % of the whole network's"
        text = (
            f"The sharpest layer is {sharpest} with curvature {number(value, error)}{share}; the flattest "
            f"is {flattest} ({tops[flattest][0]:.3g})."
        )
        fields = {"quantity": f"largest eigenvalue of the block of {sharpest}", "value": value, "error": error}
        advice = "This layer sets the largest stable rate; a smaller rate or a normalisation there lets the others go faster."
        slow = [name for name, pairs in result.items() if not pairs.converged]
        if slow:
            text += f" The search did not finish in {len(slow)} layers."
        return [self.found(Severity.NOTE, text, label="sharpest layer", advice=advice, **fields)]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        result = results[self.name]
        if len(result) <= FEW:
            drawn = plots.eigenvalues(result, by="layer", log=True, title="Largest eigenvalues of each layer's block")
            return drawn
        rows = [{"layer number": i + 1, "eigenvalue": row["largest eigenvalue"]} for i, row in enumerate(self.rows(result))]
        rows = [row for row in rows if row["eigenvalue"] > 0]
        title = "Sharpness of each layer, in the order of the model"
        drawn = plots.curves(
            rows, x="layer number", y="eigenvalue", log="y", markers=True, title=title, ylabel="largest eigenvalue"
        )
        return drawn
