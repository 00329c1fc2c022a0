"""Labels: leave-one-out in closed form against refits, noise and its absence on planted predictions, classes of every form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.data_audit import audit_labels
from theodolite.measures.data_audit import labels as label_audit
from theodolite.measures.data_audit.labels import label_noise
from theodolite.measures.data_audit.neighbours import RIDGES, LeaveOneOut, column_skill, permuted_copies, with_products
from theodolite.measures.data_audit.views import SampleVectors, labels_of


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clusters(n: int, noise: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five well separated classes; inputs, given labels, true labels."""
    y = torch.arange(n) % 5
    x = normal(n, 8, seed=seed) + 3 * nn.functional.one_hot(y, 8)
    generator = torch.Generator().manual_seed(seed + 1)
    wrong = torch.rand(n, generator=generator) < noise
    return x, torch.where(wrong, (y + torch.randint(1, 5, (n,), generator=generator)) % 5, y), y


def classifier(x: torch.Tensor, y: torch.Tensor) -> th.Problem:
    torch.manual_seed(0)
    return th.Problem(nn.Linear(x.shape[1], int(y.max()) + 1), nn.CrossEntropyLoss(), (x, y))


@pytest.mark.parametrize("ridge", range(len(RIDGES)))
def test_leave_one_out_is_a_refit_without_the_sample(ridge):
    x, y = normal(25, 3), normal(25, 2, seed=1).double()
    near = LeaveOneOut(x)
    kernel = torch.exp(-torch.cdist(x, x).double() / near.scale)
    centred = y - y.mean(0)
    for i in (0, 7, 24):
        rest = torch.arange(25) != i
        square = kernel[rest][:, rest] + RIDGES[ridge] * torch.eye(24)
        refit = kernel[i, rest] @ torch.linalg.solve(square, centred[rest]) + y.mean(0)
        torch.testing.assert_close(near._at(ridge, y)[i], refit, rtol=1e-6, atol=1e-6)
    weights = torch.linalg.solve(kernel + RIDGES[ridge] * torch.eye(25), centred)
    if float((y - near.predictions(y)).square().mean()) == float((y - near._at(ridge, y)).square().mean()):
        torch.testing.assert_close(near.others(x[:3], y), kernel[:3] @ weights + y.mean(0), rtol=1e-4, atol=1e-4)


def test_a_single_column_and_an_exclusive_or_are_seen():
    x, generator = normal(300, 20), torch.Generator().manual_seed(1)
    for y in (x[:, 3:4], (x[:, :1] * x[:, 1:2]).sign()):
        y = y + 0.3 * torch.randn(300, 1, generator=generator)
        columns = with_products(x)
        assert column_skill(columns, y) > column_skill(columns, permuted_copies(y, 50, 0)).max()


def test_wrong_labels_are_counted_and_named():
    x, given, true = clusters(900, noise=0.25)
    found = audit_labels(classifier(x, given))
    share = float((given != true).double().mean())
    assert found.noise_told
    assert abs(found.noise - share) < 3 * found.noise_error
    suspected = found.suspected
    assert float((given != true)[suspected].double().mean()) > 0.95
    assert len(suspected) > 0.8 * float((given != true).sum())
    for row in found.suspects:
        assert (row["label"], row["inputs_say"]) == (str(int(given[row["sample"]])), str(int(true[row["sample"]])))


def test_suspects_are_found_beyond_the_samples_looked_at():
    x, given, true = clusters(1500, noise=0.25)
    found = audit_labels(classifier(x, given), most=400)
    assert int(found.suspected.max()) > 1200
    assert len(found.suspected) > 0.7 * float((given != true).sum())


def test_inputs_that_do_not_determine_their_labels_are_no_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 6, generator=generator)
    weak = (torch.rand(1000, generator=generator) < torch.sigmoid(1.5 * x[:, 0])).long()
    found = audit_labels(classifier(x, weak))
    assert not found.noise_told
    assert found.p_value == 0.01
    assert len(found.suspected) == 0
    clean = audit_labels(classifier(*clusters(600)[:2]))
    assert clean.noise_told
    assert clean.noise + 2 * clean.noise_error < 0.05


def test_the_planted_share_of_flat_errors_is_told_and_a_growing_one_is_not():
    generator = torch.Generator().manual_seed(0)
    n, values = 1200, torch.randint(4, (1200,), generator=generator)
    sure = 0.5 + 0.5 * torch.rand(n, generator=generator)
    predicted = sure[:, None] * nn.functional.one_hot(values, 4) + 0.01 * torch.rand(n, 4, generator=generator)
    flat = torch.where(torch.rand(n, generator=generator) < 0.2, (values + 1) % 4, values)
    growing = torch.where(torch.rand(n, generator=generator) < 2.2 * (1 - sure), (values + 1) % 4, values)
    told, not_told = label_noise(predicted, flat), label_noise(predicted, growing)
    assert told.told
    assert abs(told.share - 0.2) < 3 * told.error
    assert not not_told.told


def test_shuffled_labels_look_shuffled_and_a_model_that_knows_better_is_heard():
    x, _, true = clusters(500)
    shuffled = true[torch.randperm(500, generator=torch.Generator().manual_seed(0))]
    found = audit_labels(classifier(x, shuffled))
    assert found.p_value > 0.01
    assert abs(found.model_skill) < 0.3
    parity = (x[:, :3] > x[:, :3].median(0).values).sum(1) % 2  # of three signs: no line, no neighbour, no pair
    problem = classifier(x, parity)
    valid = problem.on((x[:100], parity[:100]))

    class Knows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            odd = (z[:, :3] > x[:, :3].median(0).values).sum(1) % 2
            return self.scale * nn.functional.one_hot(odd, 2).float()

    knows = th.Problem(Knows(), nn.CrossEntropyLoss(), (x, parity), check=False)
    assert audit_labels(knows).model_skill > 0.9
    assert audit_labels(knows, valid=knows.on((x[:100], parity[:100]))).validated
    assert audit_labels(problem, valid=valid).model_skill < 0.5


def test_rare_classes_and_their_recall():
    x, y, _ = clusters(600)
    keep = torch.cat([torch.nonzero(y != 4).flatten(), torch.nonzero(y == 4).flatten()[:6]])
    problem = classifier(x[keep], y[keep])
    found = audit_labels(problem)
    assert found.counts == (120, 120, 120, 120, 6)
    assert found.rare == (4,)
    with torch.no_grad():
        right = problem.model(x[keep]).argmax(1) == y[keep]
    assert found.recalls[4] == pytest.approx(float(right[y[keep] == 4].double().mean()))
    assert math.isnan(found.recall(found.recalls, ()))


@pytest.mark.parametrize(
    ("target", "loss", "names"),
    [
        (torch.tensor([2, 0, 2, 0]), nn.CrossEntropyLoss(), ("0", "2")),
        (torch.tensor([[0.0], [1.0], [1.0], [0.0]]), nn.BCEWithLogitsLoss(), ("0", "1")),
        (torch.tensor([[-1.0], [1.0], [1.0], [1.0]]), nn.MSELoss(), ("-1", "1")),
        (torch.eye(3)[[0, 2, 2, 0]], nn.MSELoss(), ("0", "2")),
        (torch.tensor([[0.1], [0.2], [0.3], [0.4]]), nn.MSELoss(), None),
    ],
)
def test_classes_in_every_form(target, loss, names):
    width = 3 if target.ndim == 1 else target.shape[1]
    labels = labels_of(th.Problem(nn.Linear(2, width), loss, (torch.randn(4, 2), target)))
    assert (labels.names if labels is not None else None) == names


def test_vectors_of_tokens_depend_on_tokens_and_not_on_the_batch():
    tokens = torch.randint(9, (12, 7), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(14, 2))
    y = torch.arange(12) % 2
    whole = th.Problem(model, nn.CrossEntropyLoss(), (tokens, y))
    parts = th.Problem(model, nn.CrossEntropyLoss(), [(tokens[:5], y[:5]), (tokens[5:], y[5:])])
    rows = torch.arange(12)
    torch.testing.assert_close(SampleVectors(whole, rows).seen, SampleVectors(parts, rows).seen)


class Sees(nn.Module):
    """Knows targets over many powers of ten."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * 10.0 ** (3 * x[:, :1])


def test_a_model_of_targets_with_a_long_tail_is_measured_by_the_targets_as_they_are():
    x = normal(400, 3)
    y = 10.0 ** (3 * x[:, :1])
    problem = th.Problem(Sees(), nn.MSELoss(), (x, y))
    assert audit_labels(problem).model_skill > 0.99
    assert audit_labels(problem, valid=problem.on((x[:200], y[:200]))).model_skill > 0.99


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_validation_data_is_looked_at_in_part_and_in_batches_of_the_user(kind):
    x = normal(3000, 2)
    y, loss = (torch.arange(3000) % 2, nn.CrossEntropyLoss()) if kind == "classes" else (x.clone(), nn.MSELoss())
    model = nn.Linear(2, 2)
    problem = th.Problem(model, loss, [(x[i : i + 64], y[i : i + 64]) for i in range(0, 320, 64)])
    valid = problem.on([(x[i : i + 64], y[i : i + 64]) for i in range(0, 3000, 64)])
    sizes: list[int] = []
    with model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0]))):
        assert audit_labels(problem, valid=valid).validated
    assert max(sizes) <= 64
    assert sum(sizes) <= 320 + 1000


def test_random_orders_of_many_classes_take_no_more_room_than_those_of_few(monkeypatch):
    y = torch.arange(900) % 90
    x = 0.5 * normal(90, 8)[y] + normal(900, 8, seed=1)  # each class has a place, and they overlap
    rows = []
    monkeypatch.setattr(label_audit, "permuted_copies", lambda *given: rows.append(permuted_copies(*given)) or rows[-1])
    found = audit_labels(classifier(x, y))
    shuffled = audit_labels(classifier(x, y[torch.randperm(900, generator=torch.Generator().manual_seed(0))]))
    assert {part.shape for part in rows} == {(99, 900, 32)}
    assert found.p_value == 0.01 < shuffled.p_value


def test_long_vectors_are_projected_on_directions_drawn_once(monkeypatch):
    x = normal(60, 300)
    problem = th.Problem(nn.Linear(300, 2), nn.CrossEntropyLoss(), [(x[i : i + 6], torch.arange(6) % 2) for i in range(0, 60, 6)])
    view = SampleVectors(problem, torch.arange(60))
    drawn, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **more: drawn.append(shape) or randn(*shape, **more))
    again = view.of(problem, torch.arange(60))
    assert drawn == [(300, 128)]
    torch.testing.assert_close(again, view.seen)
