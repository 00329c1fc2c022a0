"""Instruments: is it learning, do gradients reach every layer, does the set-up fit?"""
