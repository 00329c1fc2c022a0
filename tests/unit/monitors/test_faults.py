"""Whatever breaks inside a monitor, the training around it goes on, bit by bit as without it."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.monitors import log as log_module
from theodolite.monitors import read_log

STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def trained(monitor: th.Monitor | None, given: Any = None) -> list[Tensor]:
    """The weights after a few steps; `given(batch)` is what the monitor is told."""
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        if monitor is not None:
            monitor.observe(step, model, (x, y) if given is None else given(x, y), optimizer)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def full_disk(handle: int, content: bytes) -> None:
    os.write(handle, content[: len(content) // 2])
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "write_all", full_disk)
    handles = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    monitor = th.Monitor(nn.CrossEntropyLoss(), budget=None, log=tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left") as seen, monitor:
        weights = trained(monitor)
    assert len([w for w in seen if "No space" in str(w.message)]) == 1  # said once
    assert same(weights, trained(None))
    report = monitor.report()
    assert len(report.steps) == STEPS
    assert len(report.looks) == 2 * STEPS  # measured on in memory
    assert any("No space left" in note for note in report.notes)
    if handles:
        assert len(os.listdir("/proc/self/fd")) == handles


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, (x, y) = network(), nn.CrossEntropyLoss(), batch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.Monitor(loss, log=tmp_path) as monitor:
        for step in range(4):
            loss(model(x), y).backward()
            with monkeypatch.context() as patched, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if step in (1, 2):
                    patched.setattr(log_module, "write_all", full_disk)
                monitor.observe(step, model, (x, y), optimizer)
    log = read_log(tmp_path)
    assert [row["step"] for row in log.steps] == [0, 3]
    assert log.end is not None


def test_the_users_own_exception_is_not_hidden_by_a_log_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        with th.Monitor(nn.CrossEntropyLoss(), log=tmp_path) as monitor:
            trained(monitor)
            monkeypatch.setattr(log_module, "write_all", full_disk)
            monkeypatch.setattr(log_module.os, "close", lambda handle: 1 / 0)
            raise KeyError("the loop's own")

    with pytest.warns(RuntimeWarning), pytest.raises(KeyError, match="the loop's own"):
        loop()


def test_a_writer_of_scalars_that_fails() -> None:
    class Broken:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            raise OSError("the writer's thread has died")

    monitor = th.Monitor(nn.CrossEntropyLoss(), budget=None, writer=Broken())
    with pytest.warns(RuntimeWarning, match="thread has died") as seen:
        weights = trained(monitor)
    monitor.close()
    assert len(seen) == 1
    assert same(weights, trained(None))
    assert len(monitor.report().looks) == 2 * STEPS


@pytest.mark.parametrize("strict", [False, True], ids=["warnings shown", "warnings are errors"])
@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (nn.CrossEntropyLoss(), lambda x, y: x),
        (nn.CrossEntropyLoss(), lambda x, y: (x[:, :2], y)),
        (None, None),
        (lambda output, target: output.no_such_thing, None),
    ],
    ids=["no pair", "wrong shape", "no loss of its own", "a loss that fails"],
)
def test_what_is_wrong_from_the_start_never_stops_a_training(loss: Any, given: Any, strict: bool) -> None:
    with warnings.catch_warnings(record=not strict) as seen:
        warnings.simplefilter("error" if strict else "always")
        with th.Monitor(loss, budget=None) as monitor:
            weights = trained(monitor, given)
    assert same(weights, trained(None))
    assert monitor.report().notes
    assert strict or len(seen or []) <= 1


def test_errors_of_one_kind_are_said_once() -> None:
    calls = itertools.count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError(f"call {next(calls)}")  # another text each time

    monitor = th.Monitor(loss)
    with pytest.warns(RuntimeWarning, match="not observed") as seen:
        weights = trained(monitor)
    assert len(seen) == 1
    [note] = monitor.report().notes
    assert note.endswith(f"({STEPS} times)")
    assert same(weights, trained(None))


def test_a_closed_monitor_says_so_and_lets_training_go_on() -> None:
    monitor = th.Monitor(nn.CrossEntropyLoss())
    monitor.close()
    with pytest.warns(RuntimeWarning, match="closed"):
        weights = trained(monitor)
    assert same(weights, trained(None))


def test_an_output_that_hooks_cannot_read() -> None:
    class OddOutput:
        @property
        def loss(self) -> Tensor:
            raise RuntimeError("not yet computed")

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return OddOutput()

    model = Model(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.Monitor(None) as monitor:
        monitor.listen(model, optimizer)
        assert isinstance(model(batch(0)[0]), OddOutput)
