"""Is there something wrong with the data? Columns, targets, labels and samples, audited without training anything."""
