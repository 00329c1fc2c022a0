"""Data words: the name of a data set, `module:attribute`, or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from theodolite import data as data_sets
from theodolite.cli.loading.batches import is_one_batch, take_samples
from theodolite.cli.loading.checkpoints import read_file
from theodolite.cli.loading.module_attribute import call, load_attribute, names_code
from theodolite.cli.loading.table_files import TABLES, read_table
from theodolite.data.readers import read_arrays, read_text
from theodolite.problem.tables import column_names, input_tensor, target_tensor
from theodolite.text import listed, nearest

Part = Literal["train", "test"]
FILES = (".npz", ".pt", ".pth", ".safetensors", ".txt", ".txt.gz", *TABLES)
TARGETS = ("target", "label", "labels", "class", "y")  # what the column of targets is called in a table, else it is the last
CLASSES = 20  # more different whole numbers than this are no classes
DEFAULT_SAMPLES = 1000
STORIES, SAMPLE_TEXT = "stories260k", "tinystories_sample"  # a trained network, and the text it knows


ALL = 10**9  # samples: whatever there is


class NoTestPartError(ValueError):
    """The test part was asked of data that have none."""


@dataclass(frozen=True)
class Share:
    """How much of the data is taken: a seeded choice of `samples` examples of a part, None where no number was given."""

    samples: int | None
    seed: int
    part: Part = "train"
    everything: bool = False

    def count(self, source: Source | None) -> int | None:
        """Sequences to make of a text, None for the usual number; random ones have no end."""
        return ALL if self.samples is None and self.everything and source is not None else self.samples

    def most(self, default: int) -> int:
        """How many examples to take of a data set or a file, `default` where no number was given."""
        return self.samples or (ALL if self.everything else default)

    def remarks(self, count: int, size: int) -> dict[str, Any]:
        """Population and note of a choice."""
        if count == size:
            return {}
        name = "training" if self.part == "train" else "test"
        note = f"{count} of {size} {name} examples, a seeded choice; --samples names another number"
        return {"population": size, "notes": () if self.samples else (note,)}


@dataclass(frozen=True)
class Source:
    """What a data word stands for: tensors or batches in `content`, or running text, or labelled texts.

    `own` is True for what the user's code gave: that is passed on as it is, while images and text of data sets and
    files are fitted to the network. `columns` and `labels` are what a table calls its inputs and its classes.
    """

    name: str
    origin: str
    content: Any = None
    text: data_sets.Text | None = None
    documents: data_sets.Documents | None = None
    classes: int | None = None
    population: int | None = None
    notes: tuple[str, ...] = ()
    own: bool = False
    columns: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None


def load_data(word: str, share: Share, default: int = DEFAULT_SAMPLES) -> Source:
    """The share of the data of a word; of data sets and files `default` examples where no number was given."""
    path = Path(word).expanduser()
    suffix = next((s for s in sorted(FILES, key=len, reverse=True) if word.lower().endswith(s)), None)
    if word in data_sets.names():
        return from_set(_read_set(word), word, share, default)
    if suffix is not None and (path.is_file() or not names_code(word)):
        return _from_file(path, suffix, share, default)
    if names_code(word):
        found = load_attribute(word, "--data", share.seed)
        if callable(found) and not isinstance(found, torch.utils.data.Dataset):
            found = call(word, found, share.seed)
        return from_value(found, word, share, default)
    near = listed(nearest(word, data_sets.names(), 3))
    raise ValueError(
        f"--data {word!r} must be the name of a data set, module:attribute, or a file ({listed(FILES)}). Nearest names: {near}. "
        "All names: theodolite data list."
    )


def are_there(*names: str) -> bool:
    """Whether these data sets can be loaded."""
    try:
        return all(map(data_sets.where, names))
    except data_sets.MissingDataError:
        return False


def _read_set(name: str) -> Any:
    try:
        return data_sets.load(name)
    except data_sets.DataError:
        raise
    except ValueError as error:
        raise ValueError(f"--data {name!r} is no data set but trained weights; --model takes those.") from error


def from_set(found: Any, name: str, share: Share, default: int = DEFAULT_SAMPLES) -> Source:
    """A share of a data set of this package as tensors from 0 to 1, or as text."""
    if share.part == "test":
        found = _test_part(found, name)
    origin = getattr(found, "origin", "") or "built in"
    if isinstance(found, data_sets.Text):
        return Source(name, origin, text=found)
    if isinstance(found, data_sets.Documents):
        return Source(name, origin, documents=found)
    size = len(found.y_train)
    count = min(share.most(default), size)
    taken = found.subset(count, 0, seed=share.seed) if count < size else found
    content = (taken.scaled().x_train, taken.y_train)
    return Source(name, origin, content, classes=len(found.classes), **share.remarks(count, size))


def _test_part(found: Any, name: str) -> Any:
    """The data set with training and test part exchanged: what is learnt of the whole (its alphabet) stays."""
    if isinstance(found, data_sets.Text) and found.test:
        return replace(found, train=found.test, test=found.train)
    if isinstance(found, data_sets.Dataset) and len(found.y_test):
        return replace(found, x_train=found.x_test, y_train=found.y_test, x_test=found.x_train, y_test=found.y_train)
    # Of documents the words to count are chosen by the training part, so the test part has no meaning alone.
    raise NoTestPartError(f"--data {name} has no test part that can be read by itself.")


def from_value(value: Any, name: str, share: Share, default: int = DEFAULT_SAMPLES) -> Source:
    """The user's own data, whatever its form."""
    if isinstance(value, data_sets.Dataset | data_sets.Text | data_sets.Documents):
        return from_set(value, value.name or name, share, default)
    if share.part == "test":
        raise NoTestPartError(f"--data {name} is one set of examples without parts.")
    if isinstance(value, torch.utils.data.TensorDataset):
        value = tuple(value.tensors)
    elif isinstance(value, torch.utils.data.Dataset) and hasattr(value, "__len__") and not isinstance(value, tuple | list):
        value = torch.utils.data.DataLoader(value, batch_size=min(256, max(1, len(value))))
    elif isinstance(value, Iterator):
        value = list(value)  # it could be read only once
    elif isinstance(value, tuple | list) and any(isinstance(part, np.ndarray) for part in value):
        value = tuple(_tensor(part) for part in value)
    if not is_one_batch(value) and not hasattr(value, "__iter__"):
        raise ValueError(
            f"--data {name!r} must be (inputs, targets), a mapping, a list of batches, a DataLoader or a data set, "
            f"or a function that returns one. It is a {type(value).__name__}."
        )
    content, population = take_samples(value, share.samples, share.seed)
    return Source(name, name, content, population=population, own=True)


def _from_file(path: Path, suffix: str, share: Share, default: int) -> Source:
    if not path.is_file():
        raise FileNotFoundError(f"--data: there is no file {path}.")
    name = path.name.removesuffix(suffix)
    if share.part == "test" and suffix.startswith(".txt"):
        raise NoTestPartError(f"--data {path} is one text without parts.")
    if suffix in TABLES:
        return _from_table(path, suffix, share, default)
    if suffix.startswith(".txt"):
        text = data_sets.Text(read_text(path), "", "", name, str(path))
        return Source(name, str(path), text=text)
    content = read_arrays(path) if suffix == ".npz" else read_file(path)
    x, y = _x_and_y(content, path, share.part)
    pair, _ = take_samples((x, y), share.most(default), share.seed)
    remarks = share.remarks(len(pair[1]), len(x))
    x, scaled = _fitting_inputs(pair[0])
    notes = (*remarks.pop("notes", ()), *(("bytes of the file were scaled to 0..1",) if scaled else ()))
    return Source(name, str(path), (x, pair[1]), notes=notes, **remarks)


def _from_table(path: Path, suffix: str, share: Share, default: int) -> Source:
    """A table with named columns; the targets are the column of that name, or the last one."""
    if share.part == "test":
        raise NoTestPartError(f"--data {path} is one table without parts.")
    frame = read_table(path)
    if frame.shape[1] < 2 or not len(frame):
        raise ValueError(f"--data {path} must hold samples with at least one input and one target. It has shape {frame.shape}.")
    name = next((column for column in frame.columns if str(column).lower() in TARGETS), frame.columns[-1])
    inputs, target = frame.drop(columns=name), frame[name]
    named = target.dtype.kind in "bOSU" or str(target.dtype) in ("category", "str", "string")
    few = target.dtype.kind in "iu" and target.nunique() <= CLASSES
    y, labels = target_tensor(target.astype("category") if named or few else target, torch.get_default_dtype(), real=False)
    y = y if labels is not None else y.to(torch.get_default_dtype())
    x = input_tensor(inputs, torch.get_default_dtype())
    pair, _ = take_samples((x, y), share.most(default), share.seed)
    remarks = share.remarks(len(pair[1]), len(x))
    kind = f"{len(labels)} classes" if labels is not None else "numbers"
    notes = (*remarks.pop("notes", ()), f"the targets are the column {name!r} ({kind}), the inputs the {x.shape[1]} others")
    found = Source(path.name.removesuffix(suffix), str(path), pair, notes=notes, **remarks)
    return replace(found, columns=column_names(inputs), labels=labels, classes=None if labels is None else len(labels))


def _x_and_y(content: Any, path: Path, part: Part) -> tuple[Tensor, Tensor]:
    """Examples and targets of a file, under x_train and y_train (x_test and y_test), or x and y, or as a pair."""
    pair: Any = None
    named: tuple[tuple[str, str], ...] = ((f"x_{part}", f"y_{part}"), *((("x", "y"),) if part == "train" else ()))
    if part == "test" and not (isinstance(content, Mapping) and all(name in content for name in named[0])):
        raise NoTestPartError(f"--data {path} holds no x_test and y_test.")
    if isinstance(content, Mapping):
        keys = next((k for k in named if all(name in content for name in k)), None)
        pair = None if keys is None else tuple(content[k] for k in keys)
    elif isinstance(content, tuple | list) and len(content) == 2:
        pair = content
    if pair is None or not all(isinstance(part, Tensor | np.ndarray) for part in pair):
        came = listed(list(content)[:8]) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"--data {path} must hold the arrays x_train and y_train, or x and y. It holds {came}.")
    x, y = (_tensor(part) for part in pair)
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(f"--data {path}: x and y must be equally long and not empty. Got {tuple(x.shape)} and {tuple(y.shape)}.")
    return x, y if y.is_floating_point() else y.long()


def _tensor(value: Any) -> Any:
    """An array as a tensor, real numbers in torch's default precision; anything else as it is."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise ValueError(f"--data: arrays must hold numbers. Got {value.dtype}.")
        value = torch.from_numpy(np.ascontiguousarray(value))
        value = value.to(torch.get_default_dtype()) if value.is_floating_point() else value
        return value if value.is_floating_point() or value.dtype == torch.uint8 else value.long()
    return value


def _fitting_inputs(x: Tensor) -> tuple[Tensor, bool]:
    """Bytes become numbers from 0 to 1, and images of bytes (N, channels, height, width)."""
    if x.dtype != torch.uint8:
        return x, False
    if x.ndim == 3:
        x = x.unsqueeze(1)
    elif x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.movedim(-1, 1)
    return x.to(torch.get_default_dtype()) / 255, True
