"""Catapults in SGD: spikes of the loss, the top eigenspace they live in, and the features they leave behind."""
