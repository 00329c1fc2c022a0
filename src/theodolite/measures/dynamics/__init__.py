"""How training moves: critical learning rates, regimes, the noise of the gradient."""

from theodolite.measures.dynamics.critical import BatchCriticalRates, CriticalRate, batch_critical_rates, critical_learning_rate
from theodolite.measures.dynamics.eigenspace_split import LossSplit, split_loss, split_loss_by_curvature
from theodolite.measures.dynamics.noise import GradientNoise, gradient_noise
from theodolite.measures.dynamics.range_test import RangeTest, lr_range_test
from theodolite.measures.dynamics.regimes import Regime, classify_run, expected_regime
from theodolite.measures.dynamics.spikes import MatchTable, Proportion, SpikeEvent, catapult_count, match_table, spike_events
from theodolite.measures.dynamics.sweep import CatapultSweep, MaximumRate, catapult_sweep, find_max_learning_rate
from theodolite.measures.dynamics.weight_linearity import WeightLinearity, weight_linearity

__all__ = [
    "BatchCriticalRates",
    "CatapultSweep",
    "CriticalRate",
    "GradientNoise",
    "LossSplit",
    "MatchTable",
    "MaximumRate",
    "Proportion",
    "RangeTest",
    "Regime",
    "SpikeEvent",
    "WeightLinearity",
    "batch_critical_rates",
    "catapult_count",
    "catapult_sweep",
    "classify_run",
    "critical_learning_rate",
    "expected_regime",
    "find_max_learning_rate",
    "gradient_noise",
    "lr_range_test",
    "match_table",
    "spike_events",
    "split_loss",
    "split_loss_by_curvature",
    "weight_linearity",
]
