"""Anchor vectors of language models, and what follows from them downstream: source 000, chapter 3 and appendix B."""

#: How ids name the chapter.
CHAPTER = "anchor"
