"""`KroneckerFactors`: the two small matrices whose Kronecker product approximates a layer's Hessian block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.arguments import up_to
from theodolite.operators.algebra import DenseOperator, KroneckerOperator
from theodolite.operators.base import LinearOperator
from theodolite.results import Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KroneckerEigenpairs(Result):
    """The largest eigenpairs `τ_i γ_j`, `u_i ⊗ v_j` of a Kronecker product, by their indices (i, j).

    `left` (m, m) and `right` (n, n) hold the eigenvectors u and v as columns; `vectors` forms the k wanted products.
    """

    values: Tensor
    left_index: Tensor
    right_index: Tensor
    left: Tensor
    right: Tensor
    transposed: bool = False

    @property
    def vectors(self) -> Tensor:
        """Columns (m·n, k) in the order of the flattened weight."""
        u, v = self.left[:, self.left_index], self.right[:, self.right_index]
        first, second = (v, u) if self.transposed else (u, v)
        return (first[:, None, :] * second[None, :, :]).reshape(-1, len(self.values))

    def rows(self) -> list[Row]:
        columns = zip(self.values.tolist(), self.left_index.tolist(), self.right_index.tolist(), strict=True)
        return [{"index": k, "eigenvalue": value, "output": i, "input": j} for k, (value, i, j) in enumerate(columns)]

    def sentence(self) -> str:
        shown = ", ".join(f"{v:.4g}" for v in self.values[:5].tolist())
        return (
            f"{len(self.values)} largest eigenvalues of the Kronecker product: {shown}{', ...' if len(self.values) > 5 else ''}."
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KroneckerFactors(Result):
    """`E[M]` and `E[x xᵀ]` of one layer.

    `output` (m, m) is the curvature of the objective in the layer's output: samples weigh in it what they weigh in the
    objective (a mean, a sum, class weights, no ignored labels). `input` (n, n) is the auto-correlation of the layer's input (not
    centred), a plain mean over all samples of the data, whatever their labels, and so is `mean` (n,), the mean input,
    or for several positions the leading left singular vector of the mean (n, P) times its singular value. With P > 1 positions
    (patches of a convolution, tokens, several calls) the input is summed over them and the output averaged; where `sharing` is
    `"reduce"` both factors are those of the averaged input and the summed derivative of a sample.

    `draws` is how often the loss's curvature was sampled for each batch, 0 where it is exact; `stderr` is then the relative
    standard error of `output` (NaN for a single draw, which has no spread). `last` says that the layer's output is the model's.
    """

    layer: str
    kind: str
    mode: str
    output: Tensor
    input: Tensor
    mean: Tensor
    positions: int
    samples: int
    passes: int
    stderr: float = 0.0
    draws: int = 0
    groups: int = 1
    transposed: bool = False
    last: bool = False
    sharing: str = "expand"

    @property
    def covariance(self) -> Tensor:
        """`E[x xᵀ] − μ μᵀ`: for one position the covariance of the input."""
        return self.input - torch.outer(self.mean, self.mean)

    def operator(self) -> LinearOperator:
        """`E[M] ⊗ E[x xᵀ]` on the flattened weight (row-major), never formed."""
        if self.groups > 1:
            return GroupedKroneckerOperator(self.output, self.input, self.groups)
        output, input_ = DenseOperator(self.output, symmetric=True), DenseOperator(self.input, symmetric=True)
        return KroneckerOperator(input_, output) if self.transposed else KroneckerOperator(output, input_)

    def top_eigenpairs(self, k: int) -> KroneckerEigenpairs:
        """The k largest eigenpairs, from two small eigen-decompositions and a sort of the products.

        >>> pairs = factors_of(torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([5.0, 3.0]))).top_eigenpairs(3)
        >>> pairs.values.tolist(), pairs.left_index.tolist(), pairs.right_index.tolist()
        ([10.0, 6.0, 5.0], [0, 0, 1], [0, 1, 0])
        """
        if self.groups > 1:
            raise ValueError("A grouped convolution has no closed form: use theodolite.top_eigenpairs(factors.operator(), k).")
        k = up_to("k", k, self.output.shape[0] * self.input.shape[0], of="eigenpairs")
        tau, u = (t.flip(-1) for t in torch.linalg.eigh(self.output))
        gamma, v = (t.flip(-1) for t in torch.linalg.eigh(self.input))
        values, places = torch.outer(tau, gamma).flatten().topk(k)
        n = len(gamma)
        return KroneckerEigenpairs(
            values=values,
            left_index=places // n,
            right_index=places % n,
            left=u,
            right=v,
            transposed=self.transposed,
            outcome=self.outcome,
            seed=self.seed,
            cost=self.cost,
        )

    def rows(self) -> list[Row]:
        return [
            {"layer": self.layer, "factor": name, "index": i, "eigenvalue": value}
            for name, matrix in (("output", self.output), ("input", self.input))
            for i, value in enumerate(torch.linalg.eigvalsh(matrix).flip(0)[:20].tolist())
        ]

    def sentence(self) -> str:
        m, n = self.output.shape[0], self.input.shape[0]
        return (
            f"{self.layer} ({self.kind}): output Hessian {m}×{m}, input auto-correlation {n}×{n} of "
            f"{self.samples} samples{self.sampling()}."
        )

    def sampling(self) -> str:
        """How far sampling left the output Hessian open, as the end of a sentence; nothing where it is exact."""
        if not self.draws:
            return ""
        error = "error unknown" if math.isnan(self.stderr) else f"±{100 * self.stderr:.2g} %"
        return f", output Hessian sampled ({error}; more draws or a larger max_passes make it exacter)"


def factors_of(output: Tensor, input_: Tensor, mean: Tensor | None = None, layer: str = "layer") -> KroneckerFactors:
    """Factors from given matrices: for theory and tests.

    >>> factors_of(torch.eye(2), torch.eye(3)).operator().shape
    (6, 6)
    """
    mean = torch.zeros(input_.shape[0], dtype=input_.dtype) if mean is None else mean
    return KroneckerFactors(
        layer=layer, kind="given", mode="given", output=output, input=input_, mean=mean, positions=1, samples=0, passes=0
    )


class GroupedKroneckerOperator(LinearOperator):
    """The part of `M ⊗ X` that belongs to the weights of a grouped convolution.

    A grouped convolution is a full one whose weights between different groups are held at zero; its block is the
    principal submatrix of the full one's.
    """

    def __init__(self, output: Tensor, input_: Tensor, groups: int) -> None:
        self.output, self.input, self.groups = output, input_, groups
        self.m, self.n = output.shape[0], input_.shape[0] // groups  # n entries of the weight per output
        size = self.m * self.n
        super().__init__((size, size), dtype=output.dtype, device=output.device, symmetric=True, probe=False)

    def _matmat(self, x: Tensor) -> Tensor:
        k, g = x.shape[1], self.groups
        part = x.T.reshape(k, g, self.m // g, self.n).to(self.output.dtype)
        full = part.new_zeros(k, g, self.m // g, g, self.n)  # every output sees its own group's inputs only
        place = torch.arange(g, device=x.device)
        full[:, place, :, place] = part.transpose(0, 1)
        image = self.output @ full.reshape(k, self.m, g * self.n) @ self.input
        image = image.reshape(k, g, self.m // g, g, self.n)[:, place, :, place]  # (g, k, m/g, n)
        return image.transpose(0, 1).reshape(k, -1).T
