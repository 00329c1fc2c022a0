"""Dictionaries learned by predicting hidden coordinates: source 000, chapter 2 and appendix A."""
