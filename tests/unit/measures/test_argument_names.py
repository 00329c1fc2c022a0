"""`lr` is accepted where `rate` is, `matrix` where `by` is; both at once are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures import dynamics, kernel, linearity, quadratic_models, stability
from theodolite.training import cosine, step_decay

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
Y = X[:, :1] * 0.5


def problem() -> th.Problem:
    torch.manual_seed(0)
    return th.Problem(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), nn.MSELoss(), (X, Y))


def fleet(**rate):
    made = th.Fleet(lambda seed: nn.Linear(3, 1).double(), 2, loss=nn.MSELoss(), **rate)
    return made.train((X, Y), steps=2, progress=False).loss.tolist()


def study(**rate):
    return stability.stability(
        lambda seed: nn.Linear(3, 2).double(), "sgd", (X, Y[:, 0].gt(0).long()), (X, Y[:, 0].gt(0).long()),
        sizes=[4, 6], pairs=2, steps=3, batch_size=2, loss=nn.CrossEntropyLoss(), progress=False, **rate,
    ).rows()  # fmt: skip


RATES = {
    "Fleet": fleet,
    "stability": study,
    "step_decay": lambda **rate: step_decay(**rate, factor=0.5, at=[2])(3),
    "cosine": lambda **rate: cosine(**rate, steps=4)(1),
    "expected_regime": lambda **rate: dynamics.expected_regime(problem(), steps=3, **rate).ratio,
    "weight_linearity": lambda **rate: dynamics.weight_linearity(problem(), steps=2, **rate).rows(),
    "pl_report": lambda **rate: kernel.pl_report(problem(), probes=1, **rate).contraction,
    "linearity": lambda **rate: linearity.linearity(problem(), **rate).rows(),
    "convex_bounds": lambda **rate: stability.convex_bounds(
        largest_input=1.0, largest_test_input=1.0, batch=2, visits=[1, 3], smoothness=0.5, **rate
    ).rows(),
    "one_example": lambda **rate: quadratic_models.one_example(1.0, 1.0, 0.0, 0.1, steps=2, **rate).output.tolist(),
    "half_sum_rate": lambda **rate: quadratic_models.half_sum_rate(convention="mean", outputs=4, **rate),
}
MATRICES = {
    "critical_learning_rate": lambda **by: th.critical_learning_rate(problem(), **by).value,
    "batch_critical_rates": lambda **by: dynamics.batch_critical_rates(problem(), batch_size=4, batches=2, **by).rows(),
    "catapult_sweep": lambda **by: th.catapult_sweep(problem(), ratios=[0.5], seeds=1, steps=2, progress=False, **by).rows(),
}
CASES = [(name, run, "rate", "lr", 0.1) for name, run in RATES.items()]
CASES += [(name, run, "by", "matrix", "gauss_newton") for name, run in MATRICES.items()]


@pytest.mark.parametrize(("name", "run", "old", "new", "value"), CASES, ids=[case[0] for case in CASES])
def test_both_names_mean_the_same(name, run, old, new, value):
    assert repr(run(**{new: value})) == repr(run(**{old: value}))
    with pytest.raises(TypeError, match=f"got both {old} and {new}"):
        run(**{new: value, old: value})
