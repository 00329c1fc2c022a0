"""What the study of learned optimizers computes itself: its data, its networks, its jobs, what is read off its rows."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from theodolite.experiments import get
from theodolite.experiments.figure import Figure
from theodolite.experiments.step_size.learned_optimizers import (
    RATES,
    LearnedOptimizers,
    accuracy,
    advantage,
    curve_rows,
    fitted,
    network,
    samples_of,
    tuned_rate,
)

FIGURES = [f"step-size/figure-{number}" for number in ("5", "6", "7", "8", "9", "10", "5.4", "5.5")]
STUDY = LearnedOptimizers()


def jobs(size, **where):
    found = [dict(job) for job in STUDY.jobs(STUDY.parameters(size))]
    return [job for job in found if all(job[name] == value for name, value in where.items())]


def test_networks_before_training():
    """All tensors from N(0, 1.44 / inputs), biases from N(0, 1.44 / outputs)."""
    model = network(3, inputs=784, widths=(100, 20))
    assert sum(p.numel() for p in model.parameters()) == 80_730
    assert abs(model.fc1.weight.std().item() * math.sqrt(784) - 1.2) < 0.02
    assert abs(model.fc1.bias.std().item() * math.sqrt(100) - 1.2) < 0.3
    assert torch.equal(network(3, inputs=784, widths=(100, 20)).fc2.weight, model.fc2.weight)


def test_optimizers_of_a_seed_see_the_same_noise():
    job, other = jobs("laptop", case="small", noise=0.2, seed=1, role="TbT")[0], jobs("laptop", case="all", noise=0.2, seed=1)[0]
    samples, same = samples_of(job), samples_of(other)
    assert torch.equal(samples.y, same.y)
    assert samples.x.shape[1] == 64
    assert 0 <= float(samples.x.min()) <= float(samples.x.max()) <= 1
    assert 0.15 < float((samples.y_test != samples.clean).double().mean()) < 0.21
    quiet = samples_of(jobs("laptop", case="small", noise=0.0, seed=1)[0])
    assert torch.equal(quiet.y_test, quiet.clean)
    assert 0.15 < float((samples.y != quiet.y).double().mean()) < 0.21


def test_jobs():
    small = jobs("paper", case="small", noise=0.2, seed=0)
    assert {job["role"]: (job["samples"], job["valid"]) for job in small} == {
        "SGD": (1000, 0),
        "TbT": (1000, 0),
        "TbV": (1000, 1000),
        "TbT2": (2000, 0),
    }
    whole = jobs("paper", case="all", noise=0.0, seed=0)
    assert {job["role"]: (job["samples"], job["valid"]) for job in whole}["TbV"] == (50_000, 10_000)
    assert whole[0]["steps"] == 40_000
    laptop = {job["role"]: (job["samples"], job["valid"]) for job in jobs("laptop", case="all", noise=0.0, seed=0)}
    assert laptop == {"SGD": (1200, 0), "TbT": (1200, 0), "TbV": (800, 400)}


def test_the_figures_share_all_jobs():
    """What figures 5.4 and 5.5 show, others have computed."""
    chosen = {name: {repr(job) for job in get(name).chosen_jobs("laptop")} for name in FIGURES}
    assert len(set().union(*chosen.values())) == len(jobs("laptop"))
    assert chosen["step-size/figure-5.5"] == chosen["step-size/figure-6"]
    parts = [chosen[f"step-size/figure-{number}"] for number in (5, 6, 7)]
    assert chosen["step-size/figure-5.4"] == set().union(*parts)


def test_sgd_is_tuned_on_samples_that_it_does_not_train_on():
    job = {**jobs("tiny", case="small", noise=0.0)[0], "steps": 60}
    samples = samples_of(job)
    rate = tuned_rate(samples, job, partial(network, inputs=64, widths=(20,)))
    assert 0.02 < rate < 2.0  # the ends of the grid neither learn in 60 steps nor stay finite
    assert rate in RATES
    assert len(RATES) == 12
    assert math.isclose(RATES[0], 1e-3)
    assert math.isclose(RATES[-1], 3.3, rel_tol=0.01)


def end(role, seed, clean, train=1.0, noise=0.2):
    shared = {"kind": "curve", "end": True, "case": "small", "noise": noise, "optimizer": role, "step": 500}
    return {**shared, "role": role, "seed": seed, "clean": clean, "test": clean - 0.1, "train": train}


def test_advantages_pair_the_seeds():
    table = [end("TbT", 0, 0.5), end("TbV", 0, 0.7, 0.8), end("TbT", 1, 0.6), end("TbV", 1, 0.7, 0.9), end("SGD", 0, 0.1)]
    found = advantage("small", 0.2)(table)
    assert (round(found.value, 12), round(found.error, 12)) == (0.15, 0.05)
    assert round(advantage("small", 0.2, "train")(table).value, 12) == -0.15
    assert round(accuracy("TbV", "small", 0.2, "train")(table).value, 12) == 0.85
    assert round(fitted("small", 0.2, "TbT", "TbV")(table), 12) == 0.85
    assert math.isnan(advantage("small", 0.2)([*table, end("TbT", 2, 0.11), end("TbV", 2, 0.9)]).value)
    with pytest.raises(ValueError, match="no rows"):
        advantage("small", 0.0)(table)
    assert [row["clean"] for row in curve_rows(table)] == [0.55, 0.7, 0.1]


@pytest.mark.parametrize("name", FIGURES)
def test_optimizers_that_are_alike_fulfil_no_figure(name):
    """Rows in which TbV is no better than TbT, or in which nothing was learned, leave claims unfulfilled at laptop size."""
    figure: Figure = get(name)

    def table(clean):
        found = []
        for job in STUDY.jobs(STUDY.parameters("laptop")):
            row = {**end(job["role"], job["seed"], clean, train=clean, noise=job["noise"]), "case": job["case"]}
            found += [
                row,
                {
                    **row,
                    "kind": "optimizer",
                    "changed": 0.9 * job["noise"],
                    "skipped": 0,
                    "updates": 9,
                    "first": 2.0,
                    "last": 1.0,
                },
            ]
        return found

    assert any(verdict.failed for verdict in figure.judge(table(0.1), "laptop"))
    if name not in ("step-size/figure-7", "step-size/figure-8", "step-size/figure-9", "step-size/figure-10"):
        assert any(verdict.failed for verdict in figure.judge(table(0.97), "laptop"))
