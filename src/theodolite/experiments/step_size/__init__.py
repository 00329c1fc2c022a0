"""Learning the step size: Wang and others 2021; Wu 2023, chapter 5."""

from functools import partial

from theodolite.experiments.claims import quoted

#: How ids name the chapter.
CHAPTER = "step-size"
#: What the paper reports elsewhere than in the figure whose claim it is: `**paper("yes", "Table 1")`.
paper = partial(quoted, "Wang et al. 2021")
