"""Hugging Face models as they come: built from a configuration, in train mode, with the default attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import theodolite as th
import truth
from harness import Row, Settings, try_row

#: A product within this relative error of the truth passes.
GOOD = 1e-3


@dataclass(frozen=True)
class Case:
    """A model with one batch, and the same as inputs and targets for libraries that want pairs."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
    causal: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def wrapper(self) -> Logits:
        return Logits(self.model, self.causal)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        labels = self.batch["labels"]
        return self.batch["input_ids"], (labels[:, 1:] if self.causal else labels).reshape(-1)


class Logits(nn.Module):
    """The model as a map from token ids to rows of logits, one per label."""

    def __init__(self, model: nn.Module, causal: bool) -> None:
        super().__init__()
        self.model, self.causal = model, causal

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return (logits[:, :-1] if self.causal else logits).flatten(0, 1)


def build(name: str) -> Case:
    import transformers as hf

    hf.logging.set_verbosity_error()  # it remarks on every vocabulary this small
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 61}
    torch.manual_seed(0)
    model = {
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=32)),
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**size)),
        "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**size)),
    }[name]()
    ids = torch.randint(3, 61, (4, 16))
    return Case(name, model, {"input_ids": ids, "labels": ids.clone()}, causal=name != "BERT")


def helped(case: Case) -> Case:
    """What a user would do by hand after the first error message."""
    case.model.eval()
    case.model.set_attn_implementation("eager")
    return case


# Each makes one product, or does the least that shows the model is accepted and returns None


def ours(case: Case, v: Tensor) -> Tensor:
    return th.hessian(th.Problem(case.model, None, case.batch)) @ v


def ours_gauss_newton(case: Case, v: Tensor) -> Tensor:
    return th.gauss_newton(th.Problem(case.model, None, case.batch)) @ v


def eigenthings(case: Case, v: Tensor, *, method: str = "autograd") -> Tensor:
    import hessian_eigenthings as he

    unit = v / v.norm()  # the step of its finite difference is made for unit vectors
    product: Tensor = he.HessianOperator(case.model, [case.batch], he.hf_lm_loss(), method=method).matvec(unit)
    return product * v.norm()


def eigenthings_ggn(case: Case, v: Tensor) -> Tensor:
    import hessian_eigenthings as he

    product: Tensor = he.GGNOperator(case.model, [case.batch], he.hf_lm_forward(), he.hf_lm_loss_of_output()).matvec(v)
    return product


def curvlinops(case: Case, v: Tensor, *, kind: str = "HessianLinearOperator") -> Tensor | None:
    import curvlinops

    # Each sequence is one datum; by default the probes for determinism are on.
    operator = getattr(curvlinops, kind)(case.wrapper, nn.CrossEntropyLoss(), case.parameters, [case.pair], num_data=4)
    product: Tensor = operator @ v
    return None if kind.startswith("KFAC") else product


def pyhessian(case: Case, v: Tensor) -> Tensor:
    import pyhessian
    from pyhessian.utils import hessian_vector_product

    kept = pyhessian.hessian(case.wrapper, nn.CrossEntropyLoss(), data=case.pair, cuda=False)
    return truth.flat(hessian_vector_product(kept.gradsH, kept.params, truth.split(v, kept.params)), kept.params)


def nngeometry(case: Case, v: Tensor) -> None:
    from nngeometry.layercollection import LayerCollection

    LayerCollection.from_model(case.model)


def backpack(case: Case, v: Tensor) -> None:
    import backpack

    backpack.extend(case.wrapper, use_converter=True)


Call = Callable[[Case, Tensor], Tensor | None]

AS_THEY_COME: dict[str, Call] = {
    "ours": ours,
    "eigenthings": eigenthings,
    "eigenthings finite difference": partial(eigenthings, method="finite_difference"),
    "curvlinops": curvlinops,
    "curvlinops KFAC": partial(curvlinops, kind="KFACLinearOperator"),
    "pyhessian": pyhessian,
    "nngeometry LayerCollection": nngeometry,
    "backpack extend": backpack,
}
GAUSS_NEWTON: dict[str, Call] = {
    "ours, Gauss-Newton": ours_gauss_newton,
    "eigenthings, Gauss-Newton": eigenthings_ggn,
    "curvlinops, Gauss-Newton": partial(curvlinops, kind="GGNLinearOperator"),
}
BY_HAND = ("eigenthings", "eigenthings finite difference", "curvlinops", "pyhessian")


def true_products(name: str, v: Tensor) -> tuple[Tensor, Tensor]:
    """Hessian and Gauss-Newton products by double backward: float64, eval mode, math attention."""
    case = build(name)
    model = case.model.eval().double()
    parameters = case.parameters
    with sdpa_kernel(SDPBackend.MATH):
        output = model(**case.batch)
        gradient = truth.gradient_graph(output.loss, parameters)
        hessian = truth.flat(
            torch.autograd.grad(gradient @ v.double(), parameters, retain_graph=True, allow_unused=True), parameters
        )
        gauss_newton = truth.gauss_newton_product(output.logits, output.loss, parameters, v.double())
    return hessian.detach(), gauss_newton


def hugging_face(settings: Settings) -> Iterator[Row]:
    """One product of a tiny model as it comes: train mode, default attention.

    Error: relative, against float64 double backward in eval mode with math attention.
    """
    for name in ("GPT-2", "Llama", "BERT"):
        size = sum(p.numel() for p in build(name).parameters)
        v = torch.randn(size, generator=torch.Generator().manual_seed(1))
        hessian, gauss_newton = true_products(name, v)
        for calls, true in ((AS_THEY_COME, hessian), (GAUSS_NEWTON, gauss_newton)):
            for who, call in calls.items():
                yield _judge(Row("Hugging Face", f"{name} as it comes", who), lambda n=name: build(n), call, v, true)
        for who in BY_HAND:
            row = Row("Hugging Face", f"{name}, eval and eager attention by hand", who)
            yield _judge(row, lambda n=name: helped(build(n)), AS_THEY_COME[who], v, hessian)


def _judge(row: Row, make: Callable[[], Case], call: Call, v: Tensor, true: Tensor) -> Row:
    def fill(row: Row) -> None:
        case = make()
        product: Any = call(case, v)
        if product is None:
            row.note = "accepted; nothing to compare"
            return
        row.products = 1
        row.error = truth.relative_error(product, true)
        row.note = "pass" if row.error < GOOD else "WRONG" + _dropout(case)

    torch.manual_seed(0)
    return try_row(row, fill)


def _dropout(case: Case) -> str:
    """The usual reason: what was measured is one random draw of the objective."""
    active = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in case.model.modules())
    return ", dropout left active" if active else ""
