"""Instruments that look at the data and the parameters before anything is differentiated twice."""
