"""What can be wrong with a training: one name for each fault, and which faults follow from which."""

from __future__ import annotations

#: Name -> the faults that it brings about: where both are found, these are its consequences and no causes of their own.
#: Those that stop a training altogether stand first; the order decides between causes of which none could be tried.
CAUSES: dict[str, tuple[str, ...]] = {
    "not finite": ("not learning",),
    "frozen model": ("not learning",),
    "missing parameters": ("frozen layer", "unused parameters", "rate too low"),
    "dead layer": ("dead units", "vanishing gradients", "rate too low", "batch too small"),
    "double softmax": ("rate too low", "vanishing gradients"),
    "labels do not fit": ("label noise", "overfitting", "rate too low", "rate too high", "batch too small"),
    "input scale": (
        "rate too high", "rate too low", "exploding gradients", "vanishing gradients", "saturation", "dead layer", "dead units",
        "batch too small",
    ),
    "outliers": (
        "target scale", "rate too high", "rate too low", "exploding gradients", "batch too small", "overfitting", "not learning",
    ),
    "target scale": ("rate too high", "rate too low", "exploding gradients", "dead layer", "dead units"),
    "pos_weight": (
        "class imbalance", "rate too high", "rate too low", "exploding gradients", "batch too small", "overfitting",
        "not learning",
    ),
    "summed loss": ("rate too high", "exploding gradients", "no warm-up", "dead layer"),
    "schedule ended": ("rate too low",),
    "weight decay": ("rate too low", "rate too high", "vanishing gradients", "dead layer", "dead units"),
    "dropout": ("rate too low", "rate too high", "batch too small", "label noise"),
    "exploding gradients": ("rate too high", "no warm-up", "saturation"),
    "saturation": ("vanishing gradients", "rate too low"),
    "vanishing gradients": ("rate too low",),
    "no warm-up": ("rate too high",),
    "rate too high": ("dead units", "exploding gradients", "batch too small", "not learning"),
    "rate too low": ("not learning",),
    "frozen layer": ("rate too low", "not learning"),
    "batch statistics": ("overfitting", "validation shift", "not learning"),
    "dead units": ("not learning",),
    "bad batch": ("not learning",),
    "data shift": ("not learning",),
    "stale moments": ("not learning",),
    "leaked validation": ("duplicated samples",),
    "augmented validation": ("overfitting", "validation shift"),
    "label noise": ("overfitting", "not learning"),
    "contradictory labels": ("label noise",),
    "class imbalance": ("not learning",),
    "batch too small": ("not learning",),
    "not learning": (),
    "overfitting": (),
    "validation shift": (),
    "collinear inputs": ("not learning",),
    "duplicated inputs": (),
    "duplicated samples": (),
    "padding": (),
    "unused parameters": (),
    "duplicated units": ("not learning",),
}  # fmt: skip
