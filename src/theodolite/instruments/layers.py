"""Which layers hold the sharpness?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.instruments.curvature import basis_bytes
from theodolite.linalg import Eigenpairs, top_eigenpairs
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

    def applies(self, site: Site) -> str:
        return "" if len(site.problem.layers) > 1 else "the model has a single layer"

    def cost(self, site: Site, **effort: Any) -> Work:
        rounds = 18 + 12 * effort["k"]
        count = len(site.problem.layers)
        beside = 4e-4 * count + 3e-8 * site.problem.size  # each layer's solver
        return Work(products=0.01, seconds=rounds * (site.layer_round + beside), bytes=basis_bytes(site, effort["k"]))

    def run(self, site: Site, **effort: Any) -> ResultMapping:
        cap = None
        if site.allowance is not None:
            cap = max(6, int(site.allowance / max(site.layer_round + 4e-4 * len(site.problem.layers), 1e-9)))
        return top_eigenpairs(site.layer_blocks, effort["k"], max_matvecs=cap, seed=site.seed, progress=False)

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
        fields = {"quantity": f"largest eigenvalue of the block of {sharpest}", "value": value, "error": error}
        if not value > 0:
            return [self.found(Severity.NOTE, "No layer's own block curves upwards.", label="sharpest layer", **fields)]
        whole = site.results.get("curvature")
        share, advice = "", ""
        if isinstance(whole, Eigenpairs) and float(whole.values[0]) > 0:
            part = value / float(whole.values[0])
            share = f", {100 * part:.3g} % of the whole network's"
            advice = (
                "This layer sets the largest stable rate; a smaller rate or a normalisation there lets the others go faster."
                if part > 0.5
                else "No single layer holds the sharpness: the layers are sharp together."
            )
        text = (
            f"The sharpest layer is {sharpest} with curvature {number(value, error)}{share}; the flattest is {flattest} "
            f"({tops[flattest][0]:.3g})."
        )
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
