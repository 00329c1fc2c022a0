"""Readers of picture files: trees with a folder for each class, and CelebA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from theodolite.data.base import DamagedDataError, Dataset
from theodolite.data.files import blaming, read_text
from theodolite.text import nearest

Labelled = tuple[Path, int]
SUFFIXES = (".png", ".jpg", ".jpeg")
# Without a partition file CelebA is split by the number in the file's name.
_LAST_TRAIN, _LAST_VALID = 162_770, 182_637


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


def read_tree(train: Path, test: Path, *, size: int = 224, per_class: int | None = None) -> Dataset:
    """Two trees of pictures with the same class folders, such as ImageNet's `train` and `val`."""
    classes = _classes(train)
    odd = [name for name in _classes(test) if name not in classes]
    if odd:
        raise DamagedDataError(test, f"its class {odd[0]!r} is not in {train}")
    files = [[_pictures(root / name)[:per_class] for name in classes] for root in (train, test)]
    return _dataset(_in_turn(files[0]), _in_turn(files[1]), classes, size)


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
    tensors = []
    for part in (train, test):
        x = torch.zeros(len(part), 3, size, size, dtype=torch.uint8)
        for row, (path, _) in zip(x, part, strict=True):
            row[:] = read_picture(path, size)
        tensors += [x, torch.tensor([label for _, label in part], dtype=torch.int64)]
    return Dataset(tensors[0], tensors[1], tensors[2], tensors[3], classes)
