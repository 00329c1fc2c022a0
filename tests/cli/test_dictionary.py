"""`theodolite dictionary` on the user's own signals: what it says, keeps, resumes and refuses."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pandas
import pytest
from scipy import sparse

import theodolite.analyses.dictionary_study as study
from theodolite.cli import main
from theodolite.cli.loading import dictionary_files as source
from theodolite.data.generators import planted_dictionary, planted_samples
from theodolite.measures.dictionary import MaskedDictionaryLearning, choose_dictionary
from theodolite.measures.dictionary.estimator import split_signals

FEW = ("--components", "14", "--sparsity", "2", "--epochs", "6", "--batch-size", "40")
DRAWING = ("plot_atoms", "plot_atom_usage", "plot_learning_curve", "plot_dictionary_choice", "to_svg")


def planted(n: int = 120, d: int = 10) -> np.ndarray:
    return planted_samples(planted_dictionary(12, d), n, 2, noise=0.05).signals.numpy()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's signals; pages without pictures, which take most of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in DRAWING:
        monkeypatch.setattr(importlib.import_module("theodolite.plots"), name, lambda *given, **options: "")
    np.save("x.npy", planted())
    return tmp_path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["dictionary", *arguments])
    return int(ended.value.code or 0)


def answer(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_the_command_learns_what_the_estimator_learns(here, capsys):
    assert call("x.npy", *FEW, "--json") == 0
    found = answer(capsys)
    train, test = split_signals(planted(), 0.2, 0)
    learner = MaskedDictionaryLearning(14, sparsity=2, max_iter=6, batch_size=40, random_state=0).fit(train)
    np.testing.assert_array_equal(np.load("dictionary/components.npy"), learner.components_)
    (row,) = found["rows"]
    assert row["hidden_error"] == learner.hidden_error(test).value
    assert row["train_reconstruction"] == learner.hidden_error(train).reconstruction
    assert {f["label"] for f in found["findings"]} >= {"hidden coordinates"}
    assert (here / "dictionary" / "index.html").is_file()


def test_both_objectives_codes_and_tables(here, capsys):
    assert call("x.npy", *FEW, "--objective", "both", "--codes", "--out", "o") == 0
    said = capsys.readouterr().out
    assert "predict hidden coordinates of held-out signals" in said
    assert "objective" in said
    codes, atoms = sparse.load_npz("o/codes.npz"), np.load("o/components.npy")
    train, _ = split_signals(planted(), 0.2, 0)
    learner = MaskedDictionaryLearning(14, sparsity=2, max_iter=6, batch_size=40, random_state=0).fit(train)
    np.testing.assert_allclose(codes.toarray(), learner.transform(planted()), atol=1e-12)
    assert np.load("o/components-reconstruction.npy").shape == atoms.shape
    assert pandas.read_csv("o/rows.csv")["objective"].tolist() == ["masked", "reconstruction"]
    assert len(pandas.read_csv("o/atoms.csv")) == 28
    assert pandas.read_csv("o/learning.csv").groupby("objective").size().tolist() == [6, 6]


def test_the_size_is_chosen_as_the_function_chooses(here, capsys):
    few = ("--epochs", "4", "--batch-size", "40", "--choose", "8,14", "--sparsities", "1,2")
    assert call("x.npy", *few, "--json") == 0
    found = answer(capsys)
    wanted = choose_dictionary(planted(), [8, 14], [1, 2], max_iter=4, batch_size=40)
    assert found["choice"] == [dict(row) for row in wanted.rows()]
    assert found["rows"][0]["hidden_error"] == min(row["hidden_error"] for row in found["choice"])
    assert len(np.load("dictionary/components.npy")) == wanted.n_components
    assert "chosen size" in {f["label"] for f in found["findings"]}
    assert call("x.npy", *few, "--resume", "--json") == 0
    assert answer(capsys)["choice"] == found["choice"]


def test_a_resumed_run_equals_one_that_was_never_stopped(here, capsys):
    assert call("x.npy", *FEW, "--out", "whole") == 0
    assert call("x.npy", *FEW, "--epochs", "2", "--out", "parts") == 0
    assert call("x.npy", *FEW, "--out", "parts") == 2
    assert "--resume" in capsys.readouterr().err
    assert call("x.npy", *FEW, "--out", "parts", "--resume") == 0
    np.testing.assert_array_equal(np.load("parts/components.npy"), np.load("whole/components.npy"))
    assert pandas.read_csv("parts/learning.csv").equals(pandas.read_csv("whole/learning.csv"))
    assert call("x.npy", *FEW, "--out", "parts", "--fresh", "--seed", "1") == 0
    assert (np.load("parts/components.npy") != np.load("whole/components.npy")).any()


def test_what_was_learned_survives_ctrl_c(here, capsys, monkeypatch):
    learn, calls = study.learn_dictionaries, []

    def pressed(*given, **options):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return learn(*given, **{**options, "epochs": 1})

    monkeypatch.setattr(study, "learn_dictionaries", pressed)
    assert call("x.npy", *FEW) == 130
    assert "--resume" in capsys.readouterr().err
    assert call("x.npy", *FEW, "--resume") == 0
    assert call("x.npy", *FEW, "--out", "whole") == 0
    np.testing.assert_array_equal(np.load("dictionary/components.npy"), np.load("whole/components.npy"))


def test_resuming_other_settings_or_other_data_is_refused(here, capsys):
    assert call("x.npy", *FEW) == 0
    np.save("y.npy", 2 * planted())
    (here / "odd").mkdir()
    (here / "odd" / "run.json").write_text("{}")
    for arguments, message in (
        (("x.npy", *FEW, "--seed", "3"), "learned with seed 0, now it is 3"),
        (("y.npy", *FEW), "other data"),
        (("x.npy", *FEW, "--out", "odd"), "not what a dictionary run leaves"),
    ):
        capsys.readouterr()
        assert call(*arguments, "--resume") == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    (here / "dictionary" / "learner-masked.npz").write_bytes(b"torn")
    assert call("x.npy", *FEW, "--resume") == 2


def test_missing_values_tables_and_columns(here, capsys):
    table = pandas.DataFrame(planted(), columns=[f"f_{i}" for i in range(10)])
    table["name"] = "abc"
    table.iloc[3, 2] = np.nan
    table.to_csv("x.csv", index=False)
    assert call("x.csv", *FEW, "--columns", "f_*", "--missing", "mask", "--json") == 0
    assert "missing values" in {f["label"] for f in answer(capsys)["findings"]}
    assert call("x.csv", *FEW, "--out", "o") == 2
    assert "name holds no numbers, as 'abc'. --columns" in capsys.readouterr().err
    assert call("x.csv", *FEW, "--columns", "f_*", "--out", "o") == 2
    assert "lacks 1 of 1200 numbers (NaN). --missing mask" in capsys.readouterr().err
    assert call("x.csv", *FEW, "--columns", "f_0,g_1", "--out", "o") == 2
    assert "no column 'g_1'. Nearest names: f_1" in capsys.readouterr().err
    assert not (here / "o").exists()


def test_a_table_without_a_header_and_an_array_by_its_name(here):
    (here / "plain.csv").write_text("0.5,1,0.5\n2,3,4\n")
    found = source.read_signals(here / "plain.csv")
    np.testing.assert_array_equal(found.values, [[0.5, 1, 0.5], [2, 3, 4]])
    np.savez("two.npz", a=np.zeros((4, 2, 3), np.uint8), b=np.ones((2, 2), np.float32))
    found = source.read_signals(here / "two.npz", key="a")
    assert (found.values.shape, found.values.dtype, found.shape) == ((4, 6), np.float64, (2, 3))
    assert source.read_signals(here / "two.npz", key="b").values.dtype == np.float32


def test_centred_signals_leave_their_mean_behind(here, capsys):
    np.save("shifted.npy", planted() + 5)
    assert call("shifted.npy", *FEW, "--center", "--codes") == 0
    train, _ = split_signals(planted() + 5, 0.2, 0)
    offset = np.load("dictionary/offset.npy")
    np.testing.assert_allclose(offset, train.mean(0))
    codes, atoms = sparse.load_npz("dictionary/codes.npz"), np.load("dictionary/components.npy")
    left = planted() + 5 - offset - codes @ atoms
    assert np.square(left).mean() < np.square(planted()).mean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.npy", "--sparsity", "11"), "sparsity must be at most 9"),
        (("x.npy", "--components", "0"), "at least 1 atom"),
        (("x.npy", "--hidden-fraction", "1.5"), "hidden_fraction"),
        (("x.npy", "--held-out", "0"), "held_out"),
        (("x.npy", "--epochs", "0"), "epochs"),
        (("x.npy", "--lr", "0"), "learning_rate"),
        (("x.npy", "--decoder", "lasso", "--penalty", "-1"), "penalty"),
        (("x.npy", "--choose", "5,a"), "whole numbers with commas"),
        (("x.npy", "--choose", "0,5"), "at least 1"),
        (("x.npy", "--patch-shape", "3x3"), "with 10 numbers in all"),
        (("x.npy", "--key", "a"), "names an array of an .npz"),
        (("x.npy", "--columns", "a"), "has no names"),
        (("x.npy", "--seed", "-1"), "--seed"),
        (("none.npy",), "there is no file"),
        (("x.txt",), "must be a file that ends in .npy"),
        (("nan.npy",), "--missing mask"),
        (("inf.npy", "--missing", "mask"), "infinite"),
        (("allnan.npy", "--missing", "mask"), "every number is missing"),
        (("zeros.npy",), "all signals are zero"),
        (("empty.npy",), "0 signals"),
        (("one.npy",), "1 signals"),
        (("flat.npy",), "one signal per row"),
        (("words.npy",), "real numbers"),
        (("torn.npy",), "not a sound .npy"),
        (("two.npz",), "choose one by --key"),
        (("two.npz", "--key", "c"), "no array 'c'. It holds a, b"),
        (("nothing.csv",), "cannot be read as a table"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(here, capsys, arguments, message):
    x = planted()
    arrays = {
        "nan": x * np.where(x > 0, 1, np.nan),
        "inf": np.where(np.arange(x.size).reshape(x.shape) == 7, np.inf, x),
        "allnan": x * np.nan,
        "zeros": x * 0,
        "empty": x[:0],
        "one": x[:1],
        "flat": x[0],
        "words": np.array([["a", "b"]]),
    }
    for name, value in arrays.items():
        np.save(f"{name}.npy", value)
    (here / "torn.npy").write_bytes(b"\x93NUMPY")
    (here / "nothing.csv").write_text("")
    (here / "x.txt").write_text("1 2")
    np.savez("two.npz", a=x, b=x)
    assert call(*arguments, "--out", "o") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (here / "o").exists()


def test_parquet_without_its_package_names_it(here, capsys, monkeypatch):
    def lacking(path):
        raise ImportError("no engine")

    (here / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(pandas, "read_parquet", lacking)
    assert call("x.parquet") == 2
    assert "pip install pyarrow" in capsys.readouterr().err


def test_parquet_is_read_as_a_table(here, monkeypatch):
    (here / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(pandas, "read_parquet", lambda path: pandas.DataFrame(planted()))
    found = source.read_signals(here / "x.parquet")
    np.testing.assert_array_equal(found.values, planted())
    assert found.names is not None


def test_the_example_with_its_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    few = ("--epochs", "2", "--components", "20", "--sparsity", "3", "--choose", "10,20")
    assert call(*few, "--out", "<b>o") == 0
    text = (tmp_path / "<b>o" / "index.html").read_text(encoding="utf-8")
    assert text.count("<svg id=") == 4
    assert "scikit-learn digits" in text
    assert "The page is" in capsys.readouterr().out
