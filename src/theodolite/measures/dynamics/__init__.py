"""How training moves: learning rates, stability, runs."""

from theodolite.measures.dynamics.critical import CriticalRate, critical_learning_rate
from theodolite.measures.dynamics.stability_laws import StabilityLaw, stability_law

__all__ = ["CriticalRate", "StabilityLaw", "critical_learning_rate", "stability_law"]
