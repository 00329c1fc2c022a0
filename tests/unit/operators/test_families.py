"""Encoder-decoders, two towers, vision, language and vision, state spaces, mixtures of experts, against dense derivatives.

Truth shares nothing with the package: one backward pass for each output, another for each of its gradients.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import theodolite as th
from tests.unit.families import COUPLED, FAMILIES, READ, make
from theodolite.errors import BatchCoupledError
from theodolite.problem.calling import KeepFloat64

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
SAMPLES = 3


def flat(parts, like):
    return torch.cat([(torch.zeros_like(p) if t is None else t).reshape(-1) for t, p in zip(parts, like, strict=True)])


class Truth:
    """A family called as its users do, with plain expert layers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.batch = make(name)
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def run(self):
        with sdpa_kernel(SDPBackend.MATH), KeepFloat64():
            return self.model(**self.batch)

    def outputs(self, found) -> list[Tensor]:
        return [found[key] for key in READ.get(self.name, ("logits",))]

    @cached_property
    def output(self) -> Tensor:
        return self.joined(self.outputs(self.run()))

    @staticmethod
    def joined(parts) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat([p.reshape(SAMPLES, -1) for p in parts], dim=1)

    @cached_property
    def jacobian(self) -> Tensor:
        each = (torch.autograd.grad(v, self.parameters, retain_graph=True, allow_unused=True) for v in self.output.reshape(-1))
        return torch.stack([flat(row, self.parameters) for row in each])

    @cached_property
    def loss_curvature(self) -> Tensor:
        """`∇²_z loss` by double backward from the model's own loss."""
        found = self.run()
        parts = self.outputs(found)
        gradient = self.joined(torch.autograd.grad(found.loss, parts, create_graph=True)).reshape(-1)
        rows = [torch.autograd.grad(g, parts, retain_graph=True, allow_unused=True) for g in gradient]
        filled = [[torch.zeros_like(p) if g is None else g for g, p in zip(row, parts, strict=True)] for row in rows]
        return torch.stack([self.joined(row).reshape(-1) for row in filled])

    def hessian_product(self, v: Tensor) -> Tensor:
        gradient = torch.autograd.grad(self.run().loss, self.parameters, create_graph=True, allow_unused=True)
        return flat(torch.autograd.grad(flat(gradient, self.parameters), self.parameters, v, allow_unused=True), self.parameters)

    def bend(self, step: list[Tensor]) -> Tensor:
        """`δᵀ ∇²z δ` of every output: the second derivative along the step, by double backward."""
        seen = []
        for v in self.output.reshape(-1):
            slopes = torch.autograd.grad(v, self.parameters, create_graph=True, allow_unused=True)
            along = sum((g * s).sum() for g, s in zip(slopes, step, strict=True) if g is not None)
            twice = torch.autograd.grad(along, self.parameters, retain_graph=True, allow_unused=True)
            seen.append(sum((g * s).sum() for g, s in zip(twice, step, strict=True) if g is not None))
        return torch.stack(seen)


@lru_cache
def truth(name: str) -> Truth:
    return Truth(name)


@lru_cache
def problem(name: str) -> th.Problem:
    return th.Problem(make(name)[0], None, make(name)[1])


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).detach().norm()) <= 1e-8 * float(b.detach().norm())


def random(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


#: Near relatives of others.
LATER = ("marian", "siglip", "segformer", "qwen_moe")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LATER else []) for n in FAMILIES])
class TestFamilies:
    def test_tangent_kernel(self, name):
        true = truth(name).jacobian @ truth(name).jacobian.T
        v = random(len(true))
        assert close(th.tangent_kernel_operator(problem(name)) @ v, true @ v)
        if name not in COUPLED:
            assert close(th.tangent_kernel(problem(name)), true)
            return
        with pytest.raises(BatchCoupledError, match="tangent_kernel_operator takes each batch as a whole"):
            th.tangent_kernel(problem(name))

    def test_hessian_and_gauss_newton(self, name):
        this, v = truth(name), random(problem(name).size)
        assert close(th.gauss_newton(problem(name)) @ v, this.jacobian.T @ this.loss_curvature @ this.jacobian @ v)
        layers = th.layer_hessians(problem(name))
        blocks = {layer: random(op.shape[1])[:, None] for layer, op in list(layers.items())[::3]}
        found = layers.products(blocks)
        for layer, block in blocks.items():
            place = layers.positions(layer)
            whole = torch.zeros(problem(name).size, dtype=torch.float64).index_copy(0, place, block[:, 0])
            part = this.hessian_product(whole)
            assert float((found[layer][:, 0] - part[place]).norm()) <= 1e-8 * float(part.norm())

    def test_kronecker_factors(self, name):
        if name == "clip":
            with pytest.raises(ValueError, match=r"mixes samples.*theodolite\.hessian"):
                th.kronecker_factors(problem(name))
            return
        found = th.kronecker_factors(problem(name), sharing="expand", max_passes=10_000)
        linear = [layer for layer in found if isinstance(truth(name).model.get_submodule(layer), nn.Linear)]
        for layer in {linear[1], linear[-1]}:
            output, input_ = layer_factors(truth(name), layer)
            assert close(found[layer].output, output)
            assert close(found[layer].input, input_)

    def test_average_gradient_outer_product(self, name):
        if name in COUPLED:
            with pytest.raises(BatchCoupledError, match="one tower of two"):
                th.agop(problem(name))
            return
        this = truth(name)
        pixels = next((key for key, v in this.batch.items() if v.is_floating_point()), None)
        names = [n for n, m in this.model.named_modules() if isinstance(m, nn.Embedding)]
        at = None if pixels else next(n for n in names if n != "shared" and n != "model.shared")
        x, output = leaf_and_output(this, pixels, at)
        rows = output.reshape(SAMPLES, -1)
        gradients = [
            torch.autograd.grad(rows[i, j], x, retain_graph=True)[0] for i in range(SAMPLES) for j in range(rows.shape[1])
        ]
        width = x[0].numel() if at is None else x.shape[-1]
        each = torch.stack(gradients).reshape(-1, width)  # those of other samples are zero
        assert close(th.agop(problem(name), at=at), each.T @ each / (x.numel() // width))

    @pytest.mark.parametrize("order", [1, 2])
    def test_twins(self, name, order):
        this = truth(name)
        twin = (th.linearize if order == 1 else th.quadratize)(problem(name))
        named = dict(twin.named_parameters())
        torch.manual_seed(1)
        step = [0.1 * torch.randn_like(p) for p in this.parameters]
        for (key, _), s in zip([(n, p) for n, p in this.model.named_parameters() if p.requires_grad], step, strict=True):
            named[key].data.add_(s)
        with KeepFloat64():
            found = twin(**this.batch)
        expected = this.output.reshape(-1) + this.jacobian @ flat(step, step)
        expected = expected if order == 1 else expected + 0.5 * this.bend(step)
        assert close(found.reshape(-1), expected)


def layer_factors(this: Truth, layer: str) -> tuple[Tensor, Tensor]:
    """Curvature in a linear layer's output, averaged over positions, and the second moment of its input."""
    calls = []
    module = this.model.get_submodule(layer)
    handle = module.register_forward_hook(lambda module, args, out: calls.append((args[0].detach(), out)))
    try:
        found = this.run()
    finally:
        handle.remove()
    [(x, z)] = calls
    parts = this.outputs(found)
    output = this.joined(parts).reshape(-1)
    slopes = [torch.autograd.grad(v, z, retain_graph=True, allow_unused=True)[0] for v in output]
    j = torch.stack([torch.zeros_like(z).reshape(-1) if g is None else g.reshape(-1) for g in slopes])
    m, positions = z.shape[-1], z.numel() // z.shape[-1]
    block = (j.T @ this.loss_curvature @ j).reshape(positions, m, positions, m)
    rows = x.reshape(-1, x.shape[-1])
    return torch.einsum("pmpn->mn", block) * SAMPLES / positions, rows.T @ rows / SAMPLES


def leaf_and_output(this: Truth, pixels: str | None, at: str | None) -> tuple[Tensor, Tensor]:
    """The input, or what an embedding returns, as a leaf, and the output that depends on it."""
    if pixels is not None:
        x = this.batch[pixels].clone().requires_grad_()
        own, this.batch = this.batch, {**this.batch, pixels: x}
        try:
            return x, this.joined(this.outputs(this.run()))
        finally:
            this.batch = own
    seen = []

    def replace(module, args, out):
        seen.append(out.detach().requires_grad_())
        return seen[-1]

    handle = this.model.get_submodule(at).register_forward_hook(replace)
    try:
        output = this.joined(this.outputs(this.run()))
    finally:
        handle.remove()
    return seen[0], output
