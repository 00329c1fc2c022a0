"""Instruments that measure how outputs depend on inputs and on parameters: features, tangent kernel, linearity."""
