"""Findings and page of a stability study: what is said follows from the rows, with their numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from theodolite.analyses.stability import LABELS, stability_findings, write_stability
from theodolite.measures.mode_connectivity import LinearPath
from theodolite.measures.stability import StabilityResult
from theodolite.results import Outcome, Severity, worst_first

SIZES = (100, 200, 400, 800)
DOCS = Path(__file__).parents[3] / "docs" / "guide"


def pair(m: int, k: int, *, stab: float, gap: float, dist: float, trial: int = 0, step: int = 50, diverged: bool = False) -> dict:
    """A row; pair 0 has the largest values, the others are a few per cent below."""
    share = 1 - k / 50
    nan = float("nan")
    numbers = {
        "stab": stab * share, "stab_excl_z": stab * share / 2, "gap_loss": gap * share, "gap_01": gap * share / 4,
        "dist": dist * share, "ndist": dist * share / 10, "norm_S": 10.0, "norm_S2": 10.0, "q50": stab * share / 100,
        "q90": stab * share / 20, "q99": stab * share / 10, "q999": stab * share / 5, "train_loss": 0.1, "test_loss": 0.1 + gap,
        "train_accuracy": 0.9, "test_accuracy": 0.8,
    }  # fmt: skip
    if diverged:
        numbers = dict.fromkeys(numbers, nan)
    place = {
        "trial": trial,
        "init_seed": trial,
        "order_seed": trial,
        "m": m,
        "pair": k,
        "step": step,
        "i": 3,
        "z": 7,
        "visits": 2,
    }
    return {**place, **numbers, "worst": 7 if k == 0 else 5, "diverged": diverged, "steps_taken": step}


def study(b_stab: float, b_gap: float, b_dist: float = -1.0, *, trials: int = 1, steps: tuple[int, ...] = (50,), **more):
    rows = [
        pair(m, k, stab=4 * (m / 800) ** b_stab, gap=0.5 * (m / 800) ** b_gap, dist=2 * (m / 800) ** b_dist, trial=t, step=step)
        for t in range(trials)
        for m in SIZES
        for step in steps
        for k in range(6)
    ]
    return result(rows, **more)


def result(rows: list[dict], **more) -> StabilityResult:
    given = {
        "table": tuple(rows), "paths": {}, "checks": ("m = 100, trial 0: 6 pairs on equal data stayed bitwise equal",),
        "settings": {"pairs": 6, "steps": 50, "stop": "updates", "batch_size": 8, "pool": 1000, "drop_last": True,
                     "eval_size": 300, "pair_seed": 0, "loss": "CrossEntropyLoss"},
        "outcome": Outcome.FINISHED, "seed": 0,
    }  # fmt: skip
    return StabilityResult(**{**given, **more})


def line(lowest: float) -> LinearPath:
    """A path whose accuracy falls from 0.9 to `lowest` between its ends."""
    accuracy = torch.tensor([0.9, 0.9, 0.9, lowest, 0.9, 0.9, 0.9], dtype=torch.float64)
    return LinearPath(
        alphas=torch.linspace(0.0, 1.0, 7, dtype=torch.float64), train_loss=1 - accuracy, train_accuracy=accuracy,
        test_loss=1 - accuracy, test_accuracy=accuracy, train_samples=100, test_samples=100, barrier_train_error=0.01,
        barrier_test_error=0.01, batchnorm="none in the model", forward_passes=6, chance=0.1, outcome=Outcome.FINISHED,
    )  # fmt: skip


def by_label(found: StabilityResult, **options) -> dict:
    return {finding.label: finding for finding in stability_findings(found, **options)}


def test_numbers_are_those_of_the_rows():
    found = by_label(study(-1.0, -1.0))
    assert set(found) == {"sensitivity", "falls with data", "generalisation gap", "explains", "distance", "repeatable"}
    assert found["sensitivity"].value == 4.0
    assert "one of 800 training examples" in found["sensitivity"].sentence
    assert "by up to 4 (test example 7), and by 2 without" in found["sensitivity"].sentence
    assert "99 % of the test examples changed by less than 0.4, half by less than 0.04" in found["sensitivity"].sentence
    assert "In 1 of 6 pairs it is the example that came in" in found["sensitivity"].sentence
    assert found["falls with data"].value == pytest.approx(-1)
    assert "twice the data multiply it by 0.5" in found["falls with data"].sentence
    assert found["generalisation gap"].value == pytest.approx(-1)
    assert "is 0.475 and 12 percentage points" in found["generalisation gap"].sentence  # medians of six pairs: 0.5 · 0.95
    assert found["distance"].value == pytest.approx(-1)
    assert "up to 20 % of their norm" in found["distance"].sentence
    assert found["explains"].value == pytest.approx(0, abs=1e-9)
    assert found["explains"].severity is Severity.GOOD


def test_a_sensitivity_that_stays_is_told():
    found = by_label(study(0.0, -0.4, -0.1))
    assert found["hardly falls"].severity is Severity.WARNING
    assert found["hardly falls"].value == pytest.approx(0, abs=1e-9)
    assert found["does not explain"].value == pytest.approx(0.4)
    assert found["does not explain"].error > 0
    held_out = by_label(study(0.0, -0.4), places=[10 * k for k in range(300)])
    assert "test example 7, number 70 of the data" in held_out["sensitivity"].sentence


def test_no_law_without_sizes_or_with_a_wide_interval():
    rows = [row for row in study(-1.0, -1.0).table if row["m"] >= 400]
    found = by_label(result(rows))
    assert "a rate is read from 3 sizes or more, and there are 2" in found["no law"].sentence
    assert "unclear" in found
    wild = [{**row, "stab": 4.0 if (row["m"], row["pair"]) == (800, 0) else row["stab"]} for row in study(-1.0, -1.0).table]
    told = by_label(result([{**row, "stab": row["stab"] * 0.01 if row["pair"] else 4.0} for row in wild]))
    assert "but the interval holds zero" in told["no law"].sentence
    alone = by_label(result([row for row in study(-1.0, -1.0).table if row["pair"] == 0]))
    assert "no interval without two pairs" in alone["no law"].sentence


@pytest.mark.parametrize(
    ("lowest", "label", "words"),
    [
        ((0.9, 0.89), "same basin", "in all 2 pairs looked at"),
        ((0.9, 0.4), "other basins", "in 1 of 2 pairs"),
        ((0.9,), "same basin", "in the pair looked at"),
    ],
)
def test_basins(lowest, label, words):
    paths = {f"trial 0, m 800, pair {k}": line(value) for k, value in enumerate(lowest)}
    found = by_label(study(-1.0, -1.0, paths=paths))
    assert words in found[label].sentence
    drop = 100 * (0.9 - min(lowest))
    assert f"falls by {drop:.2g} percentage points" in found[label].sentence


def test_models_that_learned_nothing_tell_no_basin():
    path = line(0.9)
    worthless = LinearPath(**{**vars(path), "chance": 0.9})
    assert "basins not told" in by_label(study(-1.0, -1.0, paths={"trial 0, m 800, pair 0": worthless}))


def test_diverged_pairs():
    lost = [pair(100, k, stab=1, gap=1, dist=1, diverged=True) for k in range(2)]
    some = [*lost, *(row for row in study(-1.0, -1.0).table if row["m"] > 100 or row["pair"] > 1)]
    found = by_label(result(some))
    assert found["diverged pairs"].sentence.startswith("2 of 24 pairs diverged (2 at m = 100)")
    assert found["sensitivity"].value == 4.0
    everything = result([pair(m, k, stab=1, gap=1, dist=1, diverged=True) for m in SIZES for k in range(3)])
    assert [f.label for f in stability_findings(everything)] == ["all pairs diverged", "repeatable"]


def test_trials_and_checks():
    found = by_label(study(-1.0, -1.0, trials=3, checks=("m = 100, trial 0: the null swap was left out",)))
    assert 'the verdict is "explains" in 3' in found["trials"].sentence
    assert found["trials"].value == pytest.approx(-1)
    assert found["not checked"].severity is Severity.WARNING


def test_the_page_shows_all_of_it_and_escapes(tmp_path):
    paths = {f"trial 0, m {m}, pair 0": line(0.88) for m in (100, 800)}
    found = study(-1.0, -0.5, steps=(10, 50), paths=paths, notes=("m = 100: <b>note</b>",))
    page, findings = write_stability(
        found, tmp_path / "a" / "index.html", name="<i>mine</i>", facts={"data": "<script>x</script>"}
    )
    text = page.read_text(encoding="utf-8")
    assert "&lt;i&gt;mine&lt;/i&gt;" in text
    assert "&lt;script&gt;x" in text
    assert "<script>x" not in text
    assert "<b>note</b>" not in text
    for title in ("One example", "The generalisation gap", "Distance of the parameters", "In the course of training",
                  "Between the two models, 800 examples", "Between the two models, 100 examples", "The null swap"):  # fmt: skip
        assert f">{title}<" in text
    assert text.count("<svg id=") == 6  # stability, gap, distance, growth and two paths
    assert findings == worst_first(findings)
    assert findings[0].label == "sensitivity"


def test_other_seeds_have_a_section(tmp_path, monkeypatch):
    monkeypatch.setattr("theodolite.plots.to_svg", lambda figure, prefix: "")
    page, _ = write_stability(study(-1.0, -0.5, trials=2), tmp_path / "index.html")
    text = page.read_text(encoding="utf-8")
    assert ">Other seeds<" in text
    assert "In the course of training" not in text


def test_a_page_of_diverged_pairs_alone(tmp_path):
    lost = result([pair(m, k, stab=1, gap=1, dist=1, diverged=True) for m in SIZES for k in range(3)])
    page, findings = write_stability(lost, tmp_path / "index.html")
    assert findings[0].severity is Severity.CRITICAL
    assert "<svg id=" not in page.read_text(encoding="utf-8")


def test_a_study_without_accuracy(tmp_path, monkeypatch):
    """A regression has no wrong answers: that panel is left out."""
    drawn: list[str] = []
    monkeypatch.setattr(
        "theodolite.plots.to_svg", lambda figure, prefix: drawn.extend(ax.get_ylabel() for ax in figure.axes) or ""
    )
    rows = [{**row, "gap_01": float("nan"), "train_accuracy": float("nan")} for row in study(-1.0, -1.0).table]
    page, findings = write_stability(result(rows), tmp_path / "index.html")
    gap = next(f for f in findings if f.label == "generalisation gap")
    assert "wrong answers" not in gap.sentence
    assert "gap (loss)" in drawn
    assert "gap (0-1 loss)" not in drawn
    assert "gap (0-1 loss)" not in page.read_text(encoding="utf-8")


def test_every_label_is_explained():
    page = (DOCS / "findings.rst").read_text(encoding="utf-8")
    table = page[page.index("\nStability\n") : page.index("\nCertificates\n")]
    rows = re.findall(r"^   \* - ``([^`]+)``\n     - (.+)\n     - (.+)\n", table, flags=re.MULTILINE)
    assert {label: severity for label, severity, _ in rows} == {
        label: ", ".join(one.value for one in severities) for label, severities in LABELS.items()
    }


def test_labels_have_the_severities_they_are_listed_with():
    made = [
        *stability_findings(study(-1.0, -1.0)), *stability_findings(study(0.0, -0.4)),
        *stability_findings(study(-1.0, -1.0, trials=2)),
    ]  # fmt: skip
    assert all(finding.severity in LABELS[finding.label] for finding in made)
