"""Dictionaries of sparse codes, learned by predicting hidden coordinates, and what is known about recovering them."""

from theodolite.measures.dictionary.estimator import DictionaryChoice, MaskedDictionaryLearning, choose_dictionary
from theodolite.measures.dictionary.hidden import HiddenError, hidden_error
from theodolite.measures.dictionary.learning import (
    LearnedDictionaries,
    LearnerState,
    LearningSettings,
    learn_dictionaries,
    objective_and_gradient,
)
from theodolite.measures.dictionary.losses import CodingLoss, exhaustive_codes, masked_loss, reconstruction_loss
from theodolite.measures.dictionary.matching_pursuit import SparseCodes, orthogonal_matching_pursuit, pursue
from theodolite.measures.dictionary.recovery import AtomMatches, atom_matches, permutation_error, recovery_error
from theodolite.measures.dictionary.structure import RestrictedIsometry, coherence, gershgorin_bound, restricted_isometry
from theodolite.measures.dictionary.theory import (
    OracleRisks,
    chi_square_max_bound,
    omp_success_bound,
    omp_threshold,
    oracle_risks,
    overfitting_dictionary,
)

__all__ = [
    "AtomMatches",
    "CodingLoss",
    "DictionaryChoice",
    "HiddenError",
    "LearnedDictionaries",
    "LearnerState",
    "LearningSettings",
    "MaskedDictionaryLearning",
    "OracleRisks",
    "RestrictedIsometry",
    "SparseCodes",
    "atom_matches",
    "chi_square_max_bound",
    "choose_dictionary",
    "coherence",
    "exhaustive_codes",
    "gershgorin_bound",
    "hidden_error",
    "learn_dictionaries",
    "masked_loss",
    "objective_and_gradient",
    "omp_success_bound",
    "omp_threshold",
    "oracle_risks",
    "orthogonal_matching_pursuit",
    "overfitting_dictionary",
    "permutation_error",
    "pursue",
    "reconstruction_loss",
    "recovery_error",
    "restricted_isometry",
]
