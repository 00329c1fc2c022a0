"""Anchor vectors of language models: is the log bulk partition function a linear function of the hidden state?"""

from theodolite.measures.anchors.probing.bulk import LogPartition, log_bulk_partition
from theodolite.measures.anchors.probing.geometry import AnchorClusters, AtomGeometry, anchor_clusters, atom_geometry
from theodolite.measures.anchors.probing.heads import OutputHead, find_head
from theodolite.measures.anchors.probing.probe import AnchorProbe, anchor_probe, probe_states
from theodolite.measures.anchors.probing.streams import NormalEquations
from theodolite.measures.anchors.transfer.certificate import TransferCertificate, transfer_certificate
from theodolite.measures.anchors.transfer.log_linear import (
    LogLinear,
    kl_divergence,
    rare_word_kl,
    rare_word_logits,
    rare_word_module,
    rare_word_weight,
    shift_anchor,
    shift_log_linear,
    shift_logits,
    shifted_module,
    silencing_shift,
    total_variation,
)
from theodolite.measures.anchors.transfer.prompts import PromptComparison, compare_prompts, prompted_states
from theodolite.measures.anchors.transfer.readout import (
    Readout,
    ReadoutComparison,
    anchored_logits,
    compare_readouts,
    fit_readout,
    thresholded_score,
)

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
