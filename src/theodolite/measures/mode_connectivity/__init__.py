"""Whether two solutions share a basin: the loss on the straight line between them."""

from theodolite.measures.mode_connectivity.linear_path import LinearPath, linear_path

__all__ = ["LinearPath", "linear_path"]
