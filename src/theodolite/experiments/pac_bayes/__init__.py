"""PAC-Bayes bounds with Hessian information: Wu, Zhu and others 2020, section 6 and appendix G; Wu 2023, section 4.6."""

from functools import partial

from theodolite.experiments.claims import quoted

#: How ids name the chapter.
CHAPTER = "pac-bayes"
#: What "Dissecting Hessian" reports elsewhere than in the table whose claim it is: `**paper(0.1198, "Table 9")`.
paper = partial(quoted, "Wu, Zhu et al. 2020")
