"""Instruments that say what a learning rate and a batch size will do."""
