"""The chapter on growing: its text, its objectives, its runs, what is read off them, and what follows from printed numbers."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from theodolite.experiments import get
from theodolite.experiments.growing.figures import found_late, given_of_noise, regret_at, shared_transition, small_gap
from theodolite.experiments.growing.runs import (
    AT_START,
    LAST,
    ORACLE,
    SMALL,
    TOP,
    GrownRuns,
    GrownSetup,
    correlation,
    gain_of_lag,
    identity_gap,
    least_first,
    printed_rows,
    rise,
    run_of,
    spread_over_noise,
)
from theodolite.experiments.growing.small_models import (
    BRACKETS,
    IGNORED,
    LETTERS,
    Pretraining,
    Setup,
    generated_text,
    masked,
    pretrained,
    pretraining_of,
    token_loss,
)
from theodolite.experiments.query import select
from theodolite.measures.growth import growth_study
from theodolite.testing import same
from theodolite.training import train

STUDY = GrownRuns()
FIGURES = [f"growing/{name}" for name in ("figure-5.2", "figure-5.3", "figure-5.4", "table-5.1", "table-5.2", "table-C.1")]
QUICK = Setup(
    "quick", dim=8, hidden=16, heads=2, layers=2, grown=3, pretraining=4, steps=4, tokens=3000, looks=((4, 2),), held_out=16
)


# Text and objectives


def test_brackets_of_the_generated_text_are_nested():
    text = generated_text(3000)
    opened: list[int] = []
    deepest = 0
    for symbol in text.tolist():
        if symbol >= LETTERS + BRACKETS:
            assert opened.pop() == symbol - LETTERS - BRACKETS  # what was opened last
        elif symbol >= LETTERS:
            opened.append(symbol - LETTERS)
        deepest = max(deepest, len(opened))
    assert 3 <= deepest <= 6
    assert torch.equal(text, generated_text.__wrapped__(3000))
    assert not torch.equal(text, generated_text(3000, draw=1))


def test_the_two_letters_before_say_much_of_the_next():
    letters = [symbol for symbol in generated_text(10_000).tolist() if symbol < LETTERS]
    table = np.zeros((LETTERS, LETTERS))
    np.add.at(table, (letters[:-1], letters[1:]), 1)
    best = np.sort(table, axis=1)[:, -2:].sum() / table.sum()
    assert 0.6 < best < 0.8  # two successors of the last letter, seven times in ten


def test_masked_tokens_have_the_shares_of_bert():
    tokens = torch.randint(30, (400, 50), generator=torch.Generator().manual_seed(0))
    x, y = masked(tokens, 30, seed=0)
    asked = y != IGNORED
    assert float(asked.double().mean()) == pytest.approx(0.15, abs=0.01)
    assert torch.equal(y[asked], tokens[asked])
    assert torch.equal(x[~asked], tokens[~asked])
    assert float((x[asked] == 30).double().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((x[asked] == tokens[asked]).double().mean()) == pytest.approx(0.1 + 0.1 / 30, abs=0.02)


def test_growing_does_not_restart_the_schedule():
    falling = QUICK.but(rate=1.0, final_rate=0.1, pretraining=300, steps=100, warmup=10)
    assert falling.schedule(400) == pytest.approx(0.1)
    assert falling.schedule(300) < falling.schedule(299) < 0.5
    constant = QUICK.but(rate=1.0, grown_rate=0.5, pretraining=300, warmup=10)
    assert [constant.schedule(step) for step in (299, 300, 10_000)] == [1.0, 0.5, 0.5]
    assert constant.looked_at == [0, 2, 4]


def test_setups_that_differ_later_share_their_pretraining():
    def job(setup):
        return pretraining_of(setup).job

    assert job(QUICK) == job(QUICK.but(name="other", steps=9, grown=4, lag=1, operators=("last",)))
    assert job(QUICK) != job(QUICK.but(rate=0.1))
    falling = QUICK.but(final_rate=1e-4)
    assert job(falling) != job(falling.but(steps=9))  # the cosine ends elsewhere


# Runs


def stored(setup):
    """The pre-training as it comes back from the store: single numbers are plain."""
    row = Pretraining().run({"setup": pretraining_of(setup).job["setup"]})
    return {name: float(v) if v.ndim == 0 else v for name, v in row.items()}


@pytest.mark.parametrize("changes", [{}, {"adafactor": True, "rate": 0.01}, {"objective": "masked", "norm_first": False}])
def test_a_stored_model_trains_on_as_if_it_had_not_stopped(changes):
    setup = QUICK.but(**changes)
    sample, (model, optimizer) = setup.sample(), pretrained(setup, stored(setup))
    whole = setup.model()
    other = setup.optimizer(whole.parameters())
    shared = {"batch_size": setup.batch, "schedule": setup.schedule, "seed": 0, "progress": False}
    train(whole, token_loss, (sample.x, sample.y), other, steps=7, **shared)
    train(model, token_loss, (sample.x, sample.y), optimizer, steps=3, first=4, **shared)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


def test_a_job_gives_the_losses_of_a_growth_study():
    small, operators = stored(QUICK), ["0/1/copy", "1/1/random", "identity"]
    found = [row for name in operators for row in run_of(QUICK, {"operator": name, "state": "copy", "seed": 1}, small)]
    model, optimizer = pretrained(QUICK, small)
    sample = QUICK.sample()
    study = growth_study(
        model, token_loss, (sample.x, sample.y), optimizer, layers=3, validation=(sample.x_held_out, sample.y_held_out), steps=4,
        operators=operators, every=2, seeds=[1], batch_size=QUICK.batch, first=4, schedule=QUICK.schedule, progress=False,
    )  # fmt: skip
    table = {(row["operator"], row["step"]): row["loss"] for row in select(found, kind="loss")}
    wanted = {(row["operator"], row["step"]): row["loss"] for row in study.rows()}
    assert table.keys() == wanted.keys()
    assert max(abs(table[key] - wanted[key]) for key in table) < 1e-12
    assert len({row["stream"] for row in select(found, kind="end")}) == 1  # all saw the same batches


def test_the_small_model_says_what_the_runs_have_in_common():
    found = list(
        run_of(QUICK.but(objective="ul2"), {"operator": SMALL, "state": "copy", "seed": 0}, stored(QUICK.but(objective="ul2")))
    )
    (facts,) = select(found, kind="setup")
    last = max(row["step"] for row in select(found, kind="loss"))
    assert last == round(4 * facts["flops"] / facts["small_flops"]) > 4
    assert all(0 <= found[-1][task] <= 100 for task in ("last", "again"))


def test_figures_look_at_jobs_of_one_study():
    p = STUDY.parameters("tiny")
    jobs = list(STUDY.jobs(p))
    for name in (*FIGURES, "growing/hypotheses", "growing/left-open"):
        assert type(get(name).study) is GrownRuns
        assert all(job in jobs for job in get(name).chosen_jobs("tiny"))
    assert get("growing/figure-5.2").chosen_jobs("tiny") == get("growing/figure-5.3").chosen_jobs("tiny")


def test_the_paper_size_is_the_source():
    jobs = [job for job in get("growing/figure-5.2").chosen_jobs("paper") if job["operator"] not in (SMALL, "identity")]
    assert len(jobs) == 30
    setup = Setup.of(jobs[0]["setup"])
    assert (setup.layers, setup.grown, setup.pretraining, setup.steps, setup.batch) == (12, 16, 500_000, 100_000, 256)
    assert [setup.schedule(step) for step in (10_000, 500_000, 600_000)] == pytest.approx([1e-4] * 3)
    assert set(range(206)) <= set(setup.looked_at)
    assert not setup.norm_first
    ul2 = Setup.of(get("growing/figure-5.4").chosen_jobs("paper")[0]["setup"])
    assert (ul2.schedule(10_000), ul2.schedule(400_000)) == pytest.approx((0.01, 0.001), rel=0.01)
    assert 0.001 < ul2.schedule(300_000) < 0.01


def test_stories_are_left_out_where_they_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = next(job for job in STUDY.jobs(STUDY.parameters("tiny")) if job.get("name") == "stories")
    assert STUDY.needs(job) == []
    assert [row["provisional"] for row in STUDY.run(job)] == [True]


# What is read off


def planted(curves, *, seeds=2, noise=0.001, small=1.0):
    """Rows of runs with known losses: operators of a model of four layers that grows to six, looked at every ten steps."""
    facts = {"layers": 4, "grown": 6, "steps": 20, "window": 10, "lag": 10, "early": 10, "smooth": 1, "flops": 3.0}
    shared = {"setup": "gpt", "state": "copy"}
    rows = [{"kind": "setup", **shared, "operator": SMALL, "seed": 0, **facts, "small_flops": 2.0, "shares": [1.0] * 4}]
    for seed in range(seeds):
        for place, (name, losses) in enumerate({SMALL: (small, small), **curves}.items()):
            for step, loss in zip((0, 10, 20) if name != SMALL else (0, 30), losses, strict=True):
                shift = noise * (1 if (seed + place) % 2 else -1) * (step > 0)
                rows.append({"kind": "loss", **shared, "operator": name, "seed": seed, "step": step, "loss": loss + shift})
            parts = [losses[-1] + 1e-4 * i for i in range(4)]
            rows.append({"kind": "end", **shared, "operator": name, "seed": seed, "parts": parts, "stream": 1})
    return GrownSetup(rows)


CURVES = {
    "2/2/random": (1.01, 0.90, 0.86),
    "0/2/copy": (1.50, 0.88, 0.80),
    "2/2/copy": (1.40, 0.89, 0.82),
    "0,1,1,2,3,3/identity": (1.0, 0.95, 0.90),
}


def test_strategies_of_planted_runs():
    found = planted(CURVES)
    table = {row["strategy"]: row for row in found.strategies()}
    assert {name: row["operator"] for name, row in table.items()} == {
        ORACLE: "0/2/copy", "LAG@10": "0/2/copy", AT_START: "2/2/random", LAST: "2/2/copy", TOP: "2/2/random",
    }  # fmt: skip
    assert table[AT_START]["relative"] == 1.0
    assert table[LAST]["relative"] == pytest.approx(1 / 3, abs=0.02)
    assert correlation("spearman")(found) == pytest.approx(-1.0)
    assert correlation("spearman", "early")(found) == pytest.approx(1.0)
    assert gain_of_lag(found).value == pytest.approx(0.06, abs=1e-3)
    assert [regret_at(place)(found) for place in ("first", "lag")] == [1.0, 0.0]
    assert found_late(found) == 1.0
    assert shared_transition(found) is None  # within the window only its last look agrees with itself


def test_gates_of_planted_runs():
    found = planted(CURVES)
    assert least_first(found) == pytest.approx(-0.4)
    assert identity_gap(found) == 0.0
    assert rise(found) == 0.0
    assert small_gap(found) == pytest.approx(0.2, abs=1e-3)
    worse = planted({**CURVES, "0/2/copy": (0.9, 0.88, 0.80), "0,1,1,2,3,3/identity": (1.2, 0.95, 0.90)})
    assert least_first(worse) == pytest.approx(0.11)
    assert identity_gap(worse) == pytest.approx(0.2)


def test_no_rank_statistic_is_read_off_noise():
    noisy = planted({name: (*losses[:2], 0.8 + 0.001 * i) for i, (name, losses) in enumerate(CURVES.items())}, noise=0.05)
    assert spread_over_noise(noisy) < 3
    assert correlation("spearman")(noisy) is None
    assert gain_of_lag(noisy) is None
    assert regret_at("lag")(noisy) is None
    assert given_of_noise(noisy) == 0
    assert spread_over_noise(planted(CURVES)) > 3


def test_runs_that_are_missing_or_nan_are_no_study():
    found = planted(CURVES)
    rows = [{k: math.nan if isinstance(v, int | float) else v for k, v in row.items()} for row in found.rows]
    for broken in (rows, [row for row in found.rows if (row["operator"], row["seed"], row.get("step")) != ("0/2/copy", 1, 10)]):
        with pytest.raises((ValueError, KeyError)):
            GrownSetup(broken).study()


# Printed numbers


def test_printed_relative_regrets_follow_from_printed_losses():
    """Acceptance check 10."""
    bert = {row["strategy"]: row for row in printed_rows("5.1")}
    assert bert[AT_START]["largest"] == pytest.approx(1.79794, abs=5e-5)
    assert bert[AT_START]["relative"] == pytest.approx(0.7986, abs=5e-4)
    assert bert[LAST]["relative"] == pytest.approx(0.5517, abs=5e-4)
    ul2 = {row["strategy"]: row for row in printed_rows("5.2")}
    assert ul2[AT_START]["largest"] == pytest.approx(2.14105, abs=5e-5)
    assert [ul2[name]["relative"] for name in (AT_START, LAST, "LAG@2000")] == pytest.approx([0.920, 0.658, 0.089], abs=6e-4)
    assert [bert[ORACLE]["trial_steps"], ul2[ORACLE]["trial_steps"]] == [6000, 60_000]  # acceptance check 19


@pytest.mark.parametrize(("table", "size"), [("5.1", "paper"), ("5.2", "tiny")])
def test_claims_on_printed_numbers_hold_without_any_run(table, size):
    figure = get(f"growing/table-{table}")
    verdicts = figure.judge(list(printed_rows(table)), size)
    arithmetic = [v for v in verdicts if v.text.startswith(("printed", "the largest final loss", "steps of the source"))]
    assert len(arithmetic) == 5
    assert all(v.holds for v in arithmetic)


def test_stacking_sizes():
    stages = get("growing/table-C.2").parameters("laptop").stages
    assert [stage["layers"] for stage in stages] == [2, 4, 6]
    assert same(
        asdict(Setup.of(get("growing/table-C.2").chosen_jobs("tiny")[0]["setup"])),
        asdict(get("growing/table-C.2").parameters("tiny").setup),
    )
