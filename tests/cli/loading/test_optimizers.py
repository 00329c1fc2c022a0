"""Optimizer words: what each stands for, settings, the user's own, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from tests.cli.loading.conftest import one_line
from theodolite.cli.loading.optimizers import make_optimizer


def made(text, lr=None):
    return make_optimizer(text, nn.Linear(2, 1).parameters(), lr)


@pytest.mark.parametrize(
    ("text", "lr", "kind", "settings"),
    [
        (None, 0.3, SGD, {"lr": 0.3, "momentum": 0}),
        ("sgd", None, SGD, {"lr": 1e-2, "momentum": 0}),
        ("momentum", 0.1, SGD, {"lr": 0.1, "momentum": 0.9}),
        ("Heavy_Ball", None, SGD, {"momentum": 0.9, "nesterov": False}),
        ("nesterov", None, SGD, {"momentum": 0.9, "nesterov": True}),
        ("nesterov:momentum=0.5", None, SGD, {"momentum": 0.5, "nesterov": True}),
        ("sgd:momentum=0.9,nesterov=true,weight_decay=5e-4", 0.1, SGD, {"nesterov": True, "weight_decay": 5e-4}),
        ("sgd:lr=0.2", None, SGD, {"lr": 0.2}),
        ("adam", None, Adam, {"lr": 1e-3}),
        ("adamw:betas=0.9/0.95,weight_decay=0.1", 2e-3, AdamW, {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ],
)
def test_words(text, lr, kind, settings):
    optimizer = made(text, lr)
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings


def test_nothing_is_nothing():
    assert made(None) is None


@pytest.mark.parametrize(
    ("text", "lr", "message"),
    [
        ("adma", None, "Nearest names: adam"),
        ("sgd:momentun=0.9", None, "Nearest: momentum"),
        ("sgd:momentum", None, "momentum=VALUE"),
        ("sgd:momentum=much", None, "a number"),
        ("sgd:nesterov=1", None, "true or false"),
        ("sgd:nesterov=true", None, "refused by torch"),
        ("adam:betas=0.9", None, "two numbers"),
        ("adam:betas=0.9/0.9/0.9", None, "two numbers"),
        ("sgd:lr=0.2", 0.1, "Give one of them"),
        ("sgd", -1.0, "--lr"),
        ("sgd", float("nan"), "--lr"),
        ("nosuch_module:thing", None, "no module"),
    ],
)
def test_what_is_wrong_is_one_clear_line(here, text, lr, message):
    with pytest.raises(ValueError) as error:
        made(text, lr)
    assert message in one_line(error)


def test_the_users_own(here):
    (here / "mine.py").write_text(
        "import torch\nRMSprop = torch.optim.RMSprop\n"
        "def build(parameters, lr=0.7):\n    return torch.optim.SGD(parameters, lr=lr)\n"
        "def fixed(parameters):\n    return torch.optim.Adagrad(parameters)\n"
        "def needs(parameters, lr):\n    return torch.optim.SGD(parameters, lr=lr)\n"
        "def wrong(parameters):\n    return 3\n"
        "def broken(parameters):\n    raise RuntimeError('no luck')\n"
        "def other(parameters):\n    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters())\n"
        "number = 3\n"
    )
    assert made("mine:build").param_groups[0]["lr"] == 0.7
    assert made("mine:build", 0.2).param_groups[0]["lr"] == 0.2
    assert type(made("mine.py:RMSprop", 0.2)) is torch.optim.RMSprop
    assert type(made("mine:fixed")) is torch.optim.Adagrad
    for text, lr, message in (
        ("mine:fixed", 0.1, "takes no argument lr"),
        ("mine:needs", None, "give --lr"),
        ("mine:wrong", None, "int"),
        ("mine:broken", None, "mine:broken failed: RuntimeError: no luck"),
        ("mine:other", None, "other parameters"),
        ("mine:number", None, "int"),
        ("mine:biuld", None, "build"),
    ):
        with pytest.raises(ValueError) as error:
            made(text, lr)
        assert message in one_line(error)
