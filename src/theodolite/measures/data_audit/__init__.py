"""Is there something wrong with the data? Columns, targets, labels and samples, audited without training anything."""

from theodolite.measures.data_audit.columns import ColumnAudit, audit_columns
from theodolite.measures.data_audit.labels import LabelAudit, audit_labels
from theodolite.measures.data_audit.samples import SampleAudit, ValidationAudit, audit_samples, audit_validation
from theodolite.measures.data_audit.targets import TargetAudit, audit_targets

__all__ = [
    "ColumnAudit",
    "LabelAudit",
    "SampleAudit",
    "TargetAudit",
    "ValidationAudit",
    "audit_columns",
    "audit_labels",
    "audit_samples",
    "audit_targets",
    "audit_validation",
]
