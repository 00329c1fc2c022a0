"""Stability of training to one example, and linear mode connectivity: source 004, chapter 2 and appendix A."""
