"""Fleets: many replicas of one architecture, trained as one vectorised program."""

from theodolite.training.fleets.fleet import Fleet
from theodolite.training.fleets.optimizers import SGD, Adam, FleetOptimizer, RMSprop
from theodolite.training.trace import FleetTrace

__all__ = ["SGD", "Adam", "Fleet", "FleetOptimizer", "FleetTrace", "RMSprop"]
