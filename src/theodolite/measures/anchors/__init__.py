"""Anchor vectors of language models: is the log bulk partition function a linear function of the hidden state?"""

from theodolite._names import imported
from theodolite.measures.anchors.probing.bulk import LogPartition as LogPartition
from theodolite.measures.anchors.probing.bulk import log_bulk_partition as log_bulk_partition
from theodolite.measures.anchors.probing.geometry import AnchorClusters as AnchorClusters
from theodolite.measures.anchors.probing.geometry import AtomGeometry as AtomGeometry
from theodolite.measures.anchors.probing.geometry import anchor_clusters as anchor_clusters
from theodolite.measures.anchors.probing.geometry import atom_geometry as atom_geometry
from theodolite.measures.anchors.probing.heads import OutputHead as OutputHead
from theodolite.measures.anchors.probing.heads import find_head as find_head
from theodolite.measures.anchors.probing.probe import AnchorProbe as AnchorProbe
from theodolite.measures.anchors.probing.probe import anchor_probe as anchor_probe
from theodolite.measures.anchors.probing.probe import probe_states as probe_states
from theodolite.measures.anchors.probing.streams import NormalEquations as NormalEquations
from theodolite.measures.anchors.transfer.certificate import TransferCertificate as TransferCertificate
from theodolite.measures.anchors.transfer.certificate import transfer_certificate as transfer_certificate
from theodolite.measures.anchors.transfer.log_linear import LogLinear as LogLinear
from theodolite.measures.anchors.transfer.log_linear import kl_divergence as kl_divergence
from theodolite.measures.anchors.transfer.log_linear import rare_word_kl as rare_word_kl
from theodolite.measures.anchors.transfer.log_linear import rare_word_logits as rare_word_logits
from theodolite.measures.anchors.transfer.log_linear import rare_word_module as rare_word_module
from theodolite.measures.anchors.transfer.log_linear import rare_word_weight as rare_word_weight
from theodolite.measures.anchors.transfer.log_linear import shift_anchor as shift_anchor
from theodolite.measures.anchors.transfer.log_linear import shift_log_linear as shift_log_linear
from theodolite.measures.anchors.transfer.log_linear import shift_logits as shift_logits
from theodolite.measures.anchors.transfer.log_linear import shifted_module as shifted_module
from theodolite.measures.anchors.transfer.log_linear import silencing_shift as silencing_shift
from theodolite.measures.anchors.transfer.log_linear import total_variation as total_variation
from theodolite.measures.anchors.transfer.prompts import PromptComparison as PromptComparison
from theodolite.measures.anchors.transfer.prompts import compare_prompts as compare_prompts
from theodolite.measures.anchors.transfer.prompts import prompted_states as prompted_states
from theodolite.measures.anchors.transfer.readout import Readout as Readout
from theodolite.measures.anchors.transfer.readout import ReadoutComparison as ReadoutComparison
from theodolite.measures.anchors.transfer.readout import anchored_logits as anchored_logits
from theodolite.measures.anchors.transfer.readout import compare_readouts as compare_readouts
from theodolite.measures.anchors.transfer.readout import fit_readout as fit_readout
from theodolite.measures.anchors.transfer.readout import thresholded_score as thresholded_score

__all__ = sorted(imported(__file__))
