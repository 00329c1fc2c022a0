"""Everything that must be arranged so that a model can be differentiated twice, exactly and fast.

Entered around the calls of the user's model; nothing of the model is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.errors import SecondOrderError
from theodolite.interrupts import unbroken_context
from theodolite.problem.calling.probe import UNSEEN
from theodolite.problem.derivatives.exact_derivatives import ExactDerivatives
from theodolite.problem.derivatives.unfused_layers import UnfusedLayers


@unbroken_context
def first_order() -> Iterator[None]:
    """Gradients on, eager execution, no checkpointing: what every functional call of a model needs."""
    with torch.inference_mode(False), torch.enable_grad(), torch.compiler.set_stance("force_eager"), _no_checkpointing():
        yield


@unbroken_context
def second_order() -> Iterator[None]:
    """Also attention by the kernel that has second derivatives, and fast exact double backward of convolutions."""
    with second_order_kernels(), ExactDerivatives():
        yield


@unbroken_context
def second_order_kernels() -> Iterator[None]:
    """The same without `ExactDerivatives`, which costs every operation of torch a call of Python and is to be entered by itself."""
    with first_order(), sdpa_kernel(SDPBackend.MATH), _no_fast_attention():
        yield


@unbroken_context
def functional_transforms() -> Iterator[None]:
    """For `torch.func` transforms of a model: layers in a form that they differentiate rightly, also twice."""
    with first_order(), sdpa_kernel(SDPBackend.MATH), _no_fast_attention(), UnfusedLayers():
        yield


@unbroken_context
def quiet_vmap() -> Iterator[None]:
    """Without torch's warnings that an operation is slow under vmap."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


@unbroken_context
def _no_fast_attention() -> Iterator[None]:
    """The fused inference path of `nn.TransformerEncoder` has no derivative at all."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@unbroken_context
def _no_checkpointing() -> Iterator[None]:
    """Run checkpointed parts plainly.

    Recomputation happens in backward, after the functional call has ended, and would then meet the model's own parameters instead
    of the ones being differentiated.
    """

    class Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    stand_ins = {"CheckpointFunction": Direct, "_checkpoint_without_reentrant_generator": generator}
    own = {name: vars(torch.utils.checkpoint)[name] for name in stand_ins if hasattr(torch.utils.checkpoint, name)}
    try:
        vars(torch.utils.checkpoint).update({name: stand_ins[name] for name in own})
        yield
    finally:
        vars(torch.utils.checkpoint).update(own)


def refuse_first_order_layers(model: nn.Module) -> None:
    """Name the layers that torch cannot differentiate twice, before a cryptic error does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.EmbeddingBag):
            raise SecondOrderError(
                f"{name or 'the model'} is an nn.EmbeddingBag, which has no second derivative in torch. Replace it by "
                "nn.Embedding followed by .mean(dim=1) (mode='mean') or .sum(dim=1) (mode='sum'): the same function and weights."
            )


def refuse_special_gradients(model: nn.Module, measured: Sequence[nn.Parameter]) -> None:
    """Name the embeddings among the measured whose backward gives a sparse tensor, or something else than the derivative."""
    kept = {id(p) for p in measured}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(module.weight) not in kept:
            continue
        for option, why in _SPECIAL_GRADIENTS.items():
            if getattr(module, option):
                raise ValueError(
                    f"{name or 'the model'} is an embedding with {option}=True: {why}. Set its {option} = False before measuring "
                    "(the function and the weights stay the same), or leave its weight out with params=."
                )


_SPECIAL_GRADIENTS = {
    "sparse": "its gradient is a sparse tensor, which has no second derivative in torch",
    "scale_grad_by_freq": "its backward divides by how often a row occurs, so it is not the gradient of the loss",
}


@contextmanager
def plain_second_order_errors() -> Iterator[None]:
    """The friendly form of torch's 'derivative not implemented' and 'does not require grad'."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "does not require grad" in text:
            raise ValueError(UNSEEN) from error
        if "not implemented" not in text or "deriv" not in text:
            raise
        raise SecondOrderError(
            f"A layer or the loss has no second derivative in torch ({text.splitlines()[0]}). Replace it by one built of "
            "ordinary torch operations (attn_implementation='eager' for a custom attention kernel)."
        ) from error
