"""Anchor vectors of language models, and what follows from them downstream: Wu 2023, chapter 3 and appendix B."""

#: How ids name the chapter.
CHAPTER = "anchor"
