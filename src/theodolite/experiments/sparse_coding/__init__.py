"""Dictionaries learned by predicting hidden coordinates: Wu 2023, chapter 2 and appendix A."""
