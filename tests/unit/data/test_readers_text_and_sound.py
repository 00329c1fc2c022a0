"""Readers of text, sound and picture folders on tiny files in the published formats."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.data import writers
from theodolite.data import DamagedDataError, image_folder
from theodolite.data.readers import (
    read_ag_news,
    read_celeba,
    read_fsdd,
    read_one,
    read_picture,
    read_recordings,
    read_three,
    read_tree,
)

NEWS = ("World", "Sports", "Business", "Sci/Tech")


def test_text_in_three_files_and_in_one(tmp_path):
    for name, text in (("a", "train\r\ntwo\n"), ("b", "välid\n"), ("c", "test\n")):
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    found = read_three(*(tmp_path / f"{name}.txt.gz" for name in "abc"))
    assert (found.train, found.valid, found.test) == ("train\ntwo\n", "välid\n", "test\n")
    (tmp_path / "one.txt").write_text("0123456789" * 4)
    found = read_one(tmp_path / "one.txt")
    assert (len(found.train), len(found.valid), len(found.test)) == (36, 2, 2)
    assert found.train + found.valid + found.test == "0123456789" * 4


def test_damaged_text(tmp_path):
    path = tmp_path / "one.txt.gz"
    path.write_bytes(gzip.compress(b"x" * 1000)[:-10])
    with pytest.raises(DamagedDataError, match="cannot be unpacked"):
        read_one(path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DamagedDataError, match="not UTF-8"):
        read_one(tmp_path / "latin.txt")
    with pytest.raises(FileNotFoundError):
        read_one(tmp_path / "nothing.txt")


def test_ag_news(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('"3","Wall St. ""Bears""","Short-sellers, again."\n"4","Line\\one","two\nlines"\n')
    found = read_ag_news(path, path, classes=NEWS)
    assert found.y_train.tolist() == [2, 3]
    assert found.x_train[0] == 'Wall St. "Bears" Short-sellers, again.'
    assert found.x_test[1] == "Line\\one two\nlines"
    assert found.classes == NEWS


@pytest.mark.parametrize("line", ['"5","a","b"', '"0","a","b"', '"1","a"', '"x","a","b"', '"1","a","b","c"'])
def test_damaged_ag_news(tmp_path, line):
    path = tmp_path / "train.csv"
    path.write_text(f'"1","a","b"\n{line}\n')
    with pytest.raises(DamagedDataError, match=r"train\.csv is damaged: record 2 must be a class of 1\.\.4"):
        read_ag_news(path, path, classes=NEWS)


def test_fsdd(tmp_path):
    writers.write_wav(tmp_path / "7_jackson_0.wav", [0, 16384, -32768])
    writers.write_wav(tmp_path / "3_theo_32.wav", np.arange(10))
    writers.write_wav(tmp_path / "0_theo_5.wav", [100])
    found = read_fsdd(tmp_path, length=4)
    assert found.y_train.tolist() == [0, 3]
    assert found.y_test.tolist() == [7]  # takes 0 to 4
    assert found.x_test.tolist() == [[[0.0, 0.5, -1.0, 0.0]]]
    assert found.x_train.shape == (2, 1, 4)
    torch.testing.assert_close(found.x_train[1, 0], torch.arange(4) / 32768)
    whole = read_recordings(tmp_path)
    assert [(r.digit, r.speaker, r.take, len(r.samples), r.rate) for r in whole] == [
        (7, "jackson", 0, 3, 8000),
        (0, "theo", 5, 1, 8000),
        (3, "theo", 32, 10, 8000),
    ]
    with pytest.raises(ValueError, match="length must be a positive integer"):
        read_fsdd(tmp_path, length=0)


def test_damaged_fsdd(tmp_path):
    with pytest.raises(DamagedDataError, match="holds no file"):
        read_fsdd(tmp_path)
    path = tmp_path / "1_theo_0.wav"
    writers.write_wav(path, np.arange(100))
    whole = path.read_bytes()
    for content in (b"", b"RIFFxxxxnothing of the kind", whole[:20]):
        path.write_bytes(content)
        with pytest.raises(DamagedDataError, match=r"not a sound \.wav"):
            read_fsdd(tmp_path)
    path.write_bytes(whole[:-50])
    with pytest.raises(DamagedDataError, match="promises 100 samples, but 75 follow"):
        read_fsdd(tmp_path)
    writers.write_wav(path, np.arange(100), channels=2)
    with pytest.raises(DamagedDataError, match="it holds 2 of 16"):
        read_fsdd(tmp_path)
    path.unlink()
    writers.write_wav(tmp_path / "ten_theo_0.wav", [1])
    with pytest.raises(DamagedDataError, match="its name must be"):
        read_fsdd(tmp_path)


def write_picture(path, colour, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_picture_is_resized_and_its_middle_cut_out(tmp_path):
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, 4:8] = (10, 200, 30)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert torch.equal(
        read_picture(tmp_path / "wide.png", 4), torch.tensor([10, 200, 30], dtype=torch.uint8).expand(4, 4, 3).permute(2, 0, 1)
    )
    Image.fromarray(wide[..., 1]).save(tmp_path / "grey.png")
    assert read_picture(tmp_path / "grey.png", 2).shape == (3, 2, 2)  # grey becomes three equal channels
    assert read_picture(tmp_path / "grey.png", 9).shape == (3, 9, 9)


def test_tree_of_pictures(tmp_path):
    for name, colour in (("ant", (9, 0, 0)), ("bee", (0, 9, 0))):
        for i in range(3):
            write_picture(tmp_path / "train" / name / f"{i}.png", colour)
        write_picture(tmp_path / "val" / name / "images" / "x.PNG", colour)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no picture")
    for found in (
        read_tree(tmp_path / "train", tmp_path / "val", size=2, per_class=2),
        image_folder(tmp_path, size=2, per_class=2),
    ):
        assert found.classes == ("ant", "bee")
        assert found.y_train.tolist() == [0, 1, 0, 1]  # the classes in turn
        assert found.x_train[:, 0, 0, 0].tolist() == [9, 0, 9, 0]
        assert found.y_test.tolist() == [0, 1]


def test_flat_folder_gives_every_fifth_to_the_test(tmp_path):
    for i in range(10):
        write_picture(tmp_path / "ant" / f"{i:02}.png", (i, 0, 0))
    write_picture(tmp_path / "bee" / "0.jpg", (0, 0, 0))
    found = image_folder(tmp_path, size=2)
    assert found.x_test[:, 0, 0, 0].tolist() == [4, 9]
    assert torch.bincount(found.y_train).tolist() == [8, 1]


def test_damaged_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(DamagedDataError, match="no folder for a class"):
        image_folder(tmp_path)
    path = tmp_path / "ant" / "0.png"
    write_picture(path, (1, 2, 3), size=(40, 40))
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DamagedDataError, match=r"0\.png is damaged: it is not a sound picture"):
            image_folder(tmp_path)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="size must be a positive integer"):
        image_folder(tmp_path, size=0)
    write_picture(tmp_path / "train" / "ant" / "0.png", (1, 2, 3))
    with pytest.raises(DamagedDataError, match="neither test nor val"):
        image_folder(tmp_path)
    write_picture(tmp_path / "test" / "wasp" / "0.png", (1, 2, 3))
    with pytest.raises(DamagedDataError, match="'wasp' is not in"):
        image_folder(tmp_path)


@pytest.fixture
def celeba(tmp_path):
    """Two images of each published part."""
    numbers = (1, 162770, 162771, 182637, 182638, 202599)
    lines = ["6", "Bald Smiling Young"]
    for i, number in enumerate(numbers):
        write_picture(tmp_path / "img_align_celeba" / f"{number:06}.jpg", (40 * i, 0, 0), size=(178, 218))
        lines.append(f"{number:06}.jpg -1 {1 if i % 2 else -1}  1")
    (tmp_path / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_celeba(celeba):
    where = celeba / "list_attr_celeba.txt", celeba / "img_align_celeba"
    found = read_celeba(*where, size=8)
    assert found.classes == ("not Smiling", "Smiling")
    assert (found.y_train.tolist(), found.y_test.tolist()) == ([0, 1], [0, 1])
    np.testing.assert_allclose(found.x_train[:, 0, 4, 4], [0, 40], atol=3)
    assert read_celeba(*where, attribute="Young", size=4).y_test.tolist() == [1, 1]
    assert len(read_celeba(*where, size=4, limit=1).y_train) == 1
    with pytest.raises(ValueError, match=r"no attribute 'Smile'. Nearest: Smiling"):
        read_celeba(*where, attribute="Smile")


def test_celeba_with_a_partition_file(celeba):
    where = celeba / "list_attr_celeba.txt", celeba / "img_align_celeba"
    parts = celeba / "list_eval_partition.txt"
    names = [path.name for path in sorted(where[1].iterdir())]
    parts.write_text("".join(f"{name} {part}\n" for name, part in zip(names, "220011", strict=True)))
    assert len(read_celeba(*where, size=4).y_train) == 2
    parts.write_text(f"{names[0]} 2\n")
    with pytest.raises(DamagedDataError, match=f"does not name {names[1]}"):
        read_celeba(*where, size=4)
    parts.write_text(f"{names[0]} 7\n")
    with pytest.raises(DamagedDataError, match="0, 1 or 2"):
        read_celeba(*where, size=4)


def test_damaged_celeba(celeba):
    where = celeba / "list_attr_celeba.txt", celeba / "img_align_celeba"
    (where[1] / "202599.jpg").unlink()
    with pytest.raises(DamagedDataError, match=r"1 of the listed images are not there, first 202599\.jpg"):
        read_celeba(*where)
    text = where[0].read_text()
    where[0].write_text(text.replace("000001.jpg -1 -1", "000001.jpg -1"))
    with pytest.raises(DamagedDataError, match=r"line of 000001\.jpg"):
        read_celeba(*where)
    where[0].write_text(text.replace("000001", "first"))
    with pytest.raises(DamagedDataError, match="has no number"):
        read_celeba(*where)
    where[0].write_text("6\n")
    with pytest.raises(DamagedDataError, match="must hold a count"):
        read_celeba(*where)
