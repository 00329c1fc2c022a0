"""Transition to linearity: Zhu 2024, chapter 2."""
