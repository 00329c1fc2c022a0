"""Samples that belong together: in-batch contrast, nodes of one graph, lists of samples. Nobody cuts them apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite.errors import BatchCoupledError
from theodolite.measures.dynamics import batch_critical_rates, gradient_noise

NODES = 40


class Graph(nn.Module):
    """Two rounds of messages along the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        def gathered(h: Tensor) -> Tensor:
            return h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

        return self.second(gathered(torch.tanh(self.first(gathered(nodes)))))


class Dense(Graph):
    """The same with a matrix of edges, which has as many rows as there are nodes."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.second(edges @ torch.tanh(self.first(edges @ nodes)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.body(a), dim=1), F.normalize(self.body(b), dim=1)


def contrast(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    scores = 5 * out[0] @ out[1].T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def dice(out: Tensor, target: Tensor) -> Tensor:
    p = out.softmax(1)[:, 0]
    return 1 - 2 * (p * (target == 0)).sum() / (p.sum() + (target == 0).sum())


def nodes_and_labels(n: int = NODES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 4), torch.arange(n) % 3


def graph(kind: type[Graph] = Graph) -> tuple[nn.Module, nn.Module, tuple[tuple[Tensor, Tensor], Tensor]]:
    x, y = nodes_and_labels()
    edges = torch.randint(0, NODES, (2, 90)) if kind is Graph else torch.eye(NODES) + (torch.rand(NODES, NODES) < 0.1)
    return kind(), nn.CrossEntropyLoss(), ((x, edges), y)


def pairs(n: int = NODES) -> tuple[nn.Module, object, tuple[tuple[Tensor, Tensor], Tensor]]:
    x, y = nodes_and_labels(n)
    return Encoder(), contrast, ((x, x + 0.1), y)


#: Instruments that take parts of the data.
CUTTING = ["noise", "structure", "features", "kernel", "linearity", "regimes", "spikes"]
CASES = {"graph": graph, "matrix of edges": lambda: graph(Dense), "contrast": pairs}


@pytest.mark.parametrize("case", CASES)
def test_a_survey_leaves_them_whole_and_says_what_it_skips(case):
    found = th.survey(*CASES[case](), lr=0.05, only=CUTTING, progress=False)
    states = {row["instrument"]: (row["state"], row["reason"]) for row in found.plan}
    assert not [name for name, (state, _) in states.items() if state == "failed"]
    for name in ("noise", "spikes"):
        assert "the data is one batch" in states[name][1]
        assert "batches of training" in states[name][1]
    assert found.results["regimes"].samples == NODES


def test_measures_that_cut_refuse_with_the_remedy():
    problem = th.Problem(*graph())
    with pytest.raises(BatchCoupledError, match=r"cannot be evaluated without the rest.*batches of training"):
        batch_critical_rates(problem, batch_size=8)
    with pytest.raises(BatchCoupledError, match="leaving samples out"):
        problem.sampling_error(th.Problem.loss)
    with pytest.raises(BatchCoupledError, match="tangent_kernel_operator takes each batch as a whole"):
        th.tangent_kernel(problem)
    with pytest.raises(BatchCoupledError, match="nodes of one graph"):
        th.agop(problem)
    (x, edges), _ = graph()[2]
    assert th.tangent_kernel_operator(problem.model, (x, edges)).shape == (3 * NODES, 3 * NODES)


def test_several_batches_are_taken_as_they_are():
    model, loss, _ = pairs()
    data = [pairs(10)[2], pairs(12)[2], pairs(10)[2]]
    problem = th.Problem(model, loss, data, batch_weight=lambda batch: batch.size)
    assert "belong together" in problem.coupled
    assert gradient_noise(problem).group_sizes.tolist() == [10.0, 12.0, 10.0]
    assert len(batch_critical_rates(problem, own=True).rates) == 3


def plain_losses():
    x, y = nodes_and_labels(9)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
    model = nn.Linear(4, 3)
    tokens = {"input": torch.randint(0, 5, (6, 3)), "labels": torch.tensor([[0, -100, 2]] * 3 + [[1, 1, -100]] * 3)}

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)

        def forward(self, input, labels):
            scores = self.embed(input)
            return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}

    yield model, weighted, (x, y)
    yield model, nn.CrossEntropyLoss(reduction="sum"), (x, torch.where(y == 0, -100, y))
    yield model, lambda out, t: F.mse_loss(out, F.one_hot(t, 3).float()), (x, y)
    yield model, lambda out, t: F.cross_entropy(out, t) + model.weight.square().sum(), (x, y)
    yield model, lambda out, t: F.cross_entropy(out, t, reduction="sum"), (x, y)
    yield Tagger(), None, tokens
    yield nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), nn.CrossEntropyLoss(), (x, y)


@pytest.mark.parametrize("case", list(plain_losses()), ids=lambda case: type(case[1]).__name__)
def test_losses_that_are_means_or_sums_are_not_coupled(case):
    assert th.Problem(*case).coupled == ""
    assert th.Problem(*case, mode="train", check=False).coupled == ""


def test_a_score_of_the_whole_batch_is_coupled():
    assert "belong together" in th.Problem(nn.Linear(4, 3), dice, nodes_and_labels()).coupled


class Detector(nn.Module):
    """Takes images of different sizes in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images: list[Tensor], scale: float = 1.0) -> list[dict[str, Tensor]]:
        return [{"box": scale * self.head(torch.tanh(self.features(image[None])).mean((2, 3)))[0]} for image in images]


def box_loss(out: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([(o["box"] - t["box"]).square().mean() for o, t in zip(out, target, strict=True)]).mean()


def test_lists_hold_a_sample_in_each_place():
    torch.manual_seed(0)
    images = [torch.randn(3, 4 + i, 5) for i in range(6)]
    targets = [{"box": torch.randn(2)} for _ in images]
    model = Detector()
    whole = th.Problem(model, box_loss, [(images, targets)])
    assert (whole.samples, whole.coupled) == (6, "")
    parts = th.Problem(model, box_loss, [(images[:2], targets[:2]), (images[2:], targets[2:])])
    assert parts.loss() == pytest.approx(whole.loss(), rel=1e-6)
    kernel = th.tangent_kernel(whole)
    truth = th.tangent_kernel_operator(whole).to_dense()
    assert torch.allclose(kernel, truth, rtol=1e-4, atol=1e-5)
    found = th.survey(model, box_loss, [(images, targets)], lr=0.05, only=CUTTING, progress=False)
    assert not [row for row in found.plan if row["state"] == "failed"]


@pytest.mark.parametrize("size", [8, 200])
def test_a_monitor_follows_a_whole_batch(size):
    model, loss, _ = pairs()
    batches = [pairs(size)[2] for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = th.Monitor(loss, budget=None)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss(model(*batch[0]), batch[1]).backward()
        monitor.observe(step, model, batch, optimizer)
        optimizer.step()
    report = monitor.report()
    assert len(report.looks) == 6
    assert not [note for note in report.notes if "failed" in note]
    on_batch, on_probe = report.looks[:2]  # the probe is the first batch
    assert on_probe["loss"] == pytest.approx(on_batch["loss"], rel=1e-5)
