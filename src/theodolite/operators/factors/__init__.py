"""Kronecker factors of layers: output Hessian and input auto-correlation."""

from theodolite.operators.factors.accumulate import FactorMapping, kronecker_factors
from theodolite.operators.factors.kronecker_factors import KroneckerEigenpairs, KroneckerFactors, factors_of

__all__ = ["FactorMapping", "KroneckerEigenpairs", "KroneckerFactors", "factors_of", "kronecker_factors"]
