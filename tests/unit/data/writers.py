"""Tiny files in the published formats, written by hand."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import wave

import numpy as np

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def some_images(n, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def some_labels(n, classes=10):
    return (np.arange(n) * 3 % classes).astype(np.uint8)


def write_idx(folder, suffix=".gz", train=7, test=3, seed=0):
    """The four files; the arrays written."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [some_images(train, (28, 28), seed), some_labels(train), some_images(test, (28, 28), seed + 1), some_labels(test)]
    for name, array in zip(IDX, arrays, strict=True):
        data = idx_bytes(array)
        (folder / (name + suffix)).write_bytes(gzip.compress(data) if suffix else data)
    return arrays


def cifar_records(images, labels):
    """`labels` (N, 1 or 2) before 3072 pixels: red, green, blue, each row by row."""
    return np.concatenate([labels, images.reshape(len(images), -1)], axis=1).astype(np.uint8).tobytes()


def write_cifar10(folder):
    """Five batches of two images and a test batch of three; the files as a dictionary."""
    files = {}
    for i in range(1, 6):
        files[f"data_batch_{i}.bin"] = cifar_records(some_images(2, (3, 32, 32), i), np.array([[i], [i - 1]]))
    files["test_batch.bin"] = cifar_records(some_images(3, (3, 32, 32), 9), np.array([[9], [0], [4]]))
    write_files(folder, files)
    return files


def write_cifar100(folder, classes=100):
    files = {
        "train.bin": cifar_records(some_images(4, (3, 32, 32), 1), np.array([[19, 99], [0, 1], [3, 50], [2, 7]])),
        "test.bin": cifar_records(some_images(2, (3, 32, 32), 2), np.array([[5, 6], [7, 8]])),
        "fine_label_names.txt": "".join(f"thing_{i}\n" for i in range(classes)).encode(),
        "coarse_label_names.txt": b"a\nb\n",
    }
    write_files(folder, files)
    return files


def write_files(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_tar(path, files, inside="batches"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{inside}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_wav(path, samples, rate=8000, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, "<i2").tobytes())
