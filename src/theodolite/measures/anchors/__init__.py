"""Anchor vectors of language models: is the log bulk partition function a linear function of the hidden state?"""

from theodolite.measures.anchors.atoms import AtomGeometry, atom_geometry
from theodolite.measures.anchors.attacks import (
    rare_word_kl,
    rare_word_logits,
    rare_word_module,
    rare_word_weight,
    shift_anchor,
    shift_log_linear,
    shift_logits,
    shifted_module,
    silencing_shift,
)
from theodolite.measures.anchors.bulk import LogPartition, log_bulk_partition
from theodolite.measures.anchors.clusters import AnchorClusters, anchor_clusters
from theodolite.measures.anchors.heads import OutputHead, find_head
from theodolite.measures.anchors.log_linear import LogLinear, kl_divergence, total_variation
from theodolite.measures.anchors.model_probe import anchor_probe
from theodolite.measures.anchors.normal_equations import NormalEquations
from theodolite.measures.anchors.probe import AnchorProbe, probe_states
from theodolite.measures.anchors.prompts import PromptComparison, compare_prompts, prompted_states
from theodolite.measures.anchors.readout import (
    Readout,
    ReadoutComparison,
    anchored_logits,
    compare_readouts,
    fit_readout,
    thresholded_score,
)
from theodolite.measures.anchors.transfer import TransferCertificate, transfer_certificate

__all__ = [
    "AnchorClusters",
    "AnchorProbe",
    "AtomGeometry",
    "LogLinear",
    "LogPartition",
    "NormalEquations",
    "OutputHead",
    "PromptComparison",
    "Readout",
    "ReadoutComparison",
    "TransferCertificate",
    "anchor_clusters",
    "anchor_probe",
    "anchored_logits",
    "atom_geometry",
    "compare_prompts",
    "compare_readouts",
    "find_head",
    "fit_readout",
    "kl_divergence",
    "log_bulk_partition",
    "probe_states",
    "prompted_states",
    "rare_word_kl",
    "rare_word_logits",
    "rare_word_module",
    "rare_word_weight",
    "shift_anchor",
    "shift_log_linear",
    "shift_logits",
    "shifted_module",
    "silencing_shift",
    "thresholded_score",
    "total_variation",
    "transfer_certificate",
]
