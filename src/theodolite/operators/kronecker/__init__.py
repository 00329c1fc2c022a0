"""Kronecker factors of layers: output Hessian and input auto-correlation."""

from theodolite.operators.kronecker.accumulate import FactorMapping, FactorMode, kronecker_factors
from theodolite.operators.kronecker.affine import affine_layers
from theodolite.operators.kronecker.factors import KroneckerEigenpairs, KroneckerFactors, factors_of
from theodolite.operators.kronecker.passes import LayerPass, visit_batches

__all__ = [
    "FactorMapping",
    "FactorMode",
    "KroneckerEigenpairs",
    "KroneckerFactors",
    "LayerPass",
    "affine_layers",
    "factors_of",
    "kronecker_factors",
    "visit_batches",
]
