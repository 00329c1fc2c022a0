"""How training moves: critical learning rates, regimes, the noise of the gradient."""

from theodolite._names import imported
from theodolite.measures.dynamics.critical import BatchCriticalRates as BatchCriticalRates
from theodolite.measures.dynamics.critical import CriticalRate as CriticalRate
from theodolite.measures.dynamics.critical import batch_critical_rates as batch_critical_rates
from theodolite.measures.dynamics.critical import critical_learning_rate as critical_learning_rate
from theodolite.measures.dynamics.eigenspace_split import LossSplit as LossSplit
from theodolite.measures.dynamics.eigenspace_split import split_loss as split_loss
from theodolite.measures.dynamics.eigenspace_split import split_loss_by_curvature as split_loss_by_curvature
from theodolite.measures.dynamics.noise import GradientNoise as GradientNoise
from theodolite.measures.dynamics.noise import gradient_noise as gradient_noise
from theodolite.measures.dynamics.regimes import Regime as Regime
from theodolite.measures.dynamics.regimes import classify_run as classify_run
from theodolite.measures.dynamics.regimes import expected_regime as expected_regime
from theodolite.measures.dynamics.spikes import MatchTable as MatchTable
from theodolite.measures.dynamics.spikes import Proportion as Proportion
from theodolite.measures.dynamics.spikes import SpikeEvent as SpikeEvent
from theodolite.measures.dynamics.spikes import catapult_count as catapult_count
from theodolite.measures.dynamics.spikes import match_table as match_table
from theodolite.measures.dynamics.spikes import spike_events as spike_events
from theodolite.measures.dynamics.sweep import CatapultSweep as CatapultSweep
from theodolite.measures.dynamics.sweep import MaximumRate as MaximumRate
from theodolite.measures.dynamics.sweep import catapult_sweep as catapult_sweep
from theodolite.measures.dynamics.sweep import find_max_learning_rate as find_max_learning_rate
from theodolite.measures.dynamics.weight_linearity import WeightLinearity as WeightLinearity
from theodolite.measures.dynamics.weight_linearity import weight_linearity as weight_linearity

__all__ = sorted(imported(__file__))
