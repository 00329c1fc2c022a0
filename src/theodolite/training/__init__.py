"""L4: training runs and their traces."""

from theodolite.training.fleets import SGD, Adam, Fleet, FleetOptimizer, FleetTrace, RMSprop
from theodolite.training.loop import train
from theodolite.training.schedules import cosine, step_decay, warmup
from theodolite.training.trace import Trace

__all__ = ["SGD", "Adam", "Fleet", "FleetOptimizer", "FleetTrace", "RMSprop", "Trace", "cosine", "step_decay", "train", "warmup"]
