"""What can be wrong with a training: one name for each fault, and which faults follow from which."""

from __future__ import annotations

#: Name -> the faults that it brings about: where both are found, these are its consequences and no causes of their own.
#: Those that stop a training altogether stand first; the order decides between causes of which none could be tried.
CAUSES: dict[str, tuple[str, ...]] = {
    "not finite": (),
    "frozen model": (),
    "missing parameters": ("frozen layer", "unused parameters"),
    "dead layer": ("dead units", "vanishing gradients", "rate too low", "batch too small"),
    "double softmax": ("rate too low", "vanishing gradients"),
    "labels do not fit": ("label noise", "overfitting", "rate too low", "rate too high", "batch too small"),
    "input scale": (
        "rate too high", "rate too low", "exploding gradients", "vanishing gradients", "saturation", "dead units",
        "batch too small",
    ),
    "target scale": ("rate too high", "rate too low", "exploding gradients", "dead units"),
    "summed loss": ("rate too high", "exploding gradients", "no warm-up"),
    "schedule ended": ("rate too low",),
    "weight decay": ("rate too low", "vanishing gradients", "dead units"),
    "exploding gradients": ("rate too high", "no warm-up", "saturation"),
    "saturation": ("vanishing gradients", "rate too low"),
    "vanishing gradients": ("rate too low",),
    "no warm-up": ("rate too high",),
    "rate too high": ("dead units", "exploding gradients", "batch too small"),
    "rate too low": (),
    "frozen layer": (),
    "batch statistics": ("overfitting", "validation shift"),
    "dead units": (),
    "leaked validation": ("duplicated samples",),
    "augmented validation": ("validation shift",),
    "label noise": ("overfitting",),
    "contradictory labels": ("label noise",),
    "class imbalance": (),
    "batch too small": (),
    "overfitting": (),
    "validation shift": (),
    "collinear inputs": (),
    "duplicated inputs": (),
    "duplicated samples": (),
    "padding": (),
    "unused parameters": (),
}  # fmt: skip
