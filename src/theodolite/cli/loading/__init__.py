"""From the words of the command line to a model, a loss, data and an optimizer. Imports torch, so import it inside commands."""

from theodolite.cli.loading.optimizers import make_optimizer
from theodolite.cli.loading.subject import Subject, load_subject

__all__ = ["Subject", "load_subject", "make_optimizer"]
