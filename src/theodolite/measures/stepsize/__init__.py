"""Which learning rate for this training? Meta-gradients, how far they can be trusted, and the choice itself."""

from theodolite._names import imported

__all__ = sorted(imported(__file__))
