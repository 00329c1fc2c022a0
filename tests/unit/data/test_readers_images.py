"""Every image reader on a tiny file in the published format, and on damaged ones."""

from __future__ import annotations

import bz2
import gzip
import pickle

import numpy as np
import pytest
import torch

from tests.unit.data import writers
from theodolite.data import DamagedDataError
from theodolite.data import readers as readers
from theodolite.data.readers import read_arrays

DIGITS = tuple("0123456789")


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_idx(tmp_path, suffix):
    arrays = writers.write_idx(tmp_path, suffix)
    found = readers.read_idx_set(*(tmp_path / (name + suffix) for name in writers.IDX), shape=(1, 28, 28), classes=DIGITS)
    assert np.array_equal(found.x_train[:, 0], arrays[0])
    assert found.y_test.tolist() == arrays[3].tolist()
    assert found.x_test.dtype == torch.uint8
    assert found.x_train.is_contiguous()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with 000008, this one with nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00", "this one with 00000d"),
        (b"\x00\x00\x08\x03\x00\x00\x00\x01", "inside its header"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abc", r"promises the shape \(5,\), but 3 values"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02abc", r"promises the shape \(2,\), but 3 values"),
    ],
)
def test_damaged_idx(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DamagedDataError, match=message) as caught:
        readers.read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [5, 40, -9])
def test_truncated_gz(tmp_path, cut):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(writers.idx_bytes(writers.some_images(4, (28, 28))))[:cut])
    with pytest.raises(DamagedDataError, match=r"images\.gz is damaged: it cannot be unpacked"):
        readers.read_idx(path)


def test_images_of_another_size_and_labels_out_of_range(tmp_path):
    writers.write_idx(tmp_path)
    paths = [tmp_path / f"{name}.gz" for name in writers.IDX]
    with pytest.raises(DamagedDataError, match=r"train-images.*\(N, 1, 27, 28\), they are uint8 \(7, 1, 28, 28\)"):
        readers.read_idx_set(*paths, shape=(1, 27, 28), classes=DIGITS)
    with pytest.raises(DamagedDataError, match=r"train-labels.*0\.\.4, they lie in 0\.\.9"):
        readers.read_idx_set(*paths, shape=(1, 28, 28), classes=DIGITS[:5])
    with pytest.raises(DamagedDataError, match="7 images need as many"):
        readers.read_idx_set(paths[0], paths[3], *paths[2:], shape=(1, 28, 28), classes=DIGITS)


@pytest.mark.parametrize("packed", [True, False])
def test_cifar10(tmp_path, packed):
    files = writers.write_cifar10(tmp_path / "bin")
    writers.write_tar(tmp_path / "cifar-10-binary.tar.gz", files, "cifar-10-batches-bin")
    paths = [tmp_path / "cifar-10-binary.tar.gz"] if packed else [tmp_path / "bin" / name for name in files]
    found = readers.read_cifar10(*paths, classes=DIGITS)
    assert found.y_train.tolist() == [1, 0, 2, 1, 3, 2, 4, 3, 5, 4]
    assert found.y_test.tolist() == [9, 0, 4]
    assert np.array_equal(found.x_train[2:4], writers.some_images(2, (3, 32, 32), 2))
    assert np.array_equal(found.x_test, writers.some_images(3, (3, 32, 32), 9))


@pytest.mark.parametrize("packed", [True, False])
def test_cifar100_takes_the_fine_labels(tmp_path, packed):
    files = writers.write_cifar100(tmp_path / "bin")
    writers.write_tar(tmp_path / "cifar-100-binary.tar.gz", files, "cifar-100-binary")
    names = ("train.bin", "test.bin", "fine_label_names.txt")
    paths = [tmp_path / "cifar-100-binary.tar.gz"] if packed else [tmp_path / "bin" / name for name in names]
    found = readers.read_cifar100(*paths)
    assert found.y_train.tolist() == [99, 1, 50, 7]
    assert len(found.classes) == 100
    assert found.classes[99] == "thing_99"
    assert np.array_equal(found.x_test, writers.some_images(2, (3, 32, 32), 2))


def test_damaged_cifar(tmp_path):
    files = writers.write_cifar10(tmp_path)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    writers.write_tar(archive, {name: content for name, content in files.items() if name != "data_batch_3.bin"})
    with pytest.raises(DamagedDataError, match=r"holds no data_batch_3\.bin"):
        readers.read_cifar10(archive, classes=DIGITS)
    writers.write_tar(archive, files)
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(DamagedDataError, match="cannot be unpacked"):
        readers.read_cifar10(archive, classes=DIGITS)
    (tmp_path / "test_batch.bin").write_bytes(files["test_batch.bin"][:-1])
    with pytest.raises(DamagedDataError, match=r"test_batch\.bin.*9218 bytes are not a whole number of records of 3073"):
        readers.read_cifar10(*(tmp_path / name for name in files), classes=DIGITS)
    writers.write_cifar100(tmp_path, classes=60)
    with pytest.raises(DamagedDataError, match=r"0\.\.59, they lie in 1\.\.99"):
        readers.read_cifar100(*(tmp_path / name for name in ("train.bin", "test.bin", "fine_label_names.txt")))


def write_mat(path, images, labels):
    from scipy.io import savemat

    savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": labels[:, None]})


def test_svhn(tmp_path):
    images = writers.some_images(4, (3, 32, 32))
    write_mat(tmp_path / "a.mat", images, np.array([1, 10, 9, 10], np.uint8))
    write_mat(tmp_path / "b.mat", images[:2], np.array([5, 6], np.uint8))
    found = readers.read_svhn(tmp_path / "a.mat", tmp_path / "b.mat", classes=DIGITS)
    assert found.y_train.tolist() == [1, 0, 9, 0]  # ten stands for nought
    assert np.array_equal(found.x_train, images)
    assert found.x_train.is_contiguous()


def test_damaged_svhn(tmp_path):
    from scipy.io import savemat

    path = tmp_path / "a.mat"
    write_mat(path, writers.some_images(4, (3, 32, 32)), np.ones(4, np.uint8))
    whole = path.read_bytes()
    for content in (b"", b"not a matlab file" * 20, whole[:500]):
        path.write_bytes(content)
        with pytest.raises(DamagedDataError, match="not a MATLAB file"):
            readers.read_svhn(path, path, classes=DIGITS)
    savemat(path, {"y": np.ones(3)})
    with pytest.raises(DamagedDataError, match="with X and y"):
        readers.read_svhn(path, path, classes=DIGITS)
    savemat(path, {"X": np.ones((3, 3)), "y": np.ones(3)})
    with pytest.raises(DamagedDataError, match="32, 32, 3, N"):
        readers.read_svhn(path, path, classes=DIGITS)


def test_npz_with_and_without_colour(tmp_path):
    grey, colour = tmp_path / "grey.npz", tmp_path / "colour.npz"
    images = writers.some_images(5, (8, 8, 3))
    labels = writers.some_labels(5, 2)
    np.savez_compressed(grey, x_train=images[..., 0], y_train=labels, x_test=images[:2, ..., 0], y_test=labels[:2])
    found = readers.read_npz(grey, shape=(1, 8, 8), classes=("a", "b"))
    assert np.array_equal(found.x_train[:, 0], images[..., 0])
    np.savez(colour, x_train=images, y_train=labels, x_test=images, y_test=labels, classes=np.array(["cat", "dog"]))
    found = readers.read_npz(colour)
    assert found.classes == ("cat", "dog")
    assert np.array_equal(found.x_test, images.transpose(0, 3, 1, 2))


def test_damaged_npz(tmp_path):
    path = tmp_path / "some.npz"
    images, labels = writers.some_images(5, (8, 8)), writers.some_labels(5, 2)
    np.savez(path, x_train=images, y_train=labels, x_test=images)
    with pytest.raises(DamagedDataError, match="holds no y_test, only x_train, y_train, x_test"):
        readers.read_npz(path)
    np.savez(path, x_train=images.astype(float), y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(DamagedDataError, match=r"must be uint8.*float64"):
        readers.read_npz(path, classes=("a", "b"))
    np.savez(path, x_train=images, y_train=labels.astype(float), x_test=images, y_test=labels)
    with pytest.raises(DamagedDataError, match=r"whole labels.*float64"):
        readers.read_npz(path, classes=("a", "b"))
    np.savez(path, x_train=images, y_train=labels, x_test=images[:, :7], y_test=labels)
    with pytest.raises(DamagedDataError, match=r"its images are \(1, 7, 8\), those for training \(1, 8, 8\)"):
        readers.read_npz(path, classes=("a", "b"))
    whole = path.read_bytes()
    for content in (b"", b"PK nonsense", whole[:-30], whole[:200] + bytes(20) + whole[220:]):
        path.write_bytes(content)
        with pytest.raises(DamagedDataError, match=r"some\.npz is damaged: it is not a sound \.npz"):
            readers.read_npz(path)


def test_pickles_are_never_opened(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DamagedDataError):
        read_arrays(path)
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DamagedDataError):
        read_arrays(path)


def usps_line(label, pixels):
    return " ".join([str(label), *(f"{i}:{v:.4f}" for i, v in enumerate(pixels, 1) if v)]) + " \n"


@pytest.mark.parametrize("packed", [True, False])
def test_usps(tmp_path, packed):
    pixels = np.linspace(-1, 1, 512).reshape(2, 256)
    pixels[1, 3] = 0  # left out of the file
    text = (usps_line(10, pixels[0]) + usps_line(1, pixels[1])).encode()
    train, test = (tmp_path / (name + ".bz2" * packed) for name in ("usps", "usps.t"))
    for path in (train, test):
        path.write_bytes(bz2.compress(text) if packed else text)
    found = readers.read_usps(train, test, classes=DIGITS)
    assert found.y_train.tolist() == [9, 0]
    assert found.x_train.shape == (2, 1, 16, 16)
    assert found.x_train[0, 0, 0, 0] == 0
    assert found.x_train[1, 0, 15, 15] == 255
    assert found.x_train[1, 0, 0, 3] in (127, 128)
    np.testing.assert_allclose(found.scaled().x_train[0].flatten() * 2 - 1, pixels[0], atol=1 / 255 + 1e-4)


@pytest.mark.parametrize("line", ["3 257:0.5", "3 0:0.5", "three 1:0.5", "3 1:0.5:2", "3 1=0.5"])
def test_damaged_usps(tmp_path, line):
    path = tmp_path / "usps"
    path.write_text("1 1:0.5\n" + line + "\n")
    with pytest.raises(DamagedDataError, match="line 2 is not in libsvm format"):
        readers.read_libsvm(path, 256)
    packed = tmp_path / "usps.bz2"
    packed.write_bytes(bz2.compress(b"1 1:0.5\n" * 100)[:-8])
    with pytest.raises(DamagedDataError, match="cannot be unpacked"):
        readers.read_libsvm(packed, 256)


def test_digits_are_split_once_and_for_all():
    found = readers.read_digits()
    assert len(found.y_train) + len(found.y_test) == 1797
    assert found.x_train.max() == 16 == found.peak
    counts = torch.bincount(torch.cat([found.y_train, found.y_test]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.bincount(found.y_test).tolist() == [round(c / 5) for c in counts.tolist()]
    again = readers.read_digits()
    assert torch.equal(found.x_test, again.x_test)
    together = {tuple(x.flatten().tolist()) for x in found.x_train} & {tuple(x.flatten().tolist()) for x in found.x_test}
    assert not together
