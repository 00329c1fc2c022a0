"""Searches for a step size at equal cost, and one step size tuned on training data (TbT) beside held-out data (TbV)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.experiments import Figure, at_least, at_most, equal, measured, rows, sizes
from theodolite.experiments.lab.panels import curves, draw_panels, scatter
from theodolite.experiments.query import select
from theodolite.experiments.step_size import paper
from theodolite.experiments.step_size.learned_optimizers import NOISE, network, samples_of
from theodolite.experiments.study import InParts, grid
from theodolite.measures.stepsize import StepSizeChoice, tune_step_size
from theodolite.models import fcn
from theodolite.results import Row
from theodolite.training import Fleet

#: A network of three layers, and its five hyperparameters: a rate for each layer, momentum, weight decay.
WIDTHS, FIVE = (32, 32), ("lr:fc1", "lr:fc2", "lr:fc3", "momentum", "weight_decay")
#: The step sizes of the fall-back without meta-gradients: twelve from 0.001 to 3.
RATES = (*(10 ** (-3 + i * 0.31609) for i in range(11)), 3.0)
#: Test runs lie on tasks of their own.
TESTS = 500_000


# Three searches, with the same number of gradients


def _searches(job: Mapping[str, Any]) -> Iterator[Row]:
    """Tune one hyperparameter or five on the digits; a row for each search."""
    x, y, *_ = samples_of({"data": "digits", "side": 8, "noise": 0.0, "seed": job["seed"]})
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(job["seed"]))
    train, valid = ((x[part], y[part]) for part in order[: sum(job["split"])].split(job["split"]))
    found = tune_step_size(
        _tanh_network,
        "sgd",
        train,
        valid,
        steps=job["steps"],
        batch_size=64,
        loss=nn.CrossEntropyLoss(),
        hyper=job["hyper"],
        seeds=job["seeds"],
        budget=job["budget"],
        seed=100 * job["seed"],
        progress=False,
    )
    count = len(job["hyper"])
    for row in found.compared:
        kept = {name: row[name] for name in ("search", "score", "fresh", "fresh_error", "gradients", "health", "won")}
        yield {"hyperparameters": count, **kept}
    yield {"hyperparameters": count, "search": "steps", "unsound": _unsound(found), "taken": len(found.trace)}


def _tanh_network(seed: int) -> nn.Module:
    return fcn(64, list(WIDTHS), 10, activation="tanh")


def _unsound(found: StepSizeChoice) -> int:
    """Steps of the gradient search that went on from a meta-gradient that is not to be trusted, and not back."""
    moved = 0
    sound: list[Row] = []
    for row, after in pairwise(found.trace):
        if row["health"] == "ok" or row["smoothed"]:
            sound.append(row)
        elif sound:  # half of the way back, in logarithms
            name = next(name for name in found.best if name.startswith("lr"))
            moved += not abs(after[name] ** 2 / (row[name] * sound[-1][name]) - 1) < 1e-6
        else:
            moved += not all(after[name] <= row[name] for name in found.best if name.startswith("lr"))
    return moved


# One step size, by the loss on the data trained on and by that on other data


def _splits(job: Mapping[str, Any]) -> Iterator[Row]:
    """The best of twelve step sizes by either loss, and the accuracy on clean test labels of networks trained with each.

    Tasks are fresh subsets of data whose labels were made noisy once. Their labels are not permuted: the network starts with its
    classes in no order.
    """
    found = samples_of({"data": "digits", "side": 8, "noise": job["noise"], "seed": job["seed"]})
    n, steps, count = job["n"], job["steps"], job["tasks"]

    def subset(seed: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(len(found.x), generator=torch.Generator().manual_seed(seed))[: 2 * n]
        return chosen[:n], chosen[n:]

    def task(seed: int) -> tuple[Any, Any]:
        train, valid = ((found.x[rows], found.y[rows]) for rows in subset(seed))
        return train, valid

    start, tests = 1000 * job["seed"], [TESTS + 1000 * job["seed"] + i for i in range(count)]
    make = partial(network, inputs=64, widths=(20,))
    loss = nn.CrossEntropyLoss()
    chosen = tune_step_size(
        make, "sgd", tasks=task, steps=steps, batch_size=32, loss=loss, values={"lr": RATES}, seeds=count, search="sweep",
        compare=False, seed=start, progress=False,
    )  # fmt: skip
    assert chosen.by_valid is not None
    pair = (chosen.by_train["lr"], chosen.by_valid["lr"])
    fleet = Fleet(make, 2 * tests, loss=loss, rate=[rate for rate in pair for _ in tests])
    index = torch.stack([subset(seed)[0] for seed in 2 * tests])
    trace = fleet.train(
        (found.x, found.y),
        steps=steps,
        batch_size=32,
        index=index,
        test=(found.x_test, found.clean),
        every=[steps],
        progress=False,
    )
    assert trace.test_accuracy is not None
    by_train, by_valid = trace.test_accuracy[:, -1].view(2, -1).mean(1).tolist()
    shared = {"noise": job["noise"]}
    yield {**shared, "rate": "chosen", "by_train": pair[0], "by_valid": pair[1], "ratio": pair[0] / pair[1],
        "clean_train": by_train, "clean_valid": by_valid, "gap": by_valid - by_train, "overfits": chosen.overfits}  # fmt: skip
    for row in chosen.curve:
        yield {**shared, "rate": "tried", "lr": row["lr"], "train": row["train"], "valid": row["valid"]}


class EqualCost(InParts):
    """What searches find, and what they are scored on."""

    sizes = sizes(
        tiny={"split": (200, 200), "steps": 20, "seeds": 1, "runs": 1, "budgets": (27, 36), "n": 60, "tasks": 2, "horizon": 60},
        laptop={
            "split": (800, 500),
            "steps": 150,
            "seeds": 3,
            "runs": 3,
            "budgets": (81, 243),
            "n": 150,
            "tasks": 10,
            "horizon": 500,
        },
        paper={
            "split": (800, 500),
            "steps": 500,
            "seeds": 10,
            "runs": 3,
            "budgets": (81, 243),
            "n": 150,
            "tasks": 10,
            "horizon": 500,
        },
    )
    parts: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]]] = {"searches": _searches, "splits": _splits}

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for hyper, budget in zip((("lr",), FIVE), p.budgets, strict=True):
            shared = {"part": "searches", "hyper": hyper, "budget": budget, "seeds": p.runs, "split": p.split, "steps": p.steps}
            yield from grid(shared, *shared, seed=range(p.seeds))
        shared = {"part": "splits", "n": p.n, "tasks": p.tasks, "steps": p.horizon}
        yield from grid(shared, *shared, noise=(NOISE, 0.0), seed=range(p.seeds))


searches, splits = rows(part="searches"), rows(part="splits", rate="chosen")
noisy, clean = splits(noise=NOISE), splits(noise=0.0)
ran = searches(search=["sweep", "random", "gradient"])
one, five = ran(hyperparameters=1), ran(hyperparameters=5)


def _spread_of_costs(found: list[Row]) -> float:
    """The largest relative difference between the gradients of the searches of one tuning."""
    by_tuning: dict[Any, list[float]] = {}
    for row in found:
        by_tuning.setdefault((row["hyperparameters"], row["seed"]), []).append(row["gradients"])
    return max(max(costs) / min(costs) - 1 for costs in by_tuning.values())


def _won(found: list[Row], name: str) -> float:
    winners = [row["search"] for row in found if row["won"]]
    return winners.count(name) / len(winners)


#: Why a claim does not hold at a size.
TINY = {"tiny": "after 60 steps on 60 samples little of the noise is learned: the gain is 0.004"}


class EqualCostFigure(Figure):
    """Which search finds the best step size at equal cost, and what the step size should be scored on.

    A sweep, random search and steps along the meta-gradient tune one and five hyperparameters on the digits with the same number
    of gradients; their best settings run on fresh seeds. Beside it the robust form of the learned optimizers' claim: one step
    size of SGD, chosen by the loss on the data trained on or on held-out data, with labels that are noisy and not.
    """

    study, id = EqualCost(), "step-size/equal-cost"
    where = "Wang et al. 2021, sections 4 and 5: train-by-train against train-by-validation, for one step size of SGD"
    claims = {
        "searches of one tuning take the same number of gradients (largest relative difference)": at_most(
            0.02, ran.measure(_spread_of_costs)
        ),
        "steps that follow a meta-gradient that explodes, vanishes or jumps": equal(0, searches(search="steps")["unsound"].sum()),
        "one hyperparameter, fresh seeds: mean loss after the sweep": measured(one(search="sweep").mean("fresh")),
        "one hyperparameter, fresh seeds: mean loss after random search": measured(one(search="random").mean("fresh")),
        "one hyperparameter, fresh seeds: mean loss after gradient search": measured(one(search="gradient").mean("fresh")),
        "five hyperparameters, fresh seeds: mean loss after a sweep over two": measured(five(search="sweep").mean("fresh")),
        "five hyperparameters, fresh seeds: mean loss after random search": measured(five(search="random").mean("fresh")),
        "five hyperparameters, fresh seeds: mean loss after gradient search": measured(five(search="gradient").mean("fresh")),
        "five hyperparameters: share of tunings that gradient search wins": measured(five.measure(_won, "gradient")),
        "five hyperparameters: share of tunings that the sweep wins": measured(five.measure(_won, "sweep")),
        "noisy labels: the rate chosen on the data trained on, over that on held-out data (least)": at_least(
            1.0, noisy["ratio"].min(), **paper("TbT chooses the larger step size", "section 4")
        ),
        "noisy labels: accuracy on clean labels that held-out data gain (least)": at_least(
            0.02, noisy["gap"].min(), fails=TINY, **paper("TbT is worse on test data", "section 5")
        ),
        "without noise the gain is smaller (mean gain with noise minus without)": at_least(
            0.0, noisy.mean("gap") - clean.mean("gap")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        tried = [row for row in select(rows, part="splits") if row["rate"] == "tried" and row["noise"] == NOISE]
        long = [
            {"lr": row["lr"], "loss": row[split], "on": words, "seed": row["seed"]}
            for split, words in (("train", "data trained on"), ("valid", "held-out data"))
            for row in tried
        ]
        compared = [row for row in select(rows, part="searches") if row["search"] != "steps"]
        found = [{**row, "of": f"{row['search']}, {row['hyperparameters']}"} for row in compared]
        look: dict[str, Any] = {"xlabel": "loss on the seeds tuned on", "ylabel": "loss on fresh seeds", "identity": True}
        return draw_panels(
            curves(long, "lr", "loss", by="on", log="xy", xlabel="learning rate", ylabel="loss after the last step"),
            scatter(found, "score", "fresh", by="of", **look),
            size=(4.6, 3.6),
        )
