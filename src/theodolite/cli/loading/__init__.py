"""From the words of the command line to a model, a loss, data and an optimizer.

Most files here import torch, so commands import them when they run.
"""
