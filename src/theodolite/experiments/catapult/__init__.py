"""Catapults: training above the critical learning rate (003, chapter 3 and appendix B)."""
