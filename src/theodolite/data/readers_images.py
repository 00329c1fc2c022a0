"""Readers of the published image formats: IDX, CIFAR binary, SVHN .mat, .npz, libsvm text."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch

from theodolite.data.base import DamagedDataError, Dataset
from theodolite.data.files import Array, blaming, read_arrays, read_bytes, read_tar

Shape = tuple[int, int, int]  # channels, height, width
KEYS = ("x_train", "y_train", "x_test", "y_test")


def read_idx(path: Path) -> Array:
    """An array of unsigned bytes in the IDX format of MNIST, plain or .gz.

    Two zero bytes, the type (8), the rank, the sizes as big-endian 32-bit numbers, the values.
    """
    data = read_bytes(path)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DamagedDataError(path, f"an IDX file of bytes begins with 000008, this one with {data[:3].hex() or 'nothing'}")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise DamagedDataError(path, f"it ends inside its header, after {len(data)} bytes")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != np.prod(shape, dtype=np.int64):
        raise DamagedDataError(path, f"its header promises the shape {shape}, but {len(data) - start} values follow")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_idx_set(*paths: Path, shape: Shape, classes: tuple[str, ...]) -> Dataset:
    """The four files of MNIST: training images and labels, test images and labels."""
    return images_and_labels(paths, [read_idx(path) for path in paths], shape, classes)


def read_cifar10(*paths: Path, classes: tuple[str, ...]) -> Dataset:
    """The binary version of CIFAR-10: the .tar.gz, or five training files and the test file."""
    train, test = [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"
    files = _archive_or_files(paths, [*train, test])
    records = [_records(*files[name], labels=1) for name in train]
    images, labels = (np.concatenate([record[i] for record in records]) for i in range(2))
    blame = [files[name][0] for name in (train[0], train[0], test, test)]
    return images_and_labels(blame, [images, labels, *_records(*files[test], labels=1)], (3, 32, 32), classes)


def read_cifar100(*paths: Path) -> Dataset:
    """The binary version of CIFAR-100 with its fine labels: the .tar.gz, or its training, test and names file."""
    names = ["train.bin", "test.bin", "fine_label_names.txt"]
    files = _archive_or_files(paths, names)
    classes = tuple(files[names[2]][1].decode("utf-8", "replace").split())
    arrays = [array for name in names[:2] for array in _records(*files[name], labels=2)]
    blame = [files[name][0] for name in names[:2] for _ in range(2)]
    return images_and_labels(blame, arrays, (3, 32, 32), classes)


def _archive_or_files(paths: tuple[Path, ...], wanted: list[str]) -> dict[str, tuple[Path, bytes]]:
    """Each wanted file with the path to blame for it."""
    if len(paths) == 1:
        files = {name: (paths[0], content) for name, content in read_tar(paths[0]).items()}
    else:
        files = {path.name: (path, path.read_bytes()) for path in paths}
    absent = [name for name in wanted if name not in files]
    if absent:
        raise DamagedDataError(paths[0], f"it holds no {absent[0]}")
    return files


def _records(path: Path, data: bytes, labels: int) -> tuple[Array, Array]:
    """Images and labels of CIFAR records: `labels` bytes, the last of which counts, then 3072 pixels."""
    size = labels + 3 * 32 * 32
    if not data or len(data) % size:
        raise DamagedDataError(path, f"{len(data)} bytes are not a whole number of records of {size}")
    table = np.frombuffer(data, np.uint8).reshape(-1, size)
    return table[:, labels:].reshape(-1, 3, 32, 32), table[:, labels - 1]


def read_svhn(train: Path, test: Path, *, classes: tuple[str, ...]) -> Dataset:
    """The cropped digits of SVHN: `X` (32, 32, 3, N) and `y`, where 10 is the digit 0."""
    arrays = [*_read_mat(train), *_read_mat(test)]
    return images_and_labels([train, train, test, test], arrays, (3, 32, 32), classes)


def _read_mat(path: Path) -> tuple[Array, Array]:
    from scipy.io import loadmat

    with blaming(path, "it is not a MATLAB file with X and y", Exception):  # SciPy raises almost anything
        content = loadmat(path, variable_names=["X", "y"])
        images, labels = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1)
    if images.ndim != 4:
        raise DamagedDataError(path, f"X must be (32, 32, 3, N), it is {images.shape}")
    return np.transpose(images, (3, 2, 0, 1)), np.where(labels == 10, 0, labels)


def read_npz(path: Path, *, shape: Shape | None = None, classes: tuple[str, ...] = ()) -> Dataset:
    """`x_train`, `y_train`, `x_test`, `y_test` and perhaps `classes` of an .npz; images (N, H, W) or (N, H, W, C)."""
    content = read_arrays(path)
    absent = [key for key in KEYS if key not in content]
    if absent:
        raise DamagedDataError(path, f"it holds no {absent[0]}, only {', '.join(content) or 'nothing'}")
    names = tuple(map(str, content["classes"])) if "classes" in content else classes
    arrays = [np.moveaxis(content[key], 3, 1) if content[key].ndim == 4 else content[key] for key in KEYS]
    return images_and_labels([path] * 4, arrays, shape, names)


def read_usps(train: Path, test: Path, *, classes: tuple[str, ...]) -> Dataset:
    """USPS in libsvm text, plain or .bz2: 16x16 pixels in [-1, 1], label 1 is the digit 0.

    Pixels become bytes, (x + 1) / 2 * 255 rounded.
    """
    arrays = []
    for path in (train, test):
        values, labels = read_libsvm(path, 256)
        arrays += [np.rint((values.clip(-1, 1) + 1) * 127.5).astype(np.uint8).reshape(-1, 1, 16, 16), labels - 1]
    return images_and_labels([train, train, test, test], arrays, (1, 16, 16), classes)


def read_libsvm(path: Path, features: int) -> tuple[Array, Array]:
    """Lines `label index:value index:value ...`, indices from 1, what is absent is 0: (N, features) and labels."""
    lines = [line.split() for line in read_bytes(path).decode("ascii", "replace").splitlines() if line.strip()]
    values, labels = np.zeros((len(lines), features), np.float32), np.zeros(len(lines), np.int64)
    for row, line in enumerate(lines):
        with blaming(path, f"line {row + 1} is not in libsvm format"):
            labels[row] = int(float(line[0]))
            for pair in line[1:]:
                index, value = pair.split(":")
                if not 1 <= int(index) <= features:
                    raise ValueError(f"index {index} is outside 1..{features}")
                values[row, int(index) - 1] = float(value)
    return values, labels


def read_digits() -> Dataset:
    """The 1797 digits of scikit-learn, 8x8 with values 0..16.

    They have no published split. Here a fifth of each class, rounded, drawn once with seed 0, is the test
    part; both parts keep the original order.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).to(torch.uint8).reshape(-1, 1, 8, 8), torch.from_numpy(labels).to(torch.int64)
    generator, test = torch.Generator().manual_seed(0), torch.zeros(len(y), dtype=torch.bool)
    for digit in range(10):
        members = (y == digit).nonzero()[:, 0]
        test[members[torch.randperm(len(members), generator=generator)[: round(len(members) / 5)]]] = True
    return Dataset(x[~test], y[~test], x[test], y[test], tuple("0123456789"), origin="scikit-learn", peak=16.0)


def images_and_labels(
    paths: tuple[Path, ...] | list[Path], arrays: list[Array], shape: Shape | None, classes: tuple[str, ...]
) -> Dataset:
    """A `Dataset` of the four arrays of `KEYS` after checking each; `paths` says which file to blame for which."""
    arrays = [array[:, None] if array.ndim == 3 else array for array in arrays]  # one channel
    for i in (0, 2):
        _check(paths[i], paths[i + 1], arrays[i], arrays[i + 1], shape, len(classes))
    if arrays[0].shape[1:] != arrays[2].shape[1:]:
        raise DamagedDataError(paths[2], f"its images are {arrays[2].shape[1:]}, those for training {arrays[0].shape[1:]}")
    # Copies, because arrays over file bytes are read-only and torch warns of those.
    kinds = (np.uint8, np.int64, np.uint8, np.int64)
    tensors = [torch.from_numpy(np.array(a, dtype=kind, order="C")) for a, kind in zip(arrays, kinds, strict=True)]
    return Dataset(tensors[0], tensors[1], tensors[2], tensors[3], classes)


def _check(image_path: Path, label_path: Path, images: Array, labels: Array, shape: Shape | None, classes: int) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or (shape is not None and images.shape[1:] != shape):
        wanted = f"(N, {', '.join(map(str, shape))})" if shape else "(N, C, H, W)"
        raise DamagedDataError(image_path, f"images must be uint8 {wanted}, they are {images.dtype} {images.shape}")
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        problem = f"{len(images)} images need as many whole labels, they are {labels.dtype} {labels.shape}"
        raise DamagedDataError(label_path, problem)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        problem = f"labels must lie in 0..{classes - 1}, they lie in {labels.min()}..{labels.max()}"
        raise DamagedDataError(label_path, problem)
