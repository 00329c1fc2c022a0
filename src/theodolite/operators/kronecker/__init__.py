"""Kronecker factors of layers: output Hessian and input auto-correlation."""

from theodolite.operators.kronecker.accumulate import FactorMapping as FactorMapping
from theodolite.operators.kronecker.accumulate import FactorMode as FactorMode
from theodolite.operators.kronecker.accumulate import kronecker_factors as kronecker_factors
from theodolite.operators.kronecker.affine import affine_layers as affine_layers
from theodolite.operators.kronecker.factors import KroneckerEigenpairs as KroneckerEigenpairs
from theodolite.operators.kronecker.factors import KroneckerFactors as KroneckerFactors
from theodolite.operators.kronecker.factors import factors_of as factors_of
from theodolite.operators.kronecker.passes import LayerPass as LayerPass
from theodolite.operators.kronecker.passes import visit_batches as visit_batches
