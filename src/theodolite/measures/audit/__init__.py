"""What is there before anything is measured: batches, inputs, parameters; what is dead, doubled, tied, frozen or not finite."""

from theodolite.measures.audit.data import BatchAudit, InputAudit, audit_batches, audit_inputs
from theodolite.measures.audit.parameters import ParameterAudit, audit_parameters

__all__ = ["BatchAudit", "InputAudit", "ParameterAudit", "audit_batches", "audit_inputs", "audit_parameters"]
