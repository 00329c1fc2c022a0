"""Instruments for language models."""
