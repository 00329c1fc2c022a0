"""How training moves: critical learning rates, regimes, the noise of the gradient."""

from theodolite.measures.dynamics.classify import classify_run
from theodolite.measures.dynamics.critical import CriticalRate, critical_learning_rate
from theodolite.measures.dynamics.max_rate import MaximumRate, find_max_learning_rate
from theodolite.measures.dynamics.noise import GradientNoise, gradient_noise
from theodolite.measures.dynamics.regime import Regime, expected_regime
from theodolite.measures.dynamics.sweep import CatapultSweep, catapult_sweep
from theodolite.measures.dynamics.weight_linearity import WeightLinearity, weight_linearity

__all__ = [
    "CatapultSweep",
    "CriticalRate",
    "GradientNoise",
    "MaximumRate",
    "Regime",
    "WeightLinearity",
    "catapult_sweep",
    "classify_run",
    "critical_learning_rate",
    "expected_regime",
    "find_max_learning_rate",
    "gradient_noise",
    "weight_linearity",
]
