"""Made-up logs of monitored trainings that look like real ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
SPIKES = [  # share of the run where it starts, cause, severity, factor by which the loss rises, steps until it is over
    (0.12, "learning-rate jump", "warning", 2.5, 30),
    (0.3, "catapult", "note", 4.0, 40),
    (0.45, "bad batch", "warning", 3.0, 3),
    (0.6, "catapult", "note", 6.0, 50),
    (0.72, "second-moment collapse", "critical", 40.0, 60),
    (0.84, "data shift", "note", 1.8, 80),
    (0.93, "unexplained", "note", 2.0, 10),
]


def header(model: str = "ResNet", **more: Any) -> dict[str, Any]:
    about = {"model": model, "parameters": 272_474, "loss": "CrossEntropyLoss", "optimizer": "AdamW", "budget": 0.25}
    start = {"kind": "run", "schema": 1, "started": "2026-03-01T12:00:00+00:00", "version": "0.1.0"}
    return {**start, **about, "probe_samples": 256, "curvature": "gauss_newton", **more}


def fake_run(
    steps: int = 2000, *, seed: int = 0, first: int = 0, model: str = "ResNet", end: bool = True
) -> Iterator[dict[str, Any]]:
    """Records as a monitor would write them, in order."""
    chance = random.Random(seed)
    yield header(model)
    bumps = [(int(share * steps), *rest) for share, *rest in SPIKES]
    sharpness = 20.0
    for t in range(steps):
        rate = 0.05 * min(1.0, (t + 1) / (0.1 * steps)) * 0.5 * (1 + math.cos(math.pi * t / steps))
        bump = sum((factor - 1) * math.exp(-3 * (t - at) / width) for at, _, _, factor, width in bumps if 0 <= t - at < 2 * width)
        sharpness *= 1 + 2.0 / steps
        if any(t == at + 3 and cause == "catapult" for at, cause, *_ in bumps):
            sharpness *= 0.55
        loss = (0.05 + 2.25 * math.exp(-5 * t / steps)) * (1 + bump) * math.exp(chance.gauss(0, 0.12))
        yield _step(first + t, loss, chance, rate)
        if t % 10 == 0:
            yield _batch_look(first + t, rate, sharpness * math.exp(chance.gauss(0.2, 0.25)), chance)
        if t % 50 == 0:
            yield _probe_look(first + t, rate, sharpness, loss, t / steps, chance)
        for at, cause, severity, factor, width in bumps:
            if t in (at + 2, at + width):
                yield _spike(first + at, cause, severity, factor, sharpness, None if t == at + 2 else first + at + width)
    if end:
        rates = {"match_rate": 0.81, "base_rate": 0.24, "up_given_exceeded": 0.66, "catapults": 2}
        yield {"kind": "end", "step": first + steps, "seconds": 0.05 * steps, "monitor_seconds": 0.004 * steps, **rates}


def write_lines(path: Path, records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def _step(step: int, loss: float, chance: random.Random, rate: float) -> dict[str, Any]:
    gradient = 0.8 * loss**0.5 * math.exp(chance.gauss(0, 0.2))
    return {
        "kind": "step",
        "step": step,
        "loss": loss,
        "gradient_norm": gradient,
        "update_norm": rate * gradient * 0.9,
        "rate": rate,
    }


def _batch_look(step: int, rate: float, sharpness: float, chance: random.Random) -> dict[str, Any]:
    critical = 2 / sharpness
    cost = {"converged": chance.random() > 0.02, "matvecs": 12, "seconds": 0.03}
    edge = {"critical_rate": critical, "rate": rate, "ratio": rate / critical, "exceeded": rate - critical > 1e-8}
    return {"kind": "look", "step": step, "on": "batch", **edge, "sharpness": sharpness, **cost}


def _probe_look(step: int, rate: float, sharpness: float, loss: float, done: float, chance: random.Random) -> dict[str, Any]:
    critical = 2 / sharpness
    edge = {
        "sharpness": sharpness,
        "kernel_norm": 140 * sharpness,
        "critical_rate": critical,
        "rate": rate,
        "ratio": rate / critical,
    }
    share = min(0.95, 0.25 + 0.2 * chance.random() + 0.4 * (loss > 1.5))
    features = {"loss": loss * 1.05, "top_share": share, "agop_alignment": 0.3 + 0.55 * done + chance.gauss(0, 0.01)}
    return {"kind": "look", "step": step, "on": "probe", **edge, **features, "seconds": 0.2}


def _spike(start: int, cause: str, severity: str, height: float, sharpness: float, end: int | None) -> dict[str, Any]:
    sentence = f"The loss rose {height:g} times at step {start}: {cause}."
    advice = "Lower the learning rate, or leave it: the loss came back by itself." if end else "Wait."
    place = {"start": start, "peak": start + 1, "end": end, "height": height, "cause": cause, "severity": severity}
    after = {"sharpness_before": sharpness * 1.8, "sharpness_after": sharpness, "top_share": 0.83, "batch": start}
    return {"kind": "spike", **place, "sentence": sentence, "advice": advice, **after}
