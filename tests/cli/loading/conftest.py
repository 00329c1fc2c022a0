"""What the tests of the command-line words share: a folder of the user's own, and a check that a subject can be surveyed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import theodolite as th
from theodolite.cli.loading.subject import Subject, load_subject

REAL = os.environ.get("THEODOLITE_DATA")


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of real data files; the test is skipped where there is none."""
    if not REAL or not (Path(REAL) / "stories260k.npz").is_file():
        pytest.skip("needs real data files: set THEODOLITE_DATA to their folder")
    monkeypatch.setenv("THEODOLITE_DATA", REAL)
    return Path(REAL)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data files anywhere."""
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty working folder; sys.path and sys.modules are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith("_theodolite_") or name.startswith("mine"):
            del sys.modules[name]


@pytest.fixture
def surveyed() -> Callable[..., Subject]:
    """Load a subject, check that `Problem` takes it, that the seed fixes it and that the random state is left alone."""

    def load(model: str | None, data: str | None = None, loss: str | None = None, **options: Any) -> Subject:
        before = torch.get_rng_state()
        subject = load_subject(model, data, loss, **options)
        assert torch.equal(before, torch.get_rng_state())
        value = th.Problem(subject.model, subject.loss, subject.data).loss()
        assert math.isfinite(value)
        torch.manual_seed(99)
        again = load_subject(model, data, loss, **options)
        assert th.Problem(again.model, again.loss, again.data).loss() == value
        assert {"model", "weights", "data", "loss"} <= set(subject.facts)
        assert all(isinstance(fact, str) and fact for fact in subject.facts.values())
        return subject

    return load


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which must be one line."""
    text = str(error.value)
    assert "\n" not in text
    return text
