"""The embedded example: a small network, trained on scikit-learn's handwritten digits in a second."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

from theodolite.cli.sources import Subject
from theodolite.data import load
from theodolite.models import build
from theodolite.training import train

STEPS, RATE, BATCH = 400, 0.1, 64


def embedded_example(seed: int = 0) -> Subject:
    """A 64-48-48-10 network on digits after a few hundred steps of plain SGD, with the optimizer it was trained by."""
    digits = load("digits").scaled().flat()
    data = (digits.x_train, digits.y_train)
    model = build("F-48^2", inputs=digits.x_train.shape[1], seed=seed)
    loss = nn.CrossEntropyLoss()
    sgd = SGD(model.parameters(), lr=RATE)
    trace = train(model, loss, data, sgd, steps=STEPS, batch_size=BATCH, seed=seed)
    facts = {
        "model": "F-48^2, fully connected, ReLU",
        "data set": f"scikit-learn digits, {len(digits.y_train)} training samples",
        "training": f"{STEPS} steps of SGD at {RATE:g} in batches of {BATCH}, loss {trace.loss[0]:.3g} to {trace.loss[-1]:.3g}",
    }
    return Subject(name="a small network on handwritten digits", model=model, loss=loss, data=data, facts=facts, optimizer=sgd)
