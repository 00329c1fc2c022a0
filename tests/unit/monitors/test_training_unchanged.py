"""Training with a monitor gives, bit by bit, the weights of training without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import theodolite as th
from theodolite.models.resnet import cifar_resnet
from theodolite.models.transformers import gpt

STEPS = 8


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def images() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def tokens() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, 11, (3, 9), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def small_resnet() -> nn.Module:
    return cifar_resnet(8, classes=4, width=4, seed=0)


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 4)
    )


def small_gpt() -> nn.Module:
    return gpt(vocabulary=11, context=8, dim=8, depth=2, heads=2, seed=0)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Iterator[Any]]]] = {
    "resnet": (small_resnet, nn.CrossEntropyLoss(), images),
    "dropout": (with_dropout, cross_entropy, images),
    "gpt": (small_gpt, token_loss, tokens),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def trained(
    case: str, optimizer: str, watch: bool, *, accumulate: int = 1, autocast: bool = False, budget: float | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, th.monitors.MonitorReport | None]:
    make, loss, data = CASES[case]
    model = make().train()
    opt = OPTIMIZERS[optimizer](model.parameters())
    batches = data()
    torch.manual_seed(3)
    monitor = th.Monitor(loss, budget=budget) if watch else None
    for step in range(STEPS):
        opt.zero_grad()
        taken = [next(batches) for _ in range(accumulate)]
        for x, y in taken:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss(model(x), y) / accumulate
            value.backward()
        if monitor is not None:
            monitor.observe(step, model, taken if accumulate > 1 else taken[0], opt)
        opt.step()
    report = None
    if monitor is not None:
        monitor.close()
        report = monitor.report()
    return model, opt, torch.random.get_rng_state(), report


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_weights_buffers_optimizer_and_random_state_are_the_same(case: str, optimizer: str) -> None:
    plain, watched = (trained(case, optimizer, watch) for watch in (False, True))
    assert same(plain[0].state_dict(), watched[0].state_dict())
    assert same(plain[1].state_dict(), watched[1].state_dict())
    assert torch.equal(plain[2], watched[2])
    report = watched[3]
    assert report is not None
    assert len(report.steps) == STEPS
    assert any(row["on"] == "batch" for row in report.looks)
    assert any(row["on"] == "probe" for row in report.looks)
    assert not report.notes, report.notes
    assert all(row["critical_rate"] > 0 for row in report.looks)


@pytest.mark.parametrize("case", ["resnet", "gpt"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_mixed_precision_and_accumulation(case: str, autocast: bool, accumulate: int) -> None:
    plain, watched = (
        trained(case, "adamw", watch, accumulate=accumulate, autocast=autocast, budget=0.25) for watch in (False, True)
    )
    assert same(plain[0].state_dict(), watched[0].state_dict())
    assert same(plain[1].state_dict(), watched[1].state_dict())
    full = trained(case, "adamw", True, accumulate=accumulate, autocast=autocast)[3]
    assert full is not None
    assert not full.notes
    assert len([row for row in full.looks if row["on"] == "batch"]) >= STEPS - 1


def test_modes_gradients_and_hooks_are_left_as_found() -> None:
    model = with_dropout().train()
    model[0].eval()
    modes = [m.training for m in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(images())
    monitor = th.Monitor(cross_entropy, budget=None)
    cross_entropy(model(x), y).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    monitor.observe(0, model, (x, y), optimizer)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    twin = copy.deepcopy(model)  # an exponential average, say: the copy is not listened to
    pickle.loads(pickle.dumps(model))
    twin(x)
    monitor.close()
    assert not model._forward_hooks


def test_looking_back_leaves_the_live_weights_in_place() -> None:
    """The weights before a spike are measured through stand-ins: not even for a moment does a parameter hold them."""
    model, loss = with_dropout().train(), nn.CrossEntropyLoss()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    x, y = next(images())
    seen = set()
    views = [p.detach() for p in parameters]  # of the same memory, for which nothing stands in
    model.register_forward_hook(lambda *_: seen.add(tuple((v.data_ptr(), float(v.sum())) for v in views)))
    with th.Monitor(loss, budget=None) as monitor:
        for step in range(14):
            optimizer.param_groups[0]["lr"] = 30.0 if step == 11 else 0.01
            optimizer.zero_grad()
            loss(model(x), y).backward()
            seen.clear()
            monitor.observe(step, model, (x, y), optimizer)
            assert seen == {tuple((p.data_ptr(), float(p.detach().sum())) for p in parameters)}
            optimizer.step()
    report = monitor.report()
    assert [spike.start for spike in report.spikes] == [12]
    assert sum(row["why"] == "spike" for row in report.looks) == 3


def test_a_failing_look_is_noted_and_weights_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_resnet().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(images())
    loss = nn.CrossEntropyLoss()

    def explode(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr("theodolite.monitors.measuring.curvature.top_eigenpairs", explode)
    with th.Monitor(loss, budget=None) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            before = copy.deepcopy(model.state_dict())
            monitor.observe(step, model, (x, y), optimizer)
            assert same(before, dict(model.state_dict()))
            optimizer.step()
    assert any("out of something" in note for note in monitor.report().notes)


def test_a_compiled_or_wrapped_model_is_unwrapped() -> None:
    inner = small_gpt()
    model = torch.compile(inner, backend="eager")
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    x, y = next(tokens())
    with th.Monitor(token_loss, budget=None) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            token_loss(model(x), y).backward()
            monitor.observe(step, model, (x, y), optimizer)  # type: ignore[arg-type]
            optimizer.step()
    assert len(monitor.report().looks) >= 3
    assert not monitor.report().notes
