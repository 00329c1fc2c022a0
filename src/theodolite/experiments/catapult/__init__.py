"""Catapults: training above the critical learning rate (Zhu 2024, chapter 3 and appendix B)."""
