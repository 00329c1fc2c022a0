"""`load` looks where it says, in the order it says, and names what is missing or damaged with the remedy."""

from __future__ import annotations

import gzip
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from tests.unit.data import writers
from theodolite import data
from theodolite.data import catalog
from theodolite.data.catalog import Entry, Form


def write_npz(path, shape=(28, 28), first=0, n=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    images = writers.some_images(n, shape)
    images[0, 0, 0] = first
    np.savez(path, x_train=images, y_train=writers.some_labels(n), x_test=images, y_test=writers.some_labels(n))


def test_the_order_of_folders(monkeypatch, tmp_path):
    mine, variable = tmp_path / "mine", tmp_path / "variable"
    cache = tmp_path / "cache" / "theodolite" / "data"
    for number, folder in enumerate((cache, variable, mine), 1):
        write_npz(folder / "mnist.npz", first=number)
    assert data.load("mnist").x_train[0, 0, 0, 0] == 1
    monkeypatch.setenv("THEODOLITE_DATA", str(variable))
    assert data.load("mnist").x_train[0, 0, 0, 0] == 2
    found = data.load("mnist", folder=mine)
    assert found.x_train[0, 0, 0, 0] == 3
    assert (found.name, found.origin) == ("mnist", str(mine / "mnist.npz"))
    (mine / "mnist.npz").unlink()
    with pytest.raises(data.MissingDataError, match="mine"):  # a folder that was named is the only one
        data.load("mnist", folder=str(mine))
    monkeypatch.setenv("THEODOLITE_DATA", "")
    assert data.load("mnist").x_train[0, 0, 0, 0] == 1


def test_a_part_in_one_place_does_not_hide_the_whole_in_another(monkeypatch, tmp_path):
    write_npz(tmp_path / "variable" / "cifar10_subset.npz", (32, 32, 3))
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path / "variable"))
    assert data.load("cifar10").origin.endswith("cifar10_subset.npz")
    write_npz(tmp_path / "cache" / "theodolite" / "data" / "cifar10.npz", (32, 32, 3))
    assert data.load("cifar10").origin.endswith("cifar10.npz")


def test_published_files_come_first_then_the_whole_then_the_subset(tmp_path):
    write_npz(tmp_path / "cifar10_subset.npz", (32, 32, 3))
    assert data.load("cifar10", folder=tmp_path).origin.endswith("cifar10_subset.npz")
    write_npz(tmp_path / "cifar10.npz", (32, 32, 3))
    assert data.load("cifar10", folder=tmp_path).origin.endswith("cifar10.npz")
    files = writers.write_cifar10(tmp_path / "cifar-10-batches-bin")
    found = data.load("cifar10", folder=tmp_path)
    assert found.origin == str(tmp_path / "cifar-10-batches-bin")
    assert found.classes[:2] == ("airplane", "automobile")
    writers.write_tar(tmp_path / "cifar10" / "cifar-10-binary.tar.gz", files)
    assert data.load("cifar10", folder=tmp_path).origin.endswith("cifar-10-binary.tar.gz")


def test_names_that_say_nothing_count_only_in_a_folder_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    writers.write_idx(tmp_path)  # MNIST or Fashion-MNIST?
    with pytest.raises(data.MissingDataError):
        data.load("fashion_mnist")
    assert len(data.load("fashion_mnist", folder=tmp_path).y_train) == 7  # the user says which
    writers.write_idx(tmp_path / "fashion_mnist", train=5)
    assert len(data.load("fashion_mnist").y_train) == 5
    writers.write_idx(tmp_path / "MNIST" / "raw", suffix="", train=6)
    assert len(data.load("mnist").y_train) == 6


def test_every_kind_loads_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    writers.write_cifar100(tmp_path / "cifar-100-binary")
    assert data.load("cifar100").classes[5] == "thing_5"
    for part in ("train", "valid", "test"):
        (tmp_path / f"wikitext2_{part}.txt.gz").write_bytes(gzip.compress(f"{part} text\n".encode()))
    text = data.load("wikitext2")
    assert (text.name, text.valid, text.origin) == ("wikitext2", "valid text\n", str(tmp_path))
    writers.write_files(tmp_path / "ag_news_csv", {"train.csv": b'"1","a","b"\n', "test.csv": b'"4","a","b"\n'})
    assert data.load("ag_news").y_test.tolist() == [3]
    writers.write_wav(tmp_path / "free-spoken-digit-dataset" / "recordings" / "7_jackson_9.wav", [1, 2])
    assert data.load("fsdd", length=3).x_train.shape == (1, 1, 3)
    writers.write_wav(tmp_path / "wavs" / "7_jackson_9.wav", [1, 2])
    assert data.load("fsdd", folder=tmp_path / "wavs", length=3).y_train.tolist() == [7]
    writers.write_files(tmp_path / "usps", {"usps": b"1 1:1\n", "usps.t": b"2 1:1\n"})
    assert data.load("usps").y_test.tolist() == [1]
    np.savez(tmp_path / "resnet20_cifar10.npz", **{"conv1.weight": np.ones((2, 3), np.float32)})
    assert torch.equal(data.weights("resnet20_cifar10")["conv1.weight"], torch.ones(2, 3))


def test_digits_are_always_there():
    found = data.load("digits")
    assert (found.name, found.origin) == ("digits", "scikit-learn")
    assert data.where("digits").paths == ()


def test_missing_says_where_it_looked_and_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        data.load("mnist", folder=tmp_path / "mine")
    assert str(tmp_path / "mine") in str(caught.value)
    with pytest.raises(FileNotFoundError) as caught:
        data.load("mnist")
    message = str(caught.value)
    assert str(tmp_path / "cache" / "theodolite" / "data") in message
    assert "$THEODOLITE_DATA is not set" in message
    assert "theodolite data fetch mnist" in message
    assert "\n" not in message
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path / "variable"))
    with pytest.raises(data.MissingDataError) as caught:
        data.load("celeba")
    message = str(caught.value)
    assert str(tmp_path / "variable") in message
    assert "list_attr_celeba.txt and the folder img_align_celeba" in message
    assert "$THEODOLITE_DATA/celeba" in message
    assert "folder=" in message
    with pytest.raises(
        data.MissingDataError, match=r"no public address: put resnet20_cifar10\.npz \(sha256:ae55.*THEODOLITE_DATA"
    ):
        data.weights("resnet20_cifar10")


def test_missing_names_what_an_incomplete_folder_lacks(tmp_path):
    writers.write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(data.MissingDataError, match=r"mnist lacks t10k-labels-idx1-ubyte\.gz"):
        data.load("mnist", folder=tmp_path)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"'mnits'. Nearest names: mnist, .*theodolite data list"):
        data.load("mnits")
    with pytest.raises(ValueError, match=r"set of weights: theodolite\.data\.weights\('stories260k'\)"):
        data.load("stories260k")
    with pytest.raises(ValueError, match=r"not weights. Weights: .*resnet20_cifar10"):
        data.weights("cifar10")
    with pytest.raises(ValueError, match=r"digits has no option 'size'. Options: none"):
        data.load("digits", size=3)


def test_damaged_files_are_named_with_the_command(tmp_path):
    path = tmp_path / "mnist.npz"
    path.write_bytes(b"PK and nothing")
    with pytest.raises(
        ValueError, match=r"mnist\.npz is damaged: .* Remove it and get it anew with: theodolite data fetch mnist$"
    ):
        data.load("mnist", folder=tmp_path)
    (tmp_path / "resnet20_cifar10.npz").write_bytes(b"PK and nothing")
    with pytest.raises(data.DamagedDataError, match="no public address"):
        data.weights("resnet20_cifar10", folder=tmp_path)
    (tmp_path / "recordings").mkdir()
    with pytest.raises(data.DamagedDataError, match=r"recordings is damaged.*Provide a folder"):
        data.load("fsdd", folder=tmp_path)


def test_listing_has_a_line_for_each(tmp_path):
    rows = {row.name: row for row in data.listing()}
    assert list(rows) == data.names()
    assert rows["digits"].found == "always there"
    assert rows["mnist"].found is None
    assert rows["mnist"].fetchable
    assert rows["mnist"].size == 9_912_422 + 28_881 + 1_648_877 + 4_542
    assert not rows["imagenet"].fetchable
    assert rows["imagenet"].size is None
    write_npz(tmp_path / "cache" / "theodolite" / "data" / "svhn_subset.npz", (32, 32, 3))
    assert {row.name: row.found for row in data.listing()}["svhn"].endswith("svhn_subset.npz")
    assert all(row.title and row.terms for row in rows.values())


def test_the_table_is_well_formed():
    for name in data.names():
        entry = catalog.get(name)
        assert entry.name == name
        assert entry.forms
        assert entry.fetchable or entry.bring or entry.files or name == "digits"
        for file in entry.files:
            algorithm, _, value = file.digest.partition(":")
            assert len(value) == {"sha256": 64, "md5": 32}[algorithm]
            int(value, 16)
            assert file.url is None or file.url.startswith("http")


THEIRS = Entry(
    "theirs", "text", "their text", "none", (Form((("theirs.txt",),), lambda path: data.Text(path.read_text(), "", "")),)
)


def test_other_packages_add_data_sets(monkeypatch, tmp_path):
    here = __name__
    points = {
        "theirs": EntryPoint("theirs", f"{here}:THEIRS", catalog.GROUP),
        "broken": EntryPoint("broken", "no_such_module:X", catalog.GROUP),
        "odd": EntryPoint("odd", "math:pi", catalog.GROUP),
        "mnist": EntryPoint("mnist", "math:pi", catalog.GROUP),  # ours is not replaced
    }
    monkeypatch.setattr(catalog, "_others", lambda: points)
    (tmp_path / "theirs.txt").write_text("hello")
    assert data.load("theirs", folder=tmp_path).train == "hello"
    assert catalog.get("mnist").title.startswith("MNIST")
    assert data.names()[-3:] == ["theirs", "broken", "odd"]
    with pytest.raises(data.DataError, match="'broken' of no_such_module:X cannot be imported"):
        data.load("broken")
    with pytest.raises(data.DataError, match=r"must be a theodolite.data.Entry. Got 3.14"):
        data.load("odd")
    rows = {row.name: row for row in data.listing()}
    assert "cannot be imported" in rows["broken"].title
    assert rows["theirs"].found is None
