"""Readers of the published formats: images, folders of pictures, sound, text. A file that is wrong gives one error naming it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import struct
import tarfile
import wave
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from theodolite.arguments import a_path, a_text, checked, count
from theodolite.data.base import DamagedDataError, Dataset
from theodolite.data.text import Documents, Text
from theodolite.text import nearest

Array = npt.NDArray[Any]
Shape = tuple[int, int, int]  # channels, height, width
Labelled = tuple[Path, int]
KEYS = ("x_train", "y_train", "x_test", "y_test")
SUFFIXES = (".png", ".jpg", ".jpeg")
# Without a partition file CelebA is split by the number in the file's name.
_LAST_TRAIN, _LAST_VALID = 162_770, 182_637
_NAME = re.compile(r"([0-9])_([^_]+)_([0-9]+)\.wav")
_LAST_TEST_TAKE = 4  # the published split of the spoken digits: takes 0..4 are for testing

# What the standard library and NumPy raise on cut or foreign files.
_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, MemoryError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError),
)
#: Bytes that a packed file may unpack to; more where the file itself is large, for then that is no surprise.
MOST_UNPACKED = 1 << 30
_LARGE = 8  # times its own size
_BLOCK = 1 << 20


# Bytes, text and arrays from files, where whatever is wrong with a file becomes one error that names it.


@contextmanager
def blaming(path: Path, problem: str, *also: type[Exception]) -> Iterator[None]:
    """Turn what reading a broken file raises into a `DamagedDataError` about `path`."""
    kinds: tuple[type[Exception], ...] = (*_BROKEN, *also)
    try:
        yield
    except (FileNotFoundError, PermissionError, DamagedDataError):
        raise
    except kinds as error:
        raise DamagedDataError(path, f"{problem} ({str(error).rstrip('.') or type(error).__name__})") from error


def read_bytes(path: Path) -> bytes:
    """The content of a plain, .gz or .bz2 file."""
    with blaming(path, "it cannot be unpacked"):
        if path.suffix not in (".gz", ".bz2"):
            return path.read_bytes()
        content = bytearray()
        with gzip.open(path) if path.suffix == ".gz" else bz2.open(path) as packed:
            while block := packed.read(_BLOCK):
                content += block
                check_unpacked(path, len(content))
        return bytes(content)


def check_unpacked(path: Path, size: int) -> None:
    """Refuse a packed file out of all proportion: a few kilobytes can hold as many gigabytes of zeros."""
    packed = path.stat().st_size
    if size > (most := max(MOST_UNPACKED, _LARGE * packed)):
        problem = f"its {packed} bytes unpack to more than {most}"
        raise DamagedDataError(path, problem, "If you trust it, unpack it and name what it holds.")


def check_zip(path: Path) -> None:
    """Refuse a zip archive, such as an .npz or a file of torch's, that declares more than it may unpack to."""
    with blaming(path, "it is no sound zip archive"), zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())  # no member gives more than it declares
    check_unpacked(path, size)


def read_text(path: Path) -> str:
    """The UTF-8 content of a plain, .gz or .bz2 file; lines end with a line feed alone."""
    with blaming(path, "it is not UTF-8"):
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n")


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an .npz; pickled content is refused."""
    # Opened here, because NumPy leaves a file that it cannot read open.
    if zipfile.is_zipfile(path):
        check_zip(path)
    with blaming(path, "it is not a sound .npz"), path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        return {key: content[key] for key in content}


def read_tar(path: Path) -> dict[str, bytes]:
    """The files of a .tar.gz by their last name; nothing is unpacked to disk."""
    found, size = {}, 0
    packed = io.BytesIO(read_bytes(path))
    with blaming(path, "it cannot be unpacked"), tarfile.open(fileobj=packed, mode="r:") as archive:
        for member in archive:
            size += member.size
            check_unpacked(path, size)
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                found[Path(member.name).name] = content.read()
    return found


# Readers of the published image formats: IDX, CIFAR binary, SVHN .mat, .npz, libsvm text.


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


# Readers of picture files: trees with a folder for each class, and CelebA.


def read_picture(path: Path, size: int) -> Tensor:
    """A picture as (3, size, size) bytes: the shorter side resized to `size`, the middle cut out."""
    from PIL import Image

    with blaming(path, "it is not a sound picture", Exception), Image.open(path) as picture:  # Pillow raises many kinds
        width, height = picture.size
        scale = size / min(width, height)
        new = (max(size, round(width * scale)), max(size, round(height * scale)))
        resized = picture.convert("RGB").resize(new, Image.Resampling.BILINEAR)
        left, top = (new[0] - size) // 2, (new[1] - size) // 2
        pixels = np.array(resized.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


@checked(folder=a_path, size=count, per_class=count)
def image_folder(folder: str | Path, *, size: int = 32, per_class: int | None = None) -> Dataset:
    """Pictures in a folder for each class, the folder's name being the class.

    Either `folder/train/CLASS/*.png` with `folder/test` (or `folder/val`) beside it, or `folder/CLASS/*.png`,
    where every fifth picture of a class, by name, is the test part. `per_class` keeps the first so many of
    each class in each part. The classes come in turn.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    if (folder / "train").is_dir():
        test = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
        if test is None:
            raise DamagedDataError(folder, "beside the folder train there is neither test nor val")
        return read_tree(folder / "train", test, size=size, per_class=per_class)
    classes = _classes(folder)
    files = [_pictures(folder / name) for name in classes]
    train = [[path for i, path in enumerate(paths) if i % 5 != 4][:per_class] for paths in files]
    test_files = [paths[4::5][:per_class] for paths in files]
    return _dataset(_in_turn(train), _in_turn(test_files), classes, size)


@checked(size=count, per_class=count)
def read_tree(train: Path, test: Path, *, size: int = 224, per_class: int | None = None) -> Dataset:
    """Two trees of pictures with the same class folders, such as ImageNet's `train` and `val`."""
    classes = _classes(train)
    odd = [name for name in _classes(test) if name not in classes]
    if odd:
        raise DamagedDataError(test, f"its class {odd[0]!r} is not in {train}")
    files = [[_pictures(root / name)[:per_class] for name in classes] for root in (train, test)]
    return _dataset(_in_turn(files[0]), _in_turn(files[1]), classes, size)


@checked(attribute=a_text, size=count, limit=count)
def read_celeba(
    attributes: Path, images: Path, *, attribute: str = "Smiling", size: int = 64, limit: int | None = None
) -> Dataset:
    """CelebA with one attribute as the label: `list_attr_celeba.txt` and the folder `img_align_celeba`.

    The split is that of `list_eval_partition.txt` if it lies beside the attributes, else the published one
    by file number; the validation part is left out. `limit` keeps the first so many of each part.
    """
    lines = [line.split() for line in read_text(attributes).splitlines() if line.strip()]
    if len(lines) < 2:
        raise DamagedDataError(attributes, "it must hold a count, the names of the attributes and a line for each image")
    if attribute not in lines[1]:
        close = ", ".join(nearest(attribute, lines[1]))
        raise ValueError(f"CelebA has no attribute {attribute!r}. Nearest: {close}.")
    column, partition = lines[1].index(attribute) + 1, _partition(attributes.with_name("list_eval_partition.txt"))
    parts: tuple[list[Labelled], list[Labelled]] = ([], [])
    for row in lines[2:]:
        if len(row) != len(lines[1]) + 1 or row[column] not in ("1", "-1"):
            raise DamagedDataError(attributes, f"the line of {row[0]} must hold 1 or -1 for {len(lines[1])} attributes")
        part = _celeba_part(row[0], partition, attributes)
        if part is not None and (limit is None or len(parts[part]) < limit):
            parts[part].append((images / row[0], int(row[column] == "1")))
    absent = [path for part in parts for path, _ in part if not path.is_file()]
    if absent:
        raise DamagedDataError(images, f"{len(absent)} of the listed images are not there, first {absent[0].name}")
    return _dataset(parts[0], parts[1], (f"not {attribute}", attribute), size)


def _partition(path: Path) -> dict[str, str]:
    """File name to 0 (train), 1 (valid) or 2 (test); empty without a file."""
    lines = [line.split() for line in read_text(path).splitlines() if line.strip()] if path.is_file() else []
    if any(len(line) != 2 or line[1] not in "012" for line in lines):
        raise DamagedDataError(path, "each line must be a file name and 0, 1 or 2")
    return {line[0]: line[1] for line in lines}


def _celeba_part(name: str, partition: dict[str, str], blame: Path) -> int | None:
    """0 to train on, 1 to test, None for the validation images."""
    if partition:
        if name not in partition:
            raise DamagedDataError(blame.with_name("list_eval_partition.txt"), f"it does not name {name}")
        return {"0": 0, "2": 1}.get(partition[name])
    if not Path(name).stem.isdigit():
        raise DamagedDataError(blame, f"the image {name} has no number and there is no list_eval_partition.txt")
    number = int(Path(name).stem)
    return 0 if number <= _LAST_TRAIN else 1 if number > _LAST_VALID else None


def _classes(folder: Path) -> tuple[str, ...]:
    found = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not found:
        raise DamagedDataError(folder, "it holds no folder for a class")
    return found


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    # Also one folder below: Tiny ImageNet keeps its pictures in CLASS/images.
    return sorted(p for pattern in ("*", "images/*") for p in folder.glob(pattern) if p.suffix.lower() in SUFFIXES)


def _in_turn(files: list[list[Path]]) -> list[Labelled]:
    """Files given for each class as one list that takes the classes in turn, so that its beginning has all."""
    longest = max(map(len, files))
    return [(paths[i], label) for i in range(longest) for label, paths in enumerate(files) if i < len(paths)]


def _dataset(train: list[Labelled], test: list[Labelled], classes: tuple[str, ...], size: int) -> Dataset:
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel. Got {size}.")

    def read(part: list[Labelled]) -> tuple[Tensor, Tensor]:
        x = torch.zeros(len(part), 3, size, size, dtype=torch.uint8)
        for row, (path, _) in zip(x, part, strict=True):
            row[:] = read_picture(path, size)
        return x, torch.tensor([label for _, label in part], dtype=torch.int64)

    return Dataset(*read(train), *read(test), classes)


# Reader of the Free Spoken Digit Dataset: a folder of .wav files named `{digit}_{speaker}_{take}.wav`.


@dataclass(frozen=True, eq=False)
class Recording:
    """One spoken digit: samples in [-1, 1) and how many there are in a second."""

    digit: int
    speaker: str
    take: int
    samples: Tensor
    rate: int


def read_wav(path: Path) -> tuple[Tensor, int]:
    """Samples in [-1, 1) of a 16-bit .wav with one channel, and the rate."""
    with blaming(path, "it is not a sound .wav", wave.Error), wave.open(str(path), "rb") as file:
        width, channels, rate, promised = file.getsampwidth(), file.getnchannels(), file.getframerate(), file.getnframes()
        data = file.readframes(promised)
    if (width, channels) != (2, 1):
        raise DamagedDataError(path, f"it must hold one channel of 16 bits, it holds {channels} of {8 * width}")
    if len(data) != 2 * promised:
        raise DamagedDataError(path, f"its header promises {promised} samples, but {len(data) // 2} follow")
    return torch.from_numpy(np.frombuffer(data, "<i2").astype(np.float32) / 32768), rate


def read_recordings(folder: Path) -> list[Recording]:
    """All recordings of a folder as they are, each with its own length, ordered by take, speaker and digit."""
    folder = folder if folder.is_dir() else folder.parent
    found = []
    for path in folder.glob("*.wav"):
        match = _NAME.fullmatch(path.name)
        if not match:
            raise DamagedDataError(path, "its name must be {digit}_{speaker}_{take}.wav")
        found.append(Recording(int(match[1]), match[2], int(match[3]), *read_wav(path)))
    if not found:
        raise DamagedDataError(folder, "it holds no file {digit}_{speaker}_{take}.wav")
    return sorted(found, key=lambda recording: (recording.take, recording.speaker, recording.digit))


@checked(length=count)
def read_fsdd(folder: Path, *, length: int = 8000) -> Dataset:
    """All recordings cut or filled with zeros to `length` samples, (N, 1, length); takes 0..4 are the test part."""
    if length < 1:
        raise ValueError(f"length must be at least 1 sample. Got {length}.")
    found = read_recordings(folder)
    x, digits = torch.zeros(len(found), 1, length), torch.tensor([recording.digit for recording in found], dtype=torch.int64)
    for row, recording in zip(x, found, strict=True):
        row[0, : len(recording.samples)] = recording.samples[:length]
    test = torch.tensor([recording.take <= _LAST_TEST_TAKE for recording in found])
    return Dataset(x[~test], digits[~test], x[test], digits[test], tuple("0123456789"), peak=1.0)


# Readers of text: running text in one or three files, and the .csv of AG NEWS.


def read_three(train: Path, valid: Path, test: Path) -> Text:
    """One file for each part."""
    return Text(read_text(train), read_text(valid), read_text(test))


def read_one(path: Path) -> Text:
    """One file: its first 90 % of characters to train on, the next 5 % to validate, the rest to test."""
    text = read_text(path)
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return Text(text[:first], text[first:second], text[second:])


def read_ag_news(train: Path, test: Path, *, classes: tuple[str, ...]) -> Documents:
    """Quoted lines `class, title, description`, classes from 1; title and description are joined by a blank."""
    parts = []
    for path in (train, test):
        labels, texts = [], []
        with blaming(path, "it is not a .csv", csv.Error):
            rows = list(csv.reader(io.StringIO(read_text(path), newline="")))
        for number, row in enumerate(rows, 1):
            if len(row) != 3 or row[0] not in map(str, range(1, len(classes) + 1)):
                problem = f"record {number} must be a class of 1..{len(classes)}, a title and a description, it is {row[:3]!r}"
                raise DamagedDataError(path, problem)
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
        parts.append((tuple(texts), torch.tensor(labels, dtype=torch.int64)))
    return Documents(*parts[0], *parts[1], classes)
