"""Tables of pandas and arrays of NumPy wherever tensors stand: the same numbers, the names kept, one clear error for the rest."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.errors import NonFiniteError


def table(n: int = 30) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame({"age": rng.integers(18, 80, n), "ratio": rng.random(n), "member": rng.random(n) > 0.5})


def numbers(frame: pd.DataFrame) -> torch.Tensor:
    return torch.tensor(frame.to_numpy(dtype=float)).float()


def kinds(n: int = 30) -> pd.Series:
    return pd.Series(np.resize(["cat", "eel", "dog"], n)).astype("category")


def test_a_table_gives_the_numbers_of_its_tensor_and_keeps_its_names():
    frame, y = table(), pd.DataFrame({"price": np.arange(30)})
    model = nn.Linear(3, 1)
    problem = th.Problem(model, nn.MSELoss(), (frame, y))
    same = th.Problem(model, nn.MSELoss(), (numbers(frame), numbers(y)))
    assert problem.data.columns == ("age", "ratio", "member")
    assert same.data.columns is None
    assert problem.loss() == pytest.approx(same.loss(), rel=1e-6)
    torch.testing.assert_close(problem.gradient(), same.gradient())
    assert problem.with_batches(list(problem.data)).data.columns == problem.data.columns


def test_arrays_and_tables_take_the_precision_of_the_model():
    model = nn.Linear(3, 1).double()
    for x in (table(), table().to_numpy(dtype="float32")):
        (batch,) = th.Problem(model, nn.MSELoss(), (x, np.zeros((30, 1), dtype="float32"))).data
        assert batch.args[0].dtype == batch.target.dtype == torch.float64
    trace = th.train(model, nn.MSELoss(), (table(), np.zeros((30, 1))), lambda p: torch.optim.SGD(p, lr=1e-6), steps=2)
    assert trace.loss[1] < trace.loss[0]


@pytest.mark.parametrize("data", ["pair", "one table", "mapping"])
def test_the_target_may_stand_among_the_columns(data):
    frame, y = table(), kinds()
    forms = {"pair": (frame, y), "one table": frame.assign(labels=y), "mapping": {"input": frame, "labels": y}}
    problem = th.Problem(nn.Linear(3, 3), nn.CrossEntropyLoss(), forms[data])
    (batch,) = problem.data
    assert batch.target.tolist() == [0, 2, 1] * 10
    assert problem.data.classes == ("cat", "dog", "eel")
    assert problem.data.columns == ("age", "ratio", "member")


def test_classes_of_validation_data_are_those_of_the_training_data():
    problem = th.Problem(nn.Linear(3, 3), nn.CrossEntropyLoss(), (table(), kinds()))
    valid = problem.on((table(2), pd.Series(["eel", "dog"]).astype("category")))
    assert next(iter(valid.data)).target.tolist() == [2, 1]
    with pytest.raises(ValueError, match="'fox' are not among those of the first data"):
        problem.on((table(1), pd.Series(["fox"]).astype("category")))
    with pytest.raises(ValueError, match=r"batch 0 has 3 columns \(AGE, ratio, member\)"):
        problem.on((table().rename(columns={"age": "AGE"}), kinds()))


def test_integers_stay_tokens_for_a_model_that_embeds_them():
    frame = pd.DataFrame(np.arange(6).reshape(2, 3))
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2))
    (batch,) = th.Problem(model, nn.CrossEntropyLoss(), (frame, pd.Series([0, 1]))).data
    assert batch.args[0].dtype == torch.long


def test_columns_that_are_no_numbers_get_one_error_with_the_remedy():
    frame = table().assign(city="Rome", kind=kinds(), day=pd.Timestamp("2020-01-01"), wait=pd.Timedelta("1h"))
    frame.loc[3, "ratio"] = np.nan
    with pytest.raises(ValueError, match=r"'city' \(text\), 'kind' \(category\), 'day' \(date\), 'wait' \(duration\)") as caught:
        th.Problem(nn.Linear(7, 1), nn.MSELoss(), (frame, np.zeros((30, 1))))
    for part in ("pd.get_dummies(frame, columns=['city', 'kind'])", ".cat.codes", "frame['day'].min()", "'ratio' (1 of 30)"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"y.astype\('category'\)"):
        th.Problem(nn.Linear(3, 3), nn.CrossEntropyLoss(), (table(), kinds().astype(str)))
    with pytest.raises(ValueError, match="array of <U3"):
        th.Problem(nn.Linear(3, 3), nn.CrossEntropyLoss(), (np.zeros((30, 3)), kinds().astype(str).to_numpy(dtype="<U3")))


@pytest.mark.parametrize(("value", "words"), [(np.nan, "missing values in 'ratio'"), (np.inf, "infinite values in 'ratio'")])
def test_missing_and_infinite_values_name_their_column(value, words):
    frame = table()
    frame.loc[[3, 4], "ratio"] = value
    with pytest.raises(NonFiniteError, match=words):
        th.Problem(nn.Linear(3, 1), nn.MSELoss(), (frame, np.zeros((30, 1))))
    found = th.survey(nn.Linear(3, 1), nn.MSELoss(), (frame, np.zeros((30, 1))))
    assert "not finite" in found.labels()


def test_a_series_against_a_column_of_outputs_is_still_refused():
    with pytest.raises(ValueError, match=r"of a Series y.to_frame\(\)"):
        th.Problem(nn.Linear(3, 1), nn.MSELoss(), (table(), pd.Series(np.zeros(30))))


def test_whole_numbers_and_flags_are_targets_of_a_regression_and_of_a_binary_loss():
    for y, loss in ((np.arange(30), nn.MSELoss()), (np.arange(30) % 2 == 0, nn.BCEWithLogitsLoss())):
        for target in (pd.DataFrame({"y": y}), y[:, None]):
            (batch,) = th.Problem(nn.Linear(3, 1), loss, (table(), target)).data
            assert batch.target.dtype == torch.float32


def test_tables_wherever_tensors_are():
    frame, y = table(), kinds()
    x, labels = numbers(frame), torch.tensor([0, 2, 1] * 10)
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 3), nn.CrossEntropyLoss()
    torch.testing.assert_close(th.agop(model, frame), th.agop(model, x))
    torch.testing.assert_close(th.tangent_kernel(model, frame), th.tangent_kernel(model, x))
    fleets = [th.Fleet(lambda seed: nn.Linear(3, 3), 2, loss=loss, rate=1e-4) for _ in range(2)]
    runs = [
        fleet.train(data, steps=3, progress=False).loss for fleet, data in zip(fleets, ((frame, y), (x, labels)), strict=True)
    ]
    torch.testing.assert_close(*runs)
    optimizer, monitor = torch.optim.SGD(model.parameters(), lr=1e-4), th.Monitor(loss)
    for step in range(2):
        optimizer.zero_grad()
        loss(model(x), labels).backward()
        monitor.observe(step, model, (frame, y), optimizer)
        optimizer.step()
    assert monitor.report() is not None
    study = th.stability(
        lambda seed: nn.Linear(3, 3),
        "sgd",
        (frame, y),
        (frame[:9], y[:9]),
        loss=loss,
        sizes=[6, 9, 12],
        pairs=2,
        steps=2,
        rate=1e-4,
    )
    assert study.rows()


def test_pandas_is_not_imported_for_tensors(monkeypatch):
    monkeypatch.delitem(sys.modules, "pandas")
    th.Problem(nn.Linear(1, 1), nn.MSELoss(), (torch.ones(3, 1), np.ones((3, 1)))).loss()
    assert "pandas" not in sys.modules
