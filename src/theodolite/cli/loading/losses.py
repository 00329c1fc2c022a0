"""Loss words, and the loss that follows from the targets where none was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.cli.loading.module_attribute import call, load_attribute, names_code
from theodolite.problem.tables import is_array, target_tensor
from theodolite.text import listed, nearest

Loss = Callable[[Any, Any], Tensor]

#: The losses that compare number by number; class labels have to be turned into numbers for them.
ELEMENTWISE: dict[str, type[nn.Module]] = {"mse": nn.MSELoss, "bce": nn.BCEWithLogitsLoss, "l1": nn.L1Loss}
WORDS = ("cross-entropy", *ELEMENTWISE)


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not -100: logits (B, T, V) or (B, C, ...), targets (B, T) or (B, ...)."""
    class_last = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    return F.cross_entropy(output.movedim(-1, 1) if class_last else output, target)


def cross_entropy_for(target: Tensor) -> Loss:
    """torch's own for one label per sample (or class probabilities), the one on tokens for several."""
    return nn.CrossEntropyLoss() if target.ndim < 2 or target.is_floating_point() else token_cross_entropy


def word_of(loss: str | None) -> str | None:
    """The loss word in its one spelling; None for None and for `module:attribute`.

    >>> word_of("Cross_Entropy"), word_of("mine:loss")
    ('cross-entropy', None)
    """
    if loss is None or names_code(loss):
        return None
    word = loss.strip().lower().replace("_", "-")
    if word not in WORDS:
        near = listed(nearest(word, WORDS, 2))
        raise ValueError(f"--loss {loss!r} must be one of {listed(WORDS)}, or module:attribute. Nearest names: {near}.")
    return word


def loss_from(word: str, target: Any) -> Loss:
    """The loss of a word, or the user's own; `target` is a sample of the targets."""
    if names_code(word):
        return _own(word)
    plain = word_of(word)
    if plain in ELEMENTWISE:
        return ELEMENTWISE[plain]()
    return cross_entropy_for(target) if isinstance(target, Tensor) else nn.CrossEntropyLoss()


def inferred(target: Any) -> tuple[Loss, str]:
    """The loss that fits the targets, tables and arrays among them, and the sentence that says why."""
    if is_array(target):
        target, _ = target_tensor(target, torch.get_default_dtype(), real=False, check=False)
    if not isinstance(target, Tensor):
        raise ValueError(
            f"No loss could be chosen for targets of type {type(target).__name__}. Name one with --loss: "
            f"{listed(WORDS)}, or module:attribute."
        )
    if not target.is_floating_point():
        return cross_entropy_for(target), "cross-entropy was chosen because the targets are integers; --loss names another"
    if target.ndim > 1 and bool(((target == 0) | (target == 1)).all()):
        why = "binary cross-entropy was chosen because the targets are rows of 0 and 1; --loss names another"
        return nn.BCEWithLogitsLoss(), why
    return nn.MSELoss(), "squared error was chosen because the targets are real numbers; --loss names another"


def name_of(loss: Any) -> str:
    """How the page calls a loss."""
    if loss is None:
        return "the model's own"
    return str(getattr(loss, "__name__", type(loss).__name__))


def _own(target: str) -> Loss:
    """A loss function `(output, target)`, a loss module, or a class or function without arguments that makes one."""
    found = load_attribute(target, "--loss")
    if isinstance(found, type):
        found = call(target, found)
    if not callable(found):
        raise ValueError(f"--loss {target!r} must be a function (output, target) -> scalar. It is a {type(found).__name__}.")
    loss: Loss = found
    return loss
