"""Data and checkpoints from files: what is read, what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import theodolite as th
from tests.cli.loading.conftest import one_line
from theodolite.cli.loading.optimizers import make_optimizer
from theodolite.cli.loading.subject import load_subject

X = torch.arange(24.0).reshape(8, 3) / 24
Y = torch.arange(8) % 2


@pytest.mark.parametrize("keys", [("x", "y"), ("x_train", "y_train")])
def test_arrays_from_npz(surveyed, here, keys):
    np.savez(here / "d.npz", **dict(zip(keys, (X.double().numpy(), Y.int().numpy()), strict=True)))
    subject = surveyed("F-5", "d.npz", samples=6)
    assert subject.name == "F-5 on d"
    assert subject.data[0].dtype == torch.float32
    assert subject.data[1].dtype == torch.int64
    assert subject.population == 8


@pytest.mark.parametrize("shape", [(5, 8, 8), (5, 8, 8, 3), (5, 3, 8, 8)])
def test_images_of_bytes_are_scaled(surveyed, here, shape):
    np.savez(here / "d.npz", x=np.full(shape, 255, np.uint8), y=np.arange(5))
    subject = surveyed("LeNet-mini", "d.npz")
    assert subject.data[0].shape == (5, 1 if len(shape) == 3 else 3, 8, 8)
    assert float(subject.data[0].max()) == 1.0


def test_tensors_from_torch_and_safetensors(surveyed, here):
    torch.save({"x": X, "y": Y}, here / "d.pt")
    torch.save((X, Y), here / "pair.pt")
    save_file({"x": X, "y": Y}, here / "d.safetensors")
    for name in ("d.pt", "pair.pt", "d.safetensors"):
        assert torch.equal(surveyed("F-5", name).data[0], X)


def test_a_table_gives_its_names_to_the_survey(surveyed, here):
    kinds = ["cat" if i % 3 else "dog" for i in range(30)]
    frame = pd.DataFrame({"age": range(30), "label": kinds, "income": [1000.0 * i for i in range(30)]})
    frame.to_csv(here / "pets.csv", index=False)
    subject = surveyed("F-5", "pets.csv", samples=20)
    assert list(subject.data[0].columns) == ["age", "income"]
    assert list(subject.data[1].cat.categories) == ["cat", "dog"]
    assert subject.population == 30
    problem = th.Problem(subject.model, subject.loss, subject.data)
    assert (problem.data.columns, problem.data.classes) == (("age", "income"), ("cat", "dog"))
    frame.drop(columns="label").to_csv(here / "prices.csv", index=False)
    assert surveyed("F-5", "prices.csv", batch_size=10).data[0][1].shape == (10, 1)
    frame.rename(columns={"label": "kind"}).to_csv(here / "text.csv", index=False)
    with pytest.raises(ValueError, match=r"'kind' \(text\)"):
        load_subject("F-5", "text.csv")


def test_files_that_do_not_fit(here):
    np.savez(here / "odd.npz", a=X.numpy())
    np.savez(here / "uneven.npz", x=X.numpy(), y=Y.numpy()[:3])
    torch.save([1, 2, 3], here / "list.pt")
    (here / "text.npz").write_text("no arrays")
    (here / "d.safetensors").write_text("no tensors")
    for name, message in (
        ("odd.npz", "x_train"),
        ("uneven.npz", "equally long"),
        ("list.pt", "It holds list"),
        ("text.npz", "text.npz"),
        ("d.safetensors", "safetensors"),
    ):
        with pytest.raises(ValueError) as error:
            load_subject("F-5", name)
        assert message in one_line(error)


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(here):
    """A builder, and the weights it is to get."""
    (here / "mine.py").write_text(
        "import torch\nfrom torch import nn\nx = torch.ones(4, 3), torch.arange(4) % 2\n"
        "def net():\n    return nn.Sequential(nn.Linear(3, 2))\n"
        "def with_optimizer():\n    m = net()\n    return m, nn.CrossEntropyLoss(), torch.optim.Adam(m.parameters())\n"
    )
    return {"0.weight": torch.full((2, 3), 7.0), "0.bias": torch.zeros(2)}


@pytest.mark.parametrize("nest", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_checkpoints_in_their_usual_forms(surveyed, trained, nest, prefix):
    weights = {prefix + name: value for name, value in trained.items()}
    torch.save(weights if nest is None else {nest: weights, "epoch": 3}, "w.pt")
    subject = surveyed("mine:net", "mine:x", checkpoint="w.pt")
    assert (subject.model[0].weight == 7).all()
    assert subject.facts["weights"] == "w.pt"


def test_safetensors_and_named_networks(surveyed, trained):
    save_file(trained, "w.safetensors")
    assert (surveyed("mine:net", "mine:x", checkpoint="w.safetensors").model[0].weight == 7).all()
    other = load_subject("F-5", "digits", samples=5, seed=3).model
    torch.save(other.state_dict(), "f.pt")
    assert torch.equal(surveyed("F-5", "digits", samples=5, checkpoint="f.pt").model.fc1.weight, other.fc1.weight)


def test_the_optimizers_state_is_kept(trained):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "w.pt")
    subject = load_subject("mine:net", "mine:x", checkpoint="w.pt")
    again = make_optimizer(None, subject.model.parameters(), None, state=subject.optimizer_state)
    assert type(again) is torch.optim.AdamW
    assert again.param_groups[0]["lr"] == 0.25
    assert torch.equal(again.state[subject.model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert make_optimizer(None, subject.model.parameters(), 0.5, state=subject.optimizer_state).param_groups[0]["lr"] == 0.5
    given = load_subject("mine:with_optimizer", "mine:x", checkpoint="w.pt").optimizer
    assert given.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match="does not fit") as error:
        make_optimizer("adam", nn.Linear(4, 2).parameters(), None, state=subject.optimizer_state)
    one_line(error)


def test_the_state_of_a_training_run(surveyed, trained, here):
    model = nn.Sequential(nn.Linear(3, 2))
    data = torch.ones(4, 3), torch.arange(4) % 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    th.train(model, nn.CrossEntropyLoss(), data, optimizer, steps=2, checkpoint="run", progress=False)
    for name in ("run", "run/checkpoint.safetensors"):
        subject = surveyed("mine:net", "mine:x", checkpoint=name)
        assert torch.equal(subject.model[0].weight, model[0].weight)
        assert subject.optimizer_state["param_groups"][0]["momentum"] == 0.9


def test_wrapped_models_get_their_weights(here, trained):
    text = (here / "mine.py").read_text()
    (here / "mine.py").write_text(text + "def wrapped():\n    return nn.DataParallel(net())\n")
    torch.save(trained, "w.pt")
    assert (load_subject("mine:wrapped", "mine:x", checkpoint="w.pt").model.module[0].weight == 7).all()


def test_checkpoints_that_do_not_fit(trained):
    torch.save({"0.weight": torch.zeros(2, 3)}, "short.pt")
    torch.save({"epoch": 3}, "none.pt")
    for name, message in (("short.pt", "missing 0.bias"), ("none.pt", "epoch"), ("nosuch.pt", "nosuch.pt")):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            load_subject("mine:net", "mine:x", checkpoint=name)
        assert message in one_line(error)


class Evil:
    """Something that a pickle would run."""

    def __reduce__(self):
        return (open, ("pwned", "w"))


def test_a_pickle_is_refused_and_never_run(trained, here):
    torch.save(nn.Linear(3, 2), "whole.pt")
    torch.save({"state_dict": trained, "extra": Evil()}, "evil.pt")
    (here / "junk.pt").write_bytes(b"nothing of the kind")
    (here / "empty.pt").write_bytes(b"")
    for name in ("whole.pt", "evil.pt", "junk.pt", "empty.pt"):
        with pytest.raises(ValueError, match=name) as error:
            load_subject("mine:net", "mine:x", checkpoint=name)
        one_line(error)
    assert not (here / "pwned").exists()
