"""Operators made of autograd graphs, kept alive between products while they fit in memory."""
