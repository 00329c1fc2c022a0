"""One small result of every class, as a user gets it. Most come out of a handful of calls that hold many results each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import nn

import theodolite as th
from theodolite.analyses.dictionary_study import DictionaryPlan, study_dictionary
from theodolite.data.generators import exact_anchor_world
from theodolite.measures.anchors import anchored_logits, compare_prompts, compare_readouts
from theodolite.measures.dictionary import LearningSettings, atom_matches, learn_dictionaries, reconstruction_loss
from theodolite.measures.dictionary.structure import atom_usage
from theodolite.measures.dynamics import choose_batch_size, match_table, split_loss
from theodolite.models import fcn_graph
from theodolite.monitors.log import fold
from theodolite.results import Result


def held_in(value: Any) -> Iterator[Result]:
    """A result and all results in its fields."""
    if isinstance(value, Result):
        yield value
        value = [getattr(value, f.name) for f in fields(value)]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ():
        yield from held_in(part)


def classifier(seed: int = 0) -> th.Problem:
    torch.manual_seed(0)
    x, y = torch.randn(40, 4).double(), torch.randint(3, (40,))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return th.Problem(model, nn.CrossEntropyLoss(), [(x[:25], y[:25]), (x[25:], y[25:])])


def regression() -> th.Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(6, 2).double()
    return th.Problem(model, nn.MSELoss(), (x, x[:, :1] * x[:, 1:]))


def survey() -> Result:
    return th.survey(classifier(), lr=0.1)


def plan() -> Result:
    return th.instruments.plan_survey(classifier(), budget="60s")


def comparison() -> Result:
    return th.compare({"first": classifier(0), "second": classifier(1)}, k=4)


def linearity() -> Result:
    return th.linearity(regression(), directions=2, segments=3)


def full_approximation() -> Result:
    return th.measures.hessian.full_hessian_approximation(classifier(), 5)


def kronecker_factors() -> Result:
    return th.kronecker_factors(classifier())


def kronecker_eigenpairs() -> Result:
    return next(iter(th.kronecker_factors(classifier()).values())).top_eigenpairs(4)


def trajectory() -> Result:
    problem = regression()

    def run() -> Iterator[nn.Module]:
        for _ in range(3):
            yield problem.model
            with torch.no_grad():
                for p in problem.model.parameters():
                    p.mul_(0.9)

    return th.measures.hessian.track_eigenpairs(problem, run(), k=2, labels=(0, 10, 20))


def maximum_rate() -> Result:
    x = torch.ones(1, 1).double()
    return th.find_max_learning_rate(th.Problem(nn.Linear(1, 1, bias=False).double(), nn.MSELoss(), (x, 0 * x)), progress=False)


def sweep() -> Result:
    return th.catapult_sweep(regression(), ratios=[0.5, 1.2], models=["network", "linear"], steps=30, progress=False)


def width() -> Result:
    return th.measures.linearity.dag_width(fcn_graph(4, [60, 60]))


def trace() -> Result:
    problem = regression()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    return th.train(problem.model, nn.MSELoss(), regression_data(problem), optimizer, steps=5)


def regression_data(problem: th.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    batch = next(iter(problem.data))
    return batch.args[0], batch.target


def fleet_trace() -> Result:
    x = torch.randn(12, 3)
    return th.Fleet(lambda seed: nn.Linear(3, 1), [0, 1, 2], loss=nn.MSELoss(), rate=0.1).train((x, x[:, :1]), steps=4)


def monitor_report() -> Result:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = th.Monitor(loss)
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    for step in range(20):
        rows = torch.randint(60, (20,))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        monitor.observe(step, model, (x[rows], y[rows]), optimizer)
        optimizer.step()
    return monitor.report()


def catapult_report() -> Result:
    problem = regression()
    data = regression_data(problem)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    driver = th.MultiCatapult(problem.model, nn.MSELoss(), data, optimizer, raises=1)
    th.train(problem.model, nn.MSELoss(), data, optimizer, schedule=driver, steps=60)
    return driver.report()


def stability() -> Result:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    pool, test = (x[:200], (x[:200, 0] > 0).long()), (x[200:], (x[200:, 0] > 0).long())
    settings: dict[str, Any] = {"sizes": [20, 40, 80], "pairs": 4, "steps": 60, "batch_size": 10, "rate": 0.1}
    return th.stability(lambda seed: nn.Linear(4, 2), "sgd", pool, test, loss=nn.CrossEntropyLoss(), paths=1, **settings)


def power_fit() -> Result:
    return th.measures.stability.fit_power_law([100, 200, 400], [[1.0, 0.8], [0.5, 0.4], [0.25, 0.2]])


def windows() -> Result:
    return th.measures.stability.slope_windows([1, 2, 4, 8], [8.0, 4.0, 2.0, 1.9])


def explanation() -> Result:
    return th.measures.stability.explains(stability())


def convex() -> Result:
    return th.measures.stability.convex_bounds(
        largest_input=2.0, largest_test_input=3.0, rate=0.1, batch=4, visits=5, smoothness=1.0
    )


def path() -> Result:
    model = nn.Linear(4, 3)
    data = torch.randn(12, 4), torch.randint(3, (12,))
    return th.linear_path(model, copy.deepcopy(model.state_dict()), nn.Linear(4, 3).state_dict(), data)


def matches() -> Result:
    return match_table([False, True, True, None], losses=[1.0, 0.5, 0.9, 0.4, 0.3])


def split() -> Result:
    return split_loss(torch.diag(torch.tensor([9.0, 1.0, 0.1])), torch.tensor([3.0, 1.0, 1.0]), ranks=(1, 2))


def dictionary_study() -> Result:
    torch.manual_seed(0)
    return study_dictionary(torch.randn(60, 8), DictionaryPlan(epochs=1, sizes=(6, 8), sparsities=(1,), batch_size=20))


def learned_dictionaries() -> Result:
    signals = torch.randn(20, 6)
    return learn_dictionaries(signals, torch.randn(1, 5, 6), LearningSettings(sparsity=2, batch_size=10), epochs=1)


def coding_loss() -> Result:
    return reconstruction_loss(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.eye(2), 1)


def atoms_matched() -> Result:
    return atom_matches(torch.eye(3), torch.eye(3).flip(0))


def usage() -> Result:
    return atom_usage(torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.0, 3.0]]), torch.tensor([[1.0, 0], [0, 1.0], [0.6, -0.8]]))


def hidden_error() -> Result:
    return th.dictionary.hidden_error(torch.randn(20, 10), torch.randn(8, 10), 2, masks=3)


def isometry() -> Result:
    return th.dictionary.restricted_isometry(torch.eye(4), 2)


def probe() -> Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 50))
    return th.anchor_probe(model, torch.randn(400, 6), top=(0, 5), anchors=2)


@cache
def _world() -> tuple[Any, th.anchors.LogLinear, torch.Tensor, torch.Tensor]:
    world = exact_anchor_world(seed=0)
    model = th.anchors.LogLinear(world.states, world.atoms)
    return world, model, torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), anchored_logits(model, world.anchor, world.labels)


def certificate() -> Result:
    world, teacher, signs, u = _world()
    student = th.anchors.LogLinear(world.states, world.atoms * 1.01)
    return th.anchors.transfer_certificate(teacher, student, labels=world.labels, a=signs, b=u.quantile(0.25, dim=0))


def readouts() -> Result:
    world, model, signs, u = _world()
    classes = (u @ signs).sign()
    return compare_readouts(model, classes, labels=world.labels, anchor=world.anchor)


def prompts() -> Result:
    world, model, signs, u = _world()
    models = {"first": model.at(slice(0, 500)), "second": model.at(slice(500, 900))}
    return compare_prompts(models, labels=world.labels, a=signs, b=u.quantile(0.25, dim=0))


def targets() -> Result:
    return th.measures.data_audit.audit_targets(regression())


def validation() -> Result:
    problem = classifier()
    return th.measures.data_audit.audit_validation(problem, problem.with_batches([next(iter(problem.data))]))


SOURCES: list[Callable[[], Result]] = [
    survey, plan, comparison, linearity, full_approximation, kronecker_factors, kronecker_eigenpairs, trajectory, maximum_rate,
    sweep, width, trace, fleet_trace, monitor_report, catapult_report, stability, power_fit, windows, explanation, convex, path,
    matches, split, dictionary_study, learned_dictionaries, coding_loss, atoms_matched, usage, hidden_error, isometry, probe,
    certificate, readouts, prompts, targets, validation,
]  # fmt: skip


def batch_sizes() -> Result:
    return choose_batch_size(classifier(), 0.1, batch_size=4, steps=8)


def two_runs() -> Result:
    runs = [
        [{"kind": "step", "step": t, "loss": 2.0 / (t + k), "gradient_norm": 1.0, "rate": 0.1} for t in range(12)] for k in (1, 2)
    ]
    return th.compare_runs(*(fold(run) for run in runs))


def risk() -> Result:
    problem = classifier().on((torch.randn(60, 4).double(), torch.arange(60) % 3))
    start = {name: p + 0.1 for name, p in problem.model.state_dict().items()}
    return th.pac_bayes_bound(problem, start=start, epochs=2, passes=1, progress=False)


def deeper() -> list[Result]:
    """A network that is grown, a trial of operators, a study of them, and stacking in stages; without the models."""

    def build(layers: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), *(nn.Linear(5, 5) for _ in range(layers)), nn.Linear(5, 3)).double()

    x, y = torch.randn(48, 4).double(), torch.arange(48) % 3
    data, valid, loss = (x[:32], y[:32]), (x[32:], y[32:]), nn.CrossEntropyLoss()
    model, rate = build(2), {"schedule": 0.1, "batch_size": 8, "validation": valid, "progress": False}
    grown = th.grow(model, "last", layers=3, data=data, loss=loss)
    names = {"operators": ["last", "random-top"], "layers": 3, "baselines": ("small",)}
    choice = th.landscape_aware_growth(model, loss, data, "sgd", lag=3, every=1, **names, **rate)
    study = th.growth_study(model, loss, data, "sgd", steps=2, seeds=2, every=1, **names, **rate)
    stages = th.adaptive_stacking(build, loss, data, optimizer="sgd", stages=[(2, 2), (3, 3)], lag=1, **rate)
    layers = th.measures.growth.ablate_layers(th.Problem(model, loss, data))
    return [layers, replace(grown, model=None), *(replace(one, model=None, optimizer=None) for one in (choice, stages)), study]


def step_sizes() -> list[Result]:
    """What a quadratic, least-squares tasks, a training, its tuning and a learned optimizer say of the step size."""
    sizes, values, w0 = th.measures.stepsize, torch.tensor([4.0, 1.0]), torch.ones(2)
    quadratic = [
        th.stable_meta_gradient(values, w0, [0.1, 0.2], 5),
        th.meta_gradient_health(values, w0, [0.1, 1.0], [5, 50], dtype=torch.float32),
        sizes.optimal_rate(values, w0, 5),
        sizes.descend_rate(values, w0, 0.1, 5, updates=3),
    ]
    tasks = [
        sizes.least_squares_curves(6, 4, sigmas=[1.0, 2.0], rates=[0.01, 0.1], tasks=3),
        sizes.least_squares_scores(6, 4, [0.01, 0.1], tasks=3),
        sizes.sgd_risk(sizes.draw_tasks(4, 3, 2), [0.1], 3),
    ]
    x, y = torch.randn(48, 4), torch.arange(48) % 3
    train, valid, loss = (x[:32], y[:32]), (x[32:], y[32:]), nn.CrossEntropyLoss()

    def build(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))

    how: dict[str, Any] = {"steps": 4, "loss": loss, "progress": False}
    trainings = [
        th.meta_gradient(build, "sgd", train, valid, lr=0.1, **how),
        th.tune_step_size(build, "sgd", train, valid, seeds=1, budget=6, compare=False, **how),
        th.meta_train(
            build, train, valid, loss=loss, problems=2, together=2, segments=(2, 0), length=(3, 0), progress=False
        ),
    ]  # fmt: skip
    return [*quadratic, *tasks, *trainings]


SOURCES += [batch_sizes, two_runs, risk, deeper, step_sizes]


@cache
def samples() -> dict[str, Result]:
    """The first result of each class, by its name."""
    found: dict[str, Result] = {}
    for source in SOURCES:
        torch.manual_seed(0)
        for result in held_in(source()):
            found.setdefault(type(result).__name__, result)
    return found
