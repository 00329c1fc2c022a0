"""Stability of training to one example, and linear mode connectivity: Karp 2024, chapter 2 and appendix A."""
