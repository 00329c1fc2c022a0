"""What the chapters share beside the framework: data sets with their stand-ins, panels, places of a source."""

from functools import partial

from theodolite.experiments.claims import quoted

#: What Zhu 2024 reports elsewhere than in the figure whose claim it is: `**zhu("small", "Theorem 3.3.1")`.
zhu = partial(quoted, "Zhu 2024")
