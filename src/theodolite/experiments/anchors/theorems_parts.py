"""The attacks, lemmas and bounds of the chapter on random cases; each function gives the rows of one part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.data.generators import exact_anchor_world
from theodolite.measures.anchors.transfer.certificate import (
    bulk_mass_gap,
    disagreement,
    fit_anchor,
    kl_floors,
    m_max,
    m_simplified,
    m_sum,
    normalized_margin,
    pinsker,
    transfer_certificate,
    word_mass_gap,
)
from theodolite.measures.anchors.transfer.log_linear import (
    LogLinear,
    kl_divergence,
    rare_word_kl,
    rare_word_logits,
    shift_anchor,
    shift_log_linear,
    silencing_shift,
    total_variation,
)
from theodolite.measures.anchors.transfer.readout import anchored_logits, thresholded_score
from theodolite.results import Row

#: What float64 may lose in an inequality.
ROUNDING = 1e-12
#: k, b, ε_b, Γ -> m_sum, m_max, simplified minimum; computed beforehand.
REFERENCE = (
    ((2, -math.log(8), 0.0, 0.75), (0.113748, 0.078504, 0.062663)),
    ((2, -math.log(8), 0.0, 1.0), (0.162180, 0.105952, 0.083720)),
    ((2, 0.0, 0.0, 1.0), (0.393469, 0.277178, 0.153518)),
    ((4, -math.log(16), 0.05, 1.0), (0.116960, 0.081055, 0.063603)),
    ((4, 0.0, 0.1, 2.0), (0.550671, 0.449359, 0.234072)),
    ((10, -1.0, 0.1, 4.0), (0.834701, 0.711959, 0.451188)),
)
#: Tasks in the world with an exact anchor: coefficients, thresholds, and the margin of the certificate.
A, B, GAMMA = (1.0, -1.0, 1.0, -1.0), (-1.5, -1.5, -1.5, -1.5), 0.5


def _world(seed: int) -> tuple[LogLinear, Tensor, Tensor]:
    """The world with an exact anchor, its anchor and its label words."""
    world = exact_anchor_world(seed=seed)
    assert world.anchor is not None
    return LogLinear(world.states, world.atoms), world.anchor, world.labels


def _task() -> tuple[Tensor, Tensor]:
    return torch.tensor(A, dtype=torch.float64), torch.tensor(B, dtype=torch.float64)


def rare_word(job: Mapping[str, Any]) -> Iterator[Row]:
    """T1: lowering the logit of one word by s, on random heads and contexts; s flips a linear task that reads the word."""
    g = torch.Generator().manual_seed(job["seed"])
    logits = 3 * torch.randn(job["cases"], job["words"], generator=g, dtype=torch.float64)
    word = torch.randint(job["words"], (job["cases"],), generator=g)
    strength = 10 ** (4 * torch.rand(job["cases"], generator=g, dtype=torch.float64) - 2)
    p = logits.softmax(1).gather(1, word[:, None])[:, 0]
    student = logits.scatter_add(1, word[:, None], -strength[:, None])
    kl, exact = kl_divergence(logits, student), rare_word_kl(p, strength)
    score = logits.gather(1, word[:, None])[:, 0].abs() + 0.1  # f* of a task whose coefficient at the word is 1
    flipping = rare_word_kl(p, score)
    yield {
        "cases": job["cases"],
        "formula_error": float((kl - exact).abs().max()),
        "above_bound": int((kl > strength * p + ROUNDING).sum()),
        "flip_above": int((flipping > p * score + ROUNDING).sum()),
        "largest_share": float((kl / (strength * p)).max()),
    }


def inactive(job: Mapping[str, Any]) -> Iterator[Row]:
    """T2: where a unit is silent, lowering its word's logit further changes no score; label words are outside the bulk, so the
    anchor stays and an anchored logit falls with the raw one."""
    model, anchor, labels = _world(job["seed"])
    a, b = _task()
    for name, features in (("raw", model.logits()[:, labels]), ("anchored", anchored_logits(model, anchor, labels))):
        silent = features <= b
        before = thresholded_score(features, a, b)
        for strength in (1.0, 5.0, 50.0):
            after = [thresholded_score(rare_word_logits(features, j, strength), a, b) for j in range(len(labels))]
            change = (torch.stack(after, dim=1) - before[:, None]).abs()
            yield {"scores": name, "strength": strength, "silent": int(silent.sum()), "change": float(change[silent].max())}


def shift(job: Mapping[str, Any]) -> Iterator[Row]:
    """T3: a shift of all logits, silencing or random of standard deviation 50; anchored scores with [v₀; 1] or a new anchor."""
    model, anchor, labels = _world(job["seed"])
    a, b = _task()
    z = model.logits()
    tau = silencing_shift(z, b)
    silent = shift_log_linear(model, tau)
    noise = torch.randn(model.contexts, generator=torch.Generator().manual_seed(job["seed"]), dtype=torch.float64)
    for name, moved in (("silencing", silent), ("random", shift_log_linear(model, 50 * noise))):
        after = moved.logits()
        bulk = torch.ones(model.words, dtype=torch.bool)
        bulk[labels] = False
        refitted = fit_anchor(moved.states, after[:, bulk].logsumexp(1))
        clean = thresholded_score(anchored_logits(model, anchor, labels), a, b)
        scores = [thresholded_score(anchored_logits(moved, v, labels), a, b) for v in (shift_anchor(anchor), refitted)]
        raw = thresholded_score(after[:, labels], a, b)
        yield {
            "shift": name,
            "probability_change": float((after.softmax(1) - z.softmax(1)).abs().max()),
            "kl": float(kl_divergence(z, after).max()),
            "raw_left": float((raw != 0).double().mean()),
            "raw_wrong": float((raw * clean <= 0).double().mean()),
            "anchored_change": float((scores[0] - clean).abs().max()),
            "refitted_change": float((scores[1] - clean).abs().max()),
        }


class Pairs(NamedTuple):
    """Teachers and students that disagree at one context each: k label words and one word that stands for the bulk."""

    teacher: Tensor  # logits (N, k + 1), the bulk last
    student: Tensor
    u: tuple[Tensor, Tensor]  # anchored logits (N, k) of both, which err by at most eps_b
    a: Tensor
    b: Tensor
    eps_b: Tensor
    f: Tensor  # the teacher's score (N,)


def disagreeing(k: int, count: int, seed: int) -> Pairs:
    """`count` random cases with f f* < 0 and Γ > 4 ε_b, where ε_b is 0 or 0.05."""
    if k < 2:
        raise ValueError(f"One label word has one sign: two models cannot disagree about it. k must be at least 2. Got {k}.")
    g = torch.Generator().manual_seed(seed)
    parts: list[Pairs] = []
    found = 0
    while found < count:
        part = _draw(k, 8 * count, g)
        margin = normalized_margin(part.f.abs(), part.a)
        other = thresholded_score(part.u[1], part.a, part.b)
        keep = ((part.f * other < 0) & (margin > 4 * part.eps_b)).nonzero()[:, 0]
        parts.append(_at(part, keep))
        found += len(keep)
    return _at(_joined(parts), torch.arange(count))


def _draw(k: int, count: int, g: torch.Generator) -> Pairs:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    b = normal(count, k) - 1
    base = b + 1.5 * normal(count, k)
    none = torch.zeros(count, 1, dtype=torch.float64)
    spread = 2 * torch.rand(count, 1, generator=g, dtype=torch.float64)
    teacher = torch.cat([base, none], dim=1) + normal(count, 1)
    student = torch.cat([base + spread * normal(count, k), none], dim=1) + normal(count, 1)
    eps_b = 0.05 * (torch.rand(count, generator=g) < 0.5).double()
    error = eps_b * (2 * torch.rand(2, count, generator=g, dtype=torch.float64) - 1)
    u = [z[:, :-1] - z[:, -1:] - e[:, None] for z, e in zip((teacher, student), error, strict=True)]
    a = normal(count, k)
    return Pairs(teacher, student, (u[0], u[1]), a, b, eps_b, thresholded_score(u[0], a, b))


def _at(p: Pairs, rows: Tensor) -> Pairs:
    u = (p.u[0][rows], p.u[1][rows])
    return Pairs(p.teacher[rows], p.student[rows], u, p.a[rows], p.b[rows], p.eps_b[rows], p.f[rows])


def _joined(parts: list[Pairs]) -> Pairs:
    def joined(pick: Callable[[Pairs], Tensor]) -> Tensor:
        return torch.cat([pick(part) for part in parts])

    return Pairs(
        joined(lambda p: p.teacher),
        joined(lambda p: p.student),
        (joined(lambda p: p.u[0]), joined(lambda p: p.u[1])),
        joined(lambda p: p.a),
        joined(lambda p: p.b),
        joined(lambda p: p.eps_b),
        joined(lambda p: p.f),
    )


def lemmas(job: Mapping[str, Any]) -> Iterator[Row]:
    """T4 to T6 on disagreeing pairs: cases that break each inequality, and how near the cheapest ones come."""
    p = disagreeing(job["k"], job["cases"], job["seed"])
    margin = normalized_margin(p.f.abs(), p.a)
    found = disagreement(*p.u, p.a, p.b, p.f.sign())
    p_b = p.teacher.softmax(1)[:, -1]
    eps_p = (p.teacher.log_softmax(1)[:, -1] - p.student.log_softmax(1)[:, -1]).abs()
    gap = (p.teacher.softmax(1) - p.student.softmax(1)).abs()
    excess = found.excess.where(found.members, 0.0).sum(1)
    largest = p.a.abs().where(found.members, 0.0).amax(1)
    word = word_mass_gap(found.excess, p.b, p_b[:, None], p.eps_b[:, None], eps_p[:, None])
    tv, kl = total_variation(p.teacher, p.student), kl_divergence(p.teacher, p.student)
    floors = kl_floors(p.b, margin, p.eps_b, p_b)
    holds = floors.theorem > 0
    arguments = (p.b, margin, p.eps_b)
    yield {
        "k": job["k"],
        "cases": len(p.f),
        "empty": int((~found.members.any(1)).sum()),
        "excess": _broken(excess, p.f.abs() / (2 * largest)),
        "bulk": _broken(gap[:, -1], bulk_mass_gap(p_b, eps_p)),
        "word": int(((gap[:, :-1] < word - ROUNDING) & found.members).sum()),
        "tv_max": _broken(tv, p_b * m_max(*arguments)),
        "tv_sum": _broken(2 * tv, p_b * m_sum(*arguments)),
        "tv_printed": _broken(tv, p_b * m_sum(*arguments)),
        "pinsker": _broken(kl, pinsker(tv)),
        "theorem": _broken(kl[holds], floors.theorem[holds]),
        "general": _broken(kl, floors.general),
        "tight": _broken(kl, floors.tight),
        "theorem_cases": int(holds.sum()),
        "nearest_tv": float((tv / (p_b * m_sum(*arguments))).min()),
        "nearest_kl": float((kl / floors.tight).min()),
    }


def _broken(have: Tensor, least: Tensor) -> int:
    return int((have < least - ROUNDING).sum())


def reference(job: Mapping[str, Any]) -> Iterator[Row]:
    """T5: the three minima in the six cases of the reference table."""
    for (k, b, eps_b, Gamma), wanted in REFERENCE:
        thresholds = torch.full((k,), b, dtype=torch.float64)
        found = [float(minimum(thresholds, Gamma, eps_b)) for minimum in (m_sum, m_max, m_simplified)]
        case = {"k": k, "b": b, "eps_b": eps_b, "Gamma": Gamma, "linear": Gamma / 24}
        names = {"m_sum": found[0], "m_max": found[1], "m_simplified": found[2]}
        yield {**case, **names, "difference": max(abs(x - y) for x, y in zip(found, wanted, strict=True))}


def example(job: Mapping[str, Any]) -> Iterator[Row]:
    """T6: two label words, one bulk word; the cheapest student at the boundary averages the two."""
    b = torch.full((2,), -math.log(8), dtype=torch.float64)
    a = torch.tensor([1.0, -1.0], dtype=torch.float64)
    teacher = torch.cat([b + torch.tensor([1.5, 0.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    p = teacher.softmax(0)
    student = torch.stack([p[:2].mean(), p[:2].mean(), p[2]]).log()
    score = float(thresholded_score(teacher[:2], a, b))
    Gamma = float(normalized_margin(score, a))
    yield {
        "score": score,
        "Gamma": Gamma,
        "kl": float(kl_divergence(teacher, student)),
        "tv": float(total_variation(teacher, student)),
        "theorem": float(kl_floors(b, Gamma, 0.0, float(p[2])).theorem),
        "tv_simplified": float(p[2] * m_simplified(b, Gamma, 0.0)),
        "tv_max": float(p[2] * m_max(b, Gamma, 0.0)),
    }


def certificate(job: Mapping[str, Any]) -> Iterator[Row]:
    """T6 in the world with an exact anchor: label atoms perturbed by noise of growing length, thresholds at the lower quartile.

    `scale` is the spread of the anchored logits: with a small one the bulk keeps more of the mass.
    """
    world = exact_anchor_world(scale=job["scale"], seed=job["seed"])
    model, labels = LogLinear(world.states, world.atoms), world.labels
    assert world.anchor is not None
    b = anchored_logits(model, world.anchor, labels).quantile(0.25, dim=0)
    noise = torch.randn(len(labels), model.dim, generator=torch.Generator().manual_seed(job["seed"]), dtype=torch.float64)
    for size in job["noise"]:
        atoms = model.weight.clone()
        atoms[labels] += size * noise / model.dim**0.5
        found = transfer_certificate(model, LogLinear(model.states, atoms), labels=labels, a=A, b=b, gamma=GAMMA)
        yield {"scale": job["scale"], "noise": size, **found.rows()[0], "failed": found.eps_cls + found.undecided}
