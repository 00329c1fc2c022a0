"""How often will a classifier be wrong on new data? PAC-Bayes bounds, certified by counting errors of drawn networks."""

from theodolite._names import imported
from theodolite.measures.bounds.calculator import all_bounds as all_bounds
from theodolite.measures.bounds.calculator import bernoulli_kl as bernoulli_kl
from theodolite.measures.bounds.calculator import bound_from_summary as bound_from_summary
from theodolite.measures.bounds.calculator import grid_index as grid_index
from theodolite.measures.bounds.calculator import grid_penalty as grid_penalty
from theodolite.measures.bounds.calculator import held_out_bound as held_out_bound
from theodolite.measures.bounds.calculator import kl_inverse as kl_inverse
from theodolite.measures.bounds.calculator import rounded_variance as rounded_variance
from theodolite.measures.bounds.certificate import RiskCertificate as RiskCertificate
from theodolite.measures.bounds.certificate import pac_bayes_bound as pac_bayes_bound
from theodolite.measures.bounds.certificate import risk_certificate as risk_certificate
from theodolite.measures.bounds.posterior import Block as Block
from theodolite.measures.bounds.posterior import GaussianPosterior as GaussianPosterior
from theodolite.measures.bounds.source_method import PRESETS as PRESETS
from theodolite.measures.bounds.source_method import SourceCertificate as SourceCertificate
from theodolite.measures.bounds.source_method import SourceFit as SourceFit
from theodolite.measures.bounds.source_method import source_certificate as source_certificate
from theodolite.measures.bounds.source_method import source_posterior as source_posterior

__all__ = sorted(imported(__file__))
