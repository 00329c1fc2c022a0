"""Dictionaries of sparse codes, learned by predicting hidden coordinates, and what is known about recovering them."""

from theodolite._names import imported
from theodolite.measures.dictionary.estimator import DictionaryChoice as DictionaryChoice
from theodolite.measures.dictionary.estimator import MaskedDictionaryLearning as MaskedDictionaryLearning
from theodolite.measures.dictionary.estimator import choose_dictionary as choose_dictionary
from theodolite.measures.dictionary.hidden import HiddenError as HiddenError
from theodolite.measures.dictionary.hidden import hidden_error as hidden_error
from theodolite.measures.dictionary.learning import LearnedDictionaries as LearnedDictionaries
from theodolite.measures.dictionary.learning import LearnerState as LearnerState
from theodolite.measures.dictionary.learning import LearningSettings as LearningSettings
from theodolite.measures.dictionary.learning import learn_dictionaries as learn_dictionaries
from theodolite.measures.dictionary.learning import objective_and_gradient as objective_and_gradient
from theodolite.measures.dictionary.losses import CodingLoss as CodingLoss
from theodolite.measures.dictionary.losses import exhaustive_codes as exhaustive_codes
from theodolite.measures.dictionary.losses import masked_loss as masked_loss
from theodolite.measures.dictionary.losses import reconstruction_loss as reconstruction_loss
from theodolite.measures.dictionary.matching_pursuit import SparseCodes as SparseCodes
from theodolite.measures.dictionary.matching_pursuit import orthogonal_matching_pursuit as orthogonal_matching_pursuit
from theodolite.measures.dictionary.matching_pursuit import pursue as pursue
from theodolite.measures.dictionary.recovery import AtomMatches as AtomMatches
from theodolite.measures.dictionary.recovery import atom_matches as atom_matches
from theodolite.measures.dictionary.recovery import permutation_error as permutation_error
from theodolite.measures.dictionary.recovery import recovery_error as recovery_error
from theodolite.measures.dictionary.structure import RestrictedIsometry as RestrictedIsometry
from theodolite.measures.dictionary.structure import coherence as coherence
from theodolite.measures.dictionary.structure import gershgorin_bound as gershgorin_bound
from theodolite.measures.dictionary.structure import restricted_isometry as restricted_isometry
from theodolite.measures.dictionary.theory import OracleRisks as OracleRisks
from theodolite.measures.dictionary.theory import chi_square_max_bound as chi_square_max_bound
from theodolite.measures.dictionary.theory import omp_success_bound as omp_success_bound
from theodolite.measures.dictionary.theory import omp_threshold as omp_threshold
from theodolite.measures.dictionary.theory import oracle_risks as oracle_risks
from theodolite.measures.dictionary.theory import overfitting_dictionary as overfitting_dictionary

__all__ = sorted(imported(__file__))
