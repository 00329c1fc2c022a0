"""Growing language models: operators, early and late losses, stacking (Karp 2024, chapter 5 and appendix C)."""

from functools import partial

from theodolite.experiments.claims import quoted

#: What the thesis reports elsewhere than in the figure whose claim it is: `**karp("low", "Section 5.3")`.
karp = partial(quoted, "Karp 2024")
