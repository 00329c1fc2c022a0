"""Reader of the Free Spoken Digit Dataset: a folder of .wav files named `{digit}_{speaker}_{take}.wav`."""

from __future__ import annotations

import re
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from theodolite.data.base import DamagedDataError, Dataset
from theodolite.data.files import blaming

_NAME = re.compile(r"([0-9])_([^_]+)_([0-9]+)\.wav")
_LAST_TEST_TAKE = 4  # the published split: takes 0..4 are for testing


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


def read_fsdd(folder: Path, *, length: int = 8000) -> Dataset:
    """All recordings cut or filled with zeros to `length` samples, (N, 1, length); takes 0..4 are the test part."""
    if length < 1:
        raise ValueError(f"length must be at least 1 sample. Got {length}.")
    parts: dict[bool, list[Recording]] = {False: [], True: []}
    for recording in read_recordings(folder):
        parts[recording.take <= _LAST_TEST_TAKE].append(recording)
    tensors = []
    for part in (False, True):
        x = torch.zeros(len(parts[part]), 1, length)
        for row, recording in zip(x, parts[part], strict=True):
            row[0, : len(recording.samples)] = recording.samples[:length]
        tensors += [x, torch.tensor([r.digit for r in parts[part]], dtype=torch.int64)]
    return Dataset(tensors[0], tensors[1], tensors[2], tensors[3], tuple("0123456789"), peak=1.0)
