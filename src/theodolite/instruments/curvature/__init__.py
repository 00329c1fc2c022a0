"""Instruments that measure the Hessian of the loss, as a whole and layer by layer."""
