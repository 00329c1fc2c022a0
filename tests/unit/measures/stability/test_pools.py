"""Pools of examples: which data sets and loaders are read, and which numbers may stand side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from theodolite.measures.stability import make_pair
from theodolite.measures.stability.study import make_bench
from theodolite.measures.stability.training_pairs import read_pool

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 3
DATA = TensorDataset(X, Y)


def test_parts_of_a_data_set_stay_parts():
    train, test = random_split(DATA, [7, 3], generator=torch.Generator().manual_seed(0))
    bench = make_bench(train, test)
    assert (len(bench.train), len(bench.test)) == (7, 3)
    seen = torch.cat([bench.train.inputs, bench.test.inputs])[:, 0]
    assert sorted(seen.tolist()) == X[:, 0].tolist()
    part = read_pool(DataLoader(Subset(DATA, [4, 2]), batch_size=2, shuffle=True), "train")
    assert torch.equal(part.inputs, X[[4, 2]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"batch_sampler": BatchSampler(RandomSampler(DATA), 3, drop_last=False)},
        {"collate_fn": default_collate},
    ],
)
def test_a_plain_loader_gives_its_data_set(options):
    found = read_pool(DataLoader(DATA, **options), "train")
    assert torch.equal(found.inputs, X)
    assert torch.equal(found.targets, Y)


class Halves(BatchSampler):
    """Batches of a user's own."""

    def __iter__(self):
        return iter([[0, 1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampler": SubsetRandomSampler([1, 2, 3])},
            r"train is a loader whose SubsetRandomSampler .* give its data set, or tensors",
        ),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, r"WeightedRandomSampler"),
        ({"sampler": RandomSampler(DATA, replacement=True)}, r"RandomSampler"),
        ({"sampler": RandomSampler(DATA, num_samples=4)}, r"RandomSampler"),
        ({"sampler": SequentialSampler(range(4))}, r"SequentialSampler"),
        ({"batch_sampler": Halves(SequentialSampler(DATA), 3, False)}, r"Halves"),
        ({"batch_sampler": BatchSampler(SubsetRandomSampler([1, 2]), 2, False)}, r"SubsetRandomSampler"),
        ({"collate_fn": lambda samples: default_collate(samples)}, r"collate_fn of its own.* give its data set, or tensors"),
    ],
)
def test_loaders_that_choose_or_change_examples_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read_pool(DataLoader(DATA, **options), "train")


@pytest.mark.parametrize(
    ("train", "test", "kinds"),
    [
        ((X.to(torch.uint8), Y), (X / 255, Y), r"inputs of train_pool and test_pool.*torch.uint8 and torch.float32"),
        ((X, Y), (X.long(), Y), r"torch.float32 and torch.int64"),
        ((X.to(torch.uint8), Y), (X.long(), Y), r"torch.uint8 and torch.int64"),
        ((X, Y), (X, Y + 0.5), r"targets of .*torch.int64 and torch.float32.*convert one pool as the other was"),
        ((X, Y), (X, Y > 0), r"torch.int64 and torch.bool"),
    ],
)
def test_numbers_of_another_kind_are_not_cast(train, test, kinds):
    with pytest.raises(ValueError, match=kinds):
        make_pair(train, test, 4, 0)


def test_widths_may_differ():
    bench = make_bench((X, Y.to(torch.uint8)), (X.double(), Y + 300))
    inputs, targets = bench.joined
    assert inputs.dtype == bench.evaluation[0].dtype == torch.float32
    assert targets.tolist() == [*Y.tolist(), *(Y + 300).tolist()]


def test_a_pair_takes_a_generator_or_its_seed():
    first, second = (make_pair(DATA, DATA, 4, rng) for rng in (5, np.random.default_rng(5)))
    assert torch.equal(first[1][0], second[1][0])
    assert first[2:] == second[2:]


def test_the_evaluation_examples_are_a_choice_made_once():
    bench, again, other = (make_bench(DATA, DATA, 4, seed) for seed in (0, 0, 1))
    assert len(bench.eval_rows) == len(set(bench.eval_rows.tolist())) == 4
    assert torch.equal(bench.eval_rows, again.eval_rows)
    assert not torch.equal(bench.eval_rows, other.eval_rows)
    assert torch.equal(bench.evaluation[0], X[bench.eval_rows])
    assert make_bench(DATA, DATA, 10).eval_rows.tolist() == list(range(10))
