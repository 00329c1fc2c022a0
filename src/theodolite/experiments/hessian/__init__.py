"""The layer-wise Hessian: Kronecker structure, overlap of models trained apart, and the theorems behind them."""

from functools import partial

from theodolite.experiments.claims import quoted

#: What "Dissecting Hessian" and the thesis on it report at a place of theirs: `**paper("near 1", "section 4.2")`.
paper, thesis = partial(quoted, "Wu, Zhu et al. 2020"), partial(quoted, "Wu 2023")
