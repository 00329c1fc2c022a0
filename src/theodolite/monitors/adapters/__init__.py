"""Trainers and loggers that a `Monitor` fits into; only these files name them."""
