"""Pictures of whole studies: several panels of one result."""
