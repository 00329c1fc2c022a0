"""Copies, contradictions, padding, leaks and shifts, planted and absent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.data_audit import audit_samples, audit_validation
from theodolite.measures.data_audit.discreteness import sample_keys
from theodolite.measures.data_audit.samples import _area, two_sample_test


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(x: torch.Tensor, y: torch.Tensor | None = None) -> th.Problem:
    y = torch.arange(len(x)) % 2 if y is None else y
    return th.Problem(nn.Linear(x.shape[1], 2), nn.CrossEntropyLoss(), (x, y))


def test_copies_and_contradictions_are_counted():
    x = torch.cat([normal(100, 3), normal(100, 3)[:20]])
    y = torch.cat([torch.zeros(100), torch.ones(8), torch.zeros(12)]).long()
    found = audit_samples(problem(x, y))
    assert found.repeated == pytest.approx(20 / 120)
    assert found.contradicted == pytest.approx(8 / 120)
    assert sorted(found.contradicting.tolist()) == [*range(8), *range(100, 108)]
    assert [row["label"] for row in found.rows()[:2]] == ["0", "1"]
    assert not found.few_values
    apart = audit_samples(problem(normal(100, 3)))
    assert (apart.repeated, apart.contradicted) == (0, 0)


def test_copies_with_other_numbers_contradict_each_other():
    x = normal(40, 2)
    y = normal(40, 1, seed=1)
    both = th.Problem(nn.Linear(2, 1), nn.MSELoss(), (torch.cat([x, x[:4]]), torch.cat([y, y[:4] + 3])))
    assert audit_samples(both).contradicted == pytest.approx(8 / 44)


def test_tables_of_few_values_coincide_by_chance_and_images_do_not():
    generator = torch.Generator().manual_seed(0)
    flags = nn.functional.one_hot(torch.randint(4, (300, 3), generator=generator), 4).flatten(1).float()
    assert audit_samples(problem(flags)).few_values
    pixels = torch.randint(0, 17, (300, 64), generator=generator) / 16
    assert not audit_samples(problem(torch.cat([pixels, pixels]))).few_values


class Tagger(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4, padding_idx=padding), nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.embed(ids)).movedim(-1, 1)


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty sentences of 4 to 8 words, filled up to 16 with token 0, whose labels are ignored."""
    ids = torch.zeros(20, 16, dtype=torch.long)
    for i, row in enumerate(ids):
        row[: 4 + i % 5] = 1 + torch.arange(4 + i % 5) % 8
    return ids, torch.where(ids > 0, ids, -100)


@pytest.mark.parametrize("known_by", ["ignore_index", "padding_idx", "attention_mask"])
def test_padding_is_known_by_labels_embeddings_and_masks(known_by):
    ids, labels = sentences()
    share = float((ids == 0).double().mean())
    model = Tagger(0 if known_by == "padding_idx" else None)
    data = (ids, labels) if known_by != "attention_mask" else {"ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}
    found = audit_samples(th.Problem(model, nn.CrossEntropyLoss(), data))
    assert (found.padding, found.padding_known_by) == (pytest.approx(share), known_by)


def test_hidden_labels_in_the_middle_are_no_padding():
    ids = torch.randint(1, 9, (20, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[:, 3] = ids[:, 3]
    assert audit_samples(th.Problem(Tagger(), nn.CrossEntropyLoss(), (ids, labels))).padding == 0


def test_leaks_exact_and_near_are_found_and_fresh_data_are_not():
    x = normal(600, 6)
    train = problem(x[:400])
    valid = train.on((torch.cat([x[400:500], x[:50]]), torch.zeros(150).long()))
    found = audit_validation(train, valid)
    assert found.copied == pytest.approx(1 / 3)
    assert found.leaked.tolist() == list(range(100, 150))
    near = train.on((torch.cat([x[400:500], x[:50] + 0.002]), torch.zeros(150).long()))
    found = audit_validation(train, near)
    assert found.copied == 0
    assert found.near == pytest.approx(1 / 3, abs=0.02)
    fresh = audit_validation(train, train.on((x[400:], torch.arange(200) % 2)))
    assert (fresh.copied, fresh.near) == (0, 0)
    assert abs(fresh.separable - 0.5) < 4 * fresh.separable_error
    assert fresh.class_shift == 0


def test_the_area_is_the_share_of_pairs():
    scores, positive = torch.tensor([0.1, 0.4, 0.4, 0.9, 0.2]), torch.tensor([False, True, False, True, False])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert _area(scores, positive) == pytest.approx(float(sum(pairs)) / len(pairs))


def test_the_error_of_the_two_sample_test_is_honest():
    found = [two_sample_test(normal(150, 5, seed=s), normal(100, 5, seed=s + 100), seed=s) for s in range(40)]
    scores = torch.tensor([(area - 0.5) / error for area, error in found])
    assert abs(float(scores.mean())) < 0.6
    assert 0.6 < float(scores.std()) < 1.5


def test_a_shift_names_its_column_and_its_classes():
    import pandas as pd

    x = normal(400, 3)
    frame = pd.DataFrame(x.numpy(), columns=["age", "income", "ratio"])
    train = th.Problem(nn.Linear(3, 2), nn.CrossEntropyLoss(), (frame[:200], torch.arange(200) % 2))
    later = frame[200:].assign(income=lambda f: f["income"] + 2)
    found = audit_validation(train, train.on((later, torch.ones(200).long())))
    assert found.shifts[0]["column"] == "income"
    assert found.shifts[0]["shift_in_spreads"] == pytest.approx(2, abs=0.3)
    assert found.separable - 3 * found.separable_error > 0.7
    assert found.class_shift == pytest.approx(0.5)


def test_float64_inputs_are_compared_bit_by_bit():
    stamps = 1.7e9 + torch.arange(400, dtype=torch.float64)[:, None]
    model = nn.Linear(1, 2).double()
    assert audit_samples(th.Problem(model, nn.CrossEntropyLoss(), (stamps, torch.arange(400) % 2))).repeated == 0
    # Small whole numbers leave most of their bits empty, and still all rows differ.
    rows = torch.cartesian_prod(*[torch.arange(16, dtype=torch.float64)] * 4)
    keys = sample_keys(th.Problem(nn.Linear(4, 2).double(), nn.CrossEntropyLoss(), (rows, torch.arange(len(rows)) % 2)))
    assert len(keys.unique()) == len(rows)
    zeros = torch.tensor([[0.0], [-0.0]], dtype=torch.float64)
    assert audit_samples(th.Problem(model, nn.CrossEntropyLoss(), (zeros, torch.tensor([0, 1])))).repeated == 0.5
