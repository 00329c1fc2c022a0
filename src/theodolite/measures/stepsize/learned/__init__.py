"""Optimizers that are networks themselves, and how they are trained."""
