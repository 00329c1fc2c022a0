"""`module:attribute` for models, data and losses, with all that can be wrong in the user's file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from tests.cli.loading.conftest import one_line
from theodolite.cli import main
from theodolite.cli.loading.subject import load_subject

FILE = """
import torch
from torch import nn
import theodolite as th

net = nn.Linear(3, 2)
x, y = torch.randn(8, 3), torch.arange(8) % 2
pair = (x, y)
real = (x, torch.randn(8, 2))
flat = lambda: nn.Linear(64, 10)

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(3, 2)
    def forward(self, x):
        return self.inner(x)

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()

class Teller(nn.Module):
    "takes tokens, gives (batch, tokens, classes)"
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5)
    def forward(self, ids):
        return self.table(ids)

class Speller(Teller):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 7)

def seeded(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)

def with_loss():
    return nn.Linear(3, 2), nn.CrossEntropyLoss(label_smoothing=0.1)

def with_optimizer():
    model = nn.Linear(3, 2)
    return model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.5)

def everything():
    model = nn.Linear(3, 2)
    return dict(model=model, loss=nn.CrossEntropyLoss(), data=pair, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lr=0.1)

def problem():
    return th.Problem(nn.Linear(3, 2), nn.MSELoss(), [real, real])

def named_loss(output, target):
    return (output - target).pow(4).mean()

def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pair), batch_size=3, shuffle=True)

def data_set():
    return torch.utils.data.TensorDataset(*pair)

def stream():
    return ((x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2))

def arrays():
    return x.double().numpy(), y.int().numpy()

def digits():
    return th.data.load("digits")

def mapping():
    return {"x": x, "labels": y}

def tokens():
    return torch.arange(12).reshape(2, 6) % 7, torch.arange(12).reshape(2, 6) % 5

def broken():
    return {}["nosuch"]

def leaves():
    raise SystemExit("bye")

def wrong():
    return 3

def misspelt():
    return {"modle": nn.Linear(3, 2)}

def no_module():
    return {"model": 3}

number = 3
"""


@pytest.fixture
def mine(here):
    (here / "mine.py").write_text(FILE)
    return here


@pytest.mark.parametrize("attribute", ["net", "Net", "seeded"])
def test_a_module_a_class_and_a_function(surveyed, mine, attribute):
    if attribute == "net":  # made when the file is imported, which happens once
        subject = load_subject("mine:net", "mine:pair")
        assert th.Problem(subject.model, subject.loss, subject.data).size == 8
        return
    subject = surveyed(f"mine:{attribute}", "mine:pair")
    assert isinstance(subject.loss, nn.CrossEntropyLoss)
    assert subject.name == f"{attribute} on mine:pair"
    assert subject.population is None


def test_a_file_by_its_path(surveyed, mine, monkeypatch):
    (mine / "deep").mkdir()
    (mine / "mine.py").rename(mine / "deep" / "mine.py")
    assert surveyed("deep/mine.py:seeded", f"{mine}/deep/mine.py:pair").model.in_features == 3


def test_the_order_of_words_does_not_change_the_model(mine):
    """The file draws random numbers when it is run, which happens with the first word only."""
    first = load_subject("mine:Net", "mine:pair").model.inner.weight
    second = load_subject("mine:Net", "mine:pair").model.inner.weight
    assert torch.equal(first, second)
    assert not torch.equal(first, load_subject("mine:Net", "mine:pair", seed=1).model.inner.weight)


def test_a_file_here_is_meant_even_if_python_has_a_module_of_that_name(surveyed, mine):
    import code

    (mine / "mine.py").rename(mine / "code.py")
    assert surveyed("code:seeded", "code:pair").model.in_features == 3
    import sys

    assert sys.modules["code"] is code


def test_what_a_builder_may_return(surveyed, mine):
    assert surveyed("mine:with_loss", "mine:pair").loss.label_smoothing == 0.1
    subject = surveyed("mine:with_optimizer", "mine:pair")
    assert isinstance(subject.optimizer, torch.optim.Adam)
    subject = surveyed("mine:everything")
    assert subject.lr == 0.1
    assert subject.name == "everything"
    assert isinstance(subject.optimizer, torch.optim.SGD)


def test_a_problem_is_kept(surveyed, mine):
    subject = surveyed("mine:problem")
    assert isinstance(subject.problem, th.Problem)
    assert isinstance(subject.loss, nn.MSELoss)
    assert subject.problem.loss() == th.Problem(subject.model, subject.loss, subject.data).loss()
    assert surveyed("mine:problem", "mine:real", "l1").problem is None
    part = surveyed("mine:problem", samples=5)
    assert part.problem is None
    assert part.population == 16


@pytest.mark.parametrize("data", ["loader", "data_set", "stream", "arrays", "mapping"])
def test_forms_of_data(surveyed, mine, data):
    model = "mine:Net" if data != "loader" else "mine:with_loss"
    subject = surveyed(model, f"mine:{data}", samples=3)
    count = sum(len(b[1]) for b in subject.data) if isinstance(subject.data, list) else 3
    assert 3 <= count < 8
    assert subject.population == 8


def test_a_named_network_takes_the_sizes_of_own_data(surveyed, mine):
    subject = surveyed("F-40^2", "mine:pair")
    assert (subject.model.fc1.in_features, subject.model.fc3.out_features) == (3, 2)
    subject = surveyed("F-5", "mine:real")
    assert isinstance(subject.loss, nn.MSELoss)
    assert any("real numbers" in note for note in subject.notes)
    assert surveyed("F-5", "mine:loader").model.fc1.in_features == 3
    assert surveyed("F-5", "mine:pair", "bce").data[1].shape == (8, 1)
    assert surveyed("GPT-small", "mine:tokens").model.context == 64


def test_own_models_on_data_sets(surveyed, mine):
    subject = surveyed("mine:flat", "digits", samples=5)
    assert subject.data[0].shape == (5, 64)
    assert any("flattened" in note for note in subject.notes)
    assert surveyed("mine:flat", "mine:digits", samples=5).population == 1438


def test_tokens_with_the_classes_last(surveyed, mine):
    surveyed("mine:Teller", "mine:tokens")
    (mine / "poem.txt").write_text("a rose is a rose " * 100)
    subject = surveyed("mine:Speller", "poem.txt", samples=2)
    assert subject.data[0].shape == (2, 63)
    assert int(subject.data[0].max()) < 7
    with pytest.raises(ValueError, match="no embedding") as error:
        load_subject("mine:net", "poem.txt")
    one_line(error)


def test_own_losses(surveyed, mine):
    subject = surveyed("mine:seeded", "mine:real", "mine:named_loss")
    assert subject.facts["loss"] == "mine:named_loss"
    assert surveyed("mine:with_loss", "mine:pair", "mse").data[1].shape == (8, 2)


@pytest.mark.parametrize(
    ("model", "data", "loss", "message"),
    [
        ("mine:nett", "mine:pair", None, "Nearest names: net"),
        ("mine:Needy", "mine:pair", None, "needs width"),
        ("mine:broken", "mine:pair", None, "mine:broken failed: KeyError: 'nosuch'"),
        ("mine:leaves", "mine:pair", None, "SystemExit: bye"),
        ("mine:wrong", "mine:pair", None, "int"),
        ("mine:misspelt", "mine:pair", None, "'modle'"),
        ("mine:no_module", "mine:pair", None, "int"),
        ("mine:net", None, None, "--data"),
        ("mine:net", "mine:number", None, "DataLoader"),
        ("mine:net", "mine:pair", "mine:number", "int"),
        ("mien:net", "mine:pair", None, "Python files here: mine"),
        ("nosuch/mine.py:net", "mine:pair", None, "no file"),
        ("mine:1x", "mine:pair", None, "module:attribute"),
        ("mine:net", "mine:broken", None, "KeyError"),
    ],
)
def test_what_is_wrong_is_one_clear_line(mine, model, data, loss, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_subject(model, data, loss)
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def :\n", "SyntaxError"),
        ("import nosuchmodule\n", "nosuchmodule"),
        ("raise SystemExit(3)\n", "SystemExit"),
        ("1 / 0\n", "ZeroDivision"),
    ],
)
def test_a_file_that_does_not_import_is_one_line(here, text, message):
    (here / "mine_bad.py").write_text(text)
    with pytest.raises(ValueError, match="could not be imported") as error:
        load_subject("mine_bad:net", None)
    assert message in one_line(error)


CHOSEN = """
import pandas as pd
import torch
from torch import nn

x = torch.randn(60, 3)
frame = pd.DataFrame(x.numpy(), columns=["age", "income", "rooms"])
prices = (frame, frame[["age"]] * 2)
kinds = (frame, pd.Series(pd.Categorical.from_codes([0, 1] * 30, ["a", "b"])))
several = (x, (x > 1).float())
build = lambda: nn.Linear(3, 1)
two = lambda: nn.Linear(3, 2)
wide = lambda: nn.Linear(3, 3)
"""


@pytest.mark.parametrize(
    ("model", "data", "kind", "said"),
    [
        ("build", "prices", nn.MSELoss, "squared error was chosen"),
        ("two", "kinds", nn.CrossEntropyLoss, "cross-entropy was chosen"),
        ("wide", "several", nn.BCEWithLogitsLoss, "binary cross-entropy was chosen"),
    ],
)
def test_the_loss_follows_from_tables_and_from_rows_of_0_and_1(model, data, kind, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "choice.py").write_text(CHOSEN)
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_subject(f"choice:{model}", f"choice:{data}").loss, kind)
    with pytest.raises(SystemExit) as ended:
        main(["survey", "--model", f"choice:{model}", "--data", f"choice:{data}", "--only", "batches", "--lr", "0.1"])
    assert ended.value.code == 0
    assert f"Loss: {said}" in capsys.readouterr().err
