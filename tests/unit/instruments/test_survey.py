"""The survey itself: plan, budget, failures, what is left behind, saving, the page."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import base, registry
from theodolite.instruments.planning import Price, Step, fit, fit_memory
from theodolite.instruments.survey_run import _NOT_GIVEN, open_context, seconds_of
from theodolite.instruments.timings import Work, measure_timings
from theodolite.results import Severity

EVIL = "<script>alert(1)</script>"
#: A survey does not speak of what concerns language models only.
#: Those that a survey of a small classifier without validation data, checkpoints and small batches runs.
NAMES = set(th.instruments.names()) - {
    "anchors",
    "batch_size",
    "targets",
    "validation",
    "path",
    "stability",
    "certificate",
    "step_size",
    "depth",
}


def problem(hidden: int = 10, samples: int = 90, **more) -> th.Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    return th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(samples, 5), torch.arange(samples) % 3), **more)


@pytest.fixture(scope="module")
def surveyed() -> th.instruments.Survey:
    return th.survey(problem(), lr=0.1, name=EVIL, progress=False)


def test_every_instrument_reports_and_every_number_has_its_place(surveyed):
    assert set(surveyed.results) == NAMES
    assert {f.instrument for f in surveyed.findings} >= NAMES - {"trials", "labels"}
    assert all(row["state"] == "done" for row in surveyed.plan)
    ranks = [f.severity.rank for f in surveyed.findings if not f.headline]
    assert ranks == sorted(ranks, reverse=True)
    assert surveyed.sound
    for finding in surveyed.findings:
        assert finding.sentence.endswith(".")
        assert finding.source
        assert finding.value is None or finding.quantity
    assert surveyed.to_frame().shape[0] == len(surveyed.findings)
    assert surveyed.verdict in str(surveyed)


def test_the_page_shows_findings_pictures_and_costs_and_escapes_names(surveyed, tmp_path):
    page = surveyed.to_html(tmp_path / "deep" / "index.html")
    text = page.read_text()
    assert len(text) < 3_000_000
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert text.count("<svg id=") >= 5
    assert "could not be drawn" not in text
    for name in NAMES:
        assert f'id="section-{name.replace("_", "-")}"' in text
    assert not re.search(r'(src|href)="(?!#)(?!https?://)(?!data:image/)', text)


def test_the_table_of_the_spectrum_loses_nothing(surveyed):
    """Also where the largest magnitude is negative and lies on the first edge."""
    matrix = torch.diag(torch.cat([torch.tensor([-1000.0]), torch.linspace(9.0, 1.0, 39)]).double())
    for density in (surveyed.results["density"], th.spectral_density(matrix, probes=4, steps=40)):
        shares = [row["share of directions"] for row in registry.get("density").rows(density)]
        assert sum(shares) == pytest.approx(1.0, abs=1e-9)


def test_a_saved_survey_comes_back_with_its_page(tmp_path):
    surveyed = th.survey(problem(), only=["curvature", "trace"], name=EVIL, progress=False)
    surveyed.save(tmp_path / "survey")
    back = th.load(tmp_path / "survey")
    assert isinstance(back, th.instruments.Survey)
    assert [f.row() for f in back.findings] == [f.row() for f in surveyed.findings]
    assert torch.equal(back.results["curvature"].values, surveyed.results["curvature"].values)
    assert back.to_html(tmp_path / "index.html").stat().st_size > 10_000


def test_the_seed_decides_everything_random():
    first, second = (th.survey(problem(), lr=0.1, seed=3, only=["trace", "density"], progress=False) for _ in range(2))
    assert first.results["trace"].value == second.results["trace"].value
    assert torch.equal(first.results["density"].density, second.results["density"].density)
    assert th.survey(problem(), seed=4, only=["trace"]).results["trace"].value != first.results["trace"].value


def test_the_model_is_left_as_found():
    target = problem()
    model = target.model.train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    random = torch.get_rng_state()
    th.survey(target, optimizer=optimizer, progress=False)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[2].weight.grad is None
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(random, torch.get_rng_state())


def test_only_runs_what_is_asked_and_what_that_needs():
    found = th.survey(problem(), only=["alignment"], progress=False)
    assert set(found.results) == {"batches", "curvature", "alignment"}
    assert set(th.survey(problem(), only="trace").results) == {"batches", "trace"}
    with pytest.raises(ValueError, match=r"'curvatur'.*curvature"):
        th.survey(problem(), only=["curvatur"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr must be positive"),
        ({"lr": float("inf")}, "lr must be positive"),
        ({"lr": "0.1"}, "lr must be positive"),
        ({"optimizer": "adam"}, "has no learning rate"),
        ({"loss": nn.MSELoss()}, "its own loss and data"),
        ({"budget": "soon"}, "60s"),
        ({"budget": 0}, "positive time"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        th.survey(problem(), **arguments)


def test_a_bare_model_needs_its_loss_and_data():
    with pytest.raises(ValueError, match=r"survey\(model, loss, data\)"):
        th.survey(nn.Linear(2, 2))


def test_an_optimizer_may_be_a_function_of_the_parameters():
    found = th.survey(problem(), optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), only=["rate"])
    assert "β = 0.9" in found.of("rate")[0].sentence
    assert found.facts["learning rate"] == "0.05"


def test_what_the_optimizer_does_not_train_is_not_measured():
    model = problem().model
    data = (torch.randn(30, 5), torch.arange(30) % 3)
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    found = th.survey(model, nn.CrossEntropyLoss(), data, optimizer=head, only=["rate"])
    assert found.facts["parameters"] == "33 in 1 layer"
    assert found.of("rate")


def test_an_optimizer_without_a_law_is_said_so():
    target = problem()
    found = th.survey(target, optimizer=torch.optim.Adadelta(target.parameters, lr=0.1), only=["rate"])
    (row,) = [row for row in found.plan if row["instrument"] == "rate"]
    assert row["state"] == "skipped"
    assert "Adadelta" in row["reason"]
    assert found.sound


class Broken(base.Instrument):
    name, title, question, how = "broken", "Broken", "?", "."

    def cost(self, context, **effort):
        return Work()

    def run(self, context, **effort):
        raise RuntimeError("no such thing")

    def findings(self, context, result):
        return []


def test_a_failing_instrument_is_reported_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_OWN", {})
    th.instruments.register(Broken)
    found = th.survey(problem(), only=["broken", "trace"], progress=False)
    assert {row["instrument"]: row["state"] for row in found.plan} == {"batches": "done", "trace": "done", "broken": "failed"}
    (failed,) = found.of("broken")
    assert "RuntimeError: no such thing" in failed.sentence
    assert failed.severity is Severity.WARNING
    assert not found.sound
    found.to_html(tmp_path / "index.html")


def test_a_remedy_that_cannot_be_made_leaves_the_result_and_no_other_finding(monkeypatch):
    def remedies(self, context, result):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(type(registry.get("progress")), "remedies", remedies)
    found = th.survey(problem(), lr=0.1, only=["progress"], progress=False)
    assert [finding.label for finding in found.of("progress")] == ["failed"]
    assert found.results["progress"].loss > 0


def test_validation_data_stand_under_the_same_time_limit_and_their_nan_is_a_finding():
    target, x = problem(), torch.randn(20, 5)
    given = {"lr": 0.1, "optimizer": None}
    for valid in ((x, torch.arange(20) % 3), target.on((x, torch.arange(20) % 3))):
        context = open_context(target, _NOT_GIVEN, None, valid=valid, **given)
        assert context.valid.time_limit is context.problem.time_limit
    x[3, 2] = math.nan
    found = th.survey(target, valid=(x, torch.arange(20) % 3), lr=0.1, progress=False)
    assert found.labels() == ["not finite"]
    assert "valid" in found.verdict


def test_a_failed_instrument_that_decides_is_said_in_the_verdict(monkeypatch):
    def run(self, context, **effort):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(registry.get("learning_rate").__class__, "run", run)
    found = th.survey(problem(), lr=0.1, only=["learning_rate", "progress"], progress=False)
    assert "The learning rate could not be measured" in found.verdict
    assert "Nothing was found" not in found.verdict


@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float32])
def test_a_model_in_half_precision_is_trained_and_scored_on_its_own_data(inputs):
    model, x = problem().model.bfloat16(), torch.randn(90, 5).to(inputs)
    names = ["learning_rate", "progress", "settings", "trials"]
    found = th.survey(model, nn.CrossEntropyLoss(), (x, torch.arange(90) % 3), lr=1e3, only=names, progress=False)
    assert {row["state"] for row in found.plan} == {"done"}
    assert "rate too high" in found.causes


def test_an_optimizer_that_needs_a_closure_is_skipped_with_that_reason():
    target = problem()
    names = ["learning_rate", "progress", "gradients"]
    found = th.survey(target, optimizer=torch.optim.LBFGS(target.parameters, lr=0.1), only=names, progress=False)
    assert {row["reason"] for row in found.plan if row["instrument"] in names} == {
        "LBFGS needs a closure for each step, and runs on copies make theirs without one."
    }
    assert found.sound


def test_keyboard_interrupt_is_not_swallowed(monkeypatch):
    def run(self, context, **effort):
        raise KeyboardInterrupt

    monkeypatch.setattr(Broken, "run", run)
    monkeypatch.setattr(registry, "_OWN", {"broken": Broken})
    with pytest.raises(KeyboardInterrupt):
        th.survey(problem(), only="broken", progress=False)


def test_a_model_without_second_derivatives_still_gets_its_first_order_survey():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.bag(x))

    torch.manual_seed(0)
    found = th.survey(Bag(), nn.CrossEntropyLoss(), (torch.randint(0, 9, (30, 5)), torch.arange(30) % 3), progress=False)
    assert {"batches", "weighting", "parameters", "noise"} <= set(found.results)
    skipped = {row["instrument"]: row["reason"] for row in found.plan if row["state"] == "skipped"}
    assert "EmbeddingBag" in skipped["curvature"]
    assert not found.good  # much of it could not be looked at


def test_a_gradient_of_another_function_is_said_first():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            z = self.linear(x)
            return z + ((4 * z).round() / 4 - z).detach()

    torch.manual_seed(0)
    with pytest.warns(th.errors.DerivativeWarning):
        found = th.survey(Quantised(), nn.CrossEntropyLoss(), (torch.randn(24, 5), torch.arange(24) % 3), progress=False)
    assert found.findings[0].label == "gradient of another function"


class TwoHeads(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.mean, self.score, self.form = nn.Linear(5, 2), nn.Linear(5, 3), form

    def forward(self, x):
        return self.form(self.mean(x), self.score(x))


def of_both(output, target):
    mean, score = output.values() if isinstance(output, dict) else output
    return nn.functional.mse_loss(mean, target["value"]) + nn.functional.cross_entropy(score, target["label"])


OF_BOTH = ["parameters", "kernel", "features", "linearity"]


@pytest.mark.parametrize(
    ("form", "only"),
    [(lambda a, b: (a, b), ["curvature", "rate", "trace", *OF_BOTH]), (lambda a, b: {"mean": a, "score": b}, None)],
    ids=["tuple", "mapping"],
)
def test_a_model_with_several_outputs_and_a_loss_of_all_of_them_is_surveyed(form, only):
    torch.manual_seed(0)
    target = {"value": torch.randn(24, 2), "label": torch.arange(24) % 3}
    found = th.survey(TwoHeads(form), of_both, (torch.randn(24, 5), target), lr=0.1, only=only, progress=False)
    assert {"batches", "curvature", "rate", "trace"} <= set(found.results)
    assert found.of("rate")
    assert not {"unused parameters", "unused inputs"} & set(found.labels())  # the second output has its own
    assert set(OF_BOTH) <= set(found.results)  # of both outputs as one


def test_graphs_of_different_sizes_count_as_samples():
    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, nodes, edges):
            gathered = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
            return self.linear(gathered).mean(0, keepdim=True)

    torch.manual_seed(0)
    data = [((torch.randn(6 + i, 4), torch.randint(0, 6, (2, 12))), torch.tensor([i % 3])) for i in range(4)]
    found = th.survey(Graphs(), nn.CrossEntropyLoss(), data, lr=0.1, progress=False)
    assert found.facts["samples"].startswith("4 in 4 batches")
    assert {"curvature", "rate"} <= set(found.results)


# Plans and budgets


def test_the_plan_names_every_instrument_with_its_price():
    plan = th.instruments.plan_survey(problem(), lr=0.1)
    assert [row["instrument"] for row in plan.rows()] == [name for name in th.instruments.names() if name in NAMES]
    assert plan.seconds > 0
    assert plan.gradients == pytest.approx(plan.seconds / plan.gradient_seconds)
    assert plan.peak_bytes > 0
    assert "gradients" in str(plan)
    assert sum(row["seconds"] for row in plan.rows() if row["seconds"]) <= plan.seconds


def steps_of(*prices: tuple[float, ...], needs: dict[int, tuple[str, ...]] | None = None) -> list[Step]:
    steps = []
    for i, efforts in enumerate(prices):
        kind = type(f"I{i}", (Broken,), {"name": f"i{i}", "needs": (needs or {}).get(i, ())})
        steps.append(Step(kind(), tuple(Price({}, seconds, seconds, 0) for seconds in efforts)))
    return steps


def test_memory_limits_efforts_too():
    kind = type("Big", (Broken,), {"name": "big"})
    step = Step(kind(), (Price({"k": 9}, 1.0, 1.0, 8 * 2**30), Price({"k": 1}, 0.5, 0.5, 2**30)))
    assert fit_memory([step], 4 * 2**30)[0].price.effort == {"k": 1}
    assert "GiB of memory" in fit_memory([step], 2**20)[0].reason
    assert fit_memory([step], 16 * 2**30)[0].price.effort == {"k": 9}


def test_an_instrument_keeps_nothing_of_an_earlier_site():
    layers = registry.get("layers")
    small, large = (base.SurveyContext(problem(hidden=h)) for h in (4, 9))
    layers.cost(small, k=1)
    sizes = [pairs.vectors.shape[0] for pairs in layers.run(large, k=1).values()]
    assert sizes == [45, 27]


def test_old_weight_norm_can_be_copied():
    torch.manual_seed(0)
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(5, 4))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))
    data = (torch.randn(20, 5), torch.arange(20) % 3)
    model(data[0])  # leaves a computed weight behind
    found = th.survey(model, nn.CrossEntropyLoss(), data, lr=0.1, only=["rate"])
    assert found.of("rate")[0].label == "monotone"


def test_a_warm_up_that_begins_at_zero_and_batch_norm_in_one_batch():
    target = problem()
    found = th.survey(target, optimizer=torch.optim.SGD(target.parameters, lr=0.0), only=["rate"])
    assert found.of("rate")[0].label == "critical rate"
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    coupled = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(20, 5), torch.arange(20) % 3), mode="train")
    found = th.survey(coupled, only=["noise"])
    assert found.sound
    assert {row["instrument"]: row["state"] for row in found.plan}["noise"] == "skipped"


def test_the_rate_of_a_warm_up_from_zero_is_looked_for_and_a_resting_group_does_not_hide_the_others_rate():
    target = problem()
    optimizer = torch.optim.SGD(target.parameters, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    found = th.survey(target, optimizer=optimizer, only=["learning_rate"])
    assert found.of("learning_rate")[0].label == "suggested rate"
    resting, moving = target.parameters[:1], target.parameters[1:]
    groups = torch.optim.SGD([{"params": resting, "lr": 0.0}, {"params": moving, "lr": 0.05}])
    assert base.SurveyContext(target, optimizer=groups).lr == 0.05


def test_the_batch_size_that_is_not_given_is_that_of_the_data_or_the_usual_one():
    x, y = torch.randn(90, 5), torch.arange(90) % 3
    assert base.SurveyContext(problem(), batch_size=7).usual_batch_size == 7
    assert base.SurveyContext(problem()).usual_batch_size == 32
    assert base.SurveyContext(problem().on([(x[i : i + 10], y[i : i + 10]) for i in range(0, 90, 10)])).usual_batch_size == 10


def test_a_loaders_own_generator_is_left_as_found():
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(20, 5), torch.arange(20) % 3)
    loader = torch.utils.data.DataLoader(data, batch_size=7, shuffle=True, generator=generator)
    before = generator.get_state()
    th.Problem(problem().model, nn.CrossEntropyLoss(), loader)
    assert torch.equal(before, generator.get_state())


def test_a_budget_lowers_efforts_before_it_drops_instruments():
    steps = steps_of((10.0, 1.0), (10.0, 1.0), (10.0, 1.0))
    assert [s.choice for s in fit(steps, None)] == [0, 0, 0]
    assert [s.choice for s in fit(steps, 30.0)] == [0, 0, 0]
    assert [s.choice for s in fit(steps, 12.5)] == [0, 1, 1]
    tight = fit(steps, 2.5)
    assert [bool(s.reason) for s in tight] == [False, False, True]
    assert "beyond the budget" in tight[2].reason


def test_what_seemed_too_dear_runs_after_all_if_there_is_time(monkeypatch):
    """Timings on a busy machine overrate everything; the survey notices as it goes."""
    overrated = lambda self, work: 1000 * (work.gradients + work.products + work.block_products) * self.gradient  # noqa: E731
    monkeypatch.setattr("theodolite.instruments.timings.Timings.seconds", overrated)
    found = th.survey(problem(), lr=0.1, budget=60, only=["curvature", "negative", "trace"], progress=False)
    assert {row["instrument"]: row["state"] for row in found.plan} == dict.fromkeys(
        ["batches", "curvature", "negative", "trace"], "done"
    )


def test_what_needs_a_dropped_instrument_is_dropped_too():
    fitted = fit(steps_of((5.0,), (0.1,), needs={1: ("i0",)}), 1.0)
    assert [bool(s.reason) for s in fitted] == [True, True]
    assert "needs i0" in fitted[1].reason


def test_a_survey_under_a_small_budget_leaves_things_out_and_says_so():
    found = th.survey(problem(hidden=40, samples=600), lr=0.1, budget=0.15, progress=False)
    reduced = [
        row for row in found.plan if row["state"] == "skipped" or row["effort"] in ("k=1", "k=5", "groups=8", "matvecs=30")
    ]
    assert reduced
    assert found.budget == 0.15
    assert all(row["reason"] for row in found.plan if row["state"] == "skipped")


def test_budgets_are_read_as_people_write_them():
    assert [seconds_of(text) for text in ("60s", "2m", "1 min", "0.5h", 7, "1e2")] == [60.0, 120.0, 60.0, 1800.0, 7.0, 100.0]


@pytest.mark.slow
def test_a_slow_problem_is_timed_on_a_part_of_its_data():
    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(1e-3 * len(x))
            return super().forward(x)

    x = torch.randn(1200, 3)
    slow = th.Problem(Slow(3, 1), nn.MSELoss(), (x, torch.zeros(1200, 1)))
    timings = measure_timings(slow)
    assert timings.share < 0.5
    assert timings.operator is None
    assert timings.gradient >= 1.15  # a sample sleeps for 1 ms, at least
