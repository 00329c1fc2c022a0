"""Measuring an anchor vector: the output head, the data a model is called with, sums over its hidden states."""
