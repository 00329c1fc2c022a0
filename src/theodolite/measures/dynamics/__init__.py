"""How training moves: critical learning rates, regimes, the noise of the gradient."""

from theodolite.measures.dynamics.critical import CriticalRate, critical_learning_rate
from theodolite.measures.dynamics.noise import GradientNoise, gradient_noise
from theodolite.measures.dynamics.regime import Regime, expected_regime

__all__ = ["CriticalRate", "GradientNoise", "Regime", "critical_learning_rate", "expected_regime", "gradient_noise"]
