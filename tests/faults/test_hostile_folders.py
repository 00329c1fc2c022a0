"""Folders and files from strangers: read as data, refused in one line where they name code or are out of all proportion."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import re
import shutil
import sys
import tarfile
import unicodedata
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import theodolite.cli
from theodolite.cli import main
from theodolite.cli.terminal import printable_warnings
from theodolite.data import readers
from theodolite.data.base import DamagedDataError
from theodolite.files import json_check_sum
from theodolite.models.pretrained import refuse_code

FIGURE = "checks/kronecker-identity"
#: A module that leaves a mark when it is imported.
MARKING = "from pathlib import Path\nPath({mark!r}).touch()\nfrom tests.experiments.samples import Right\n"


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of one honest run."""
    out = tmp_path_factory.mktemp("honest")
    with pytest.raises(SystemExit, match="0"):
        main(["reproduce", FIGURE, "--out", str(out)])
    return out


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """A copy of the run, in the folder that the command is called in; a module there leaves `mark` when it is imported."""
    home = tmp_path / "stranger"
    shutil.copytree(finished, home)
    (home / "stranger_code.py").write_text(MARKING.format(mark=str(tmp_path / "mark")))
    monkeypatch.chdir(home)
    monkeypatch.delitem(sys.modules, "stranger_code", raising=False)
    return home


def edit_manifest(folder, **changes):
    path = folder / FIGURE / "tiny" / "manifest.json"
    manifest = json.loads(path.read_text())
    target = changes.pop("target", None)
    if target is not None:
        manifest["settings"]["target"] = target
    manifest = {name: value for name, value in {**manifest, **changes}.items() if name != "crc"}
    path.write_text(json.dumps({**manifest, "crc": json_check_sum(manifest)}))  # as a stranger would who means it


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "stranger_code:Right"},
        {"name": "unknown/one", "target": "stranger_code:Right"},
        {"name": "samples/right", "target": "stranger_code:Right"},
    ],
)
def test_code_that_a_manifest_names_is_not_run(call, folder, changes, monkeypatch):
    monkeypatch.syspath_prepend(folder)  # not even where it could be imported
    edit_manifest(folder, **changes)
    code, _, err = call("report", ".")
    assert code == 1
    assert "code that a folder names is not run" in err
    assert "--experiment" in err
    code, *_ = call("reproduce", FIGURE, "--out", ".", "--fresh", "--size", "tiny")
    assert code == 0
    assert not (folder.parent / "mark").exists()
    assert "stranger_code" not in sys.modules


def test_code_that_the_user_names_is_run(call, folder):
    edit_manifest(folder, name="samples/right", target="stranger_code:Right")
    code, out, _ = call("report", ".", "--experiment", "stranger_code:Right")
    assert "samples/right (tiny)" in out
    assert (folder.parent / "mark").exists()
    assert code == 1  # its rows are those of something else


def test_the_page_of_an_own_experiment_shows_it_and_its_report_says_how(call, folder):
    code, *_ = call("reproduce", "stranger_code:Right", "--out", "mine")
    assert code == 0
    assert "samples/right" in (folder / "mine" / "index.html").read_text()
    code, _, err = call("report", "mine")
    assert code == 1
    assert "--experiment tests.experiments.samples:Right" in err
    assert call("report", "mine", "--experiment", "tests.experiments.samples:Right")[0] == 0


def test_packages_that_lie_in_the_folder_are_not_installed_ones(call, folder):
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[theodolite.experiments]\nsamples/right = stranger_code:Right\n")
    edit_manifest(folder, name="samples/right")
    assert "not registered" in call("report", ".")[2]
    assert "samples/right" not in call("list")[1]
    assert not (folder.parent / "mark").exists()


@pytest.mark.parametrize(
    "content",
    [
        '{"format": "theodolite-run", "x": ' + "[" * 100_000,
        '{"format": "theodolite-run"}',
        json.dumps({"format": "theodolite-run", "name": FIGURE, "keys": [], "settings": {"size": "huge", "parameters": {}}}),
        json.dumps({"format": "theodolite-run", "name": FIGURE, "keys": 3, "settings": {"size": "tiny", "parameters": {}}}),
        json.dumps({"format": "theodolite-run", "name": 3, "keys": [], "settings": [], "provenance": 7}),
    ],
)
def test_an_odd_manifest_hides_no_other_run(call, folder, content):
    (folder / "odd").mkdir()
    (folder / "odd" / "manifest.json").write_text(content)
    code, out, err = call("report", ".")
    assert f"{FIGURE} (tiny): 3 holds" in out
    assert "odd" in err or code == 0
    assert "Traceback" not in err


# Checkpoints


@pytest.fixture
def gpt2(tmp_path):
    """The folder of a small language model without a tokenizer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "stranger_code.Model"}}, "auto_map"),
        ("config.json", {"attn_implementation": "stranger/kernel"}, "stranger/kernel"),
        ("config.json", {"_attn_implementation": {"text": "stranger/kernel@main:run"}}, "stranger/kernel@main:run"),
        ("config.json", {"text_config": {"sub": [{"attn_implementation": "flash_attention_2"}]}}, "flash_attention_2"),
        ("config.json", {"trust_remote_code": True}, "trust_remote_code"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["stranger_code.Words", None]}}, "auto_map"),
    ],
)
@pytest.mark.parametrize("command", ["survey", "anchors"])
def test_code_that_a_checkpoint_names_is_refused_by_name(call, gpt2, file, changes, named, command):
    path = gpt2 / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))
    words = ("--model", f"hf:{gpt2}") if command == "survey" else (gpt2,)
    code, _, err = call(command, *words)
    assert code == 2
    assert named in err
    assert str(path) in err
    assert "neither fetched nor run" in err
    assert err.count("\n") == 1


def test_kernels_of_torch_may_be_named(gpt2):
    settings = json.loads((gpt2 / "config.json").read_text())
    chosen = {"attn_implementation": "eager", "_attn_implementation_autoset": True, "experts_implementation": "grouped_mm"}
    (gpt2 / "config.json").write_text(json.dumps({**settings, **chosen}))
    refuse_code(gpt2)


def test_a_deep_configuration_is_one_line(call, gpt2):
    (gpt2 / "config.json").write_text('{"x":' * 100_000)
    code, _, err = call("survey", "--model", f"hf:{gpt2}")
    assert (code, err.count("\n")) == (2, 1)
    assert "config.json could not be read" in err


# Names


EVIL = "layer\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r"


def test_escapes_in_names_stay_text(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({f"{EVIL}.weight": torch.ones(2)}, tmp_path / f"{EVIL}.safetensors")
    shown = [
        call("survey", "--model", "LeNet5", "--data", "digits", "--checkpoint", f"{EVIL}.safetensors"),
        call("survey", "--model", f"{EVIL}:make"),
        call("report", EVIL),
        call("anchors", EVIL),
        call("watch", EVIL, "--once", "page.html"),
    ]
    for code, out, err in shown:
        assert code == 2
        assert "layer\\x1b[2J" in err
        assert not [c for c in out + err if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"]


def test_escapes_in_a_warning_stay_text():
    before = warnings.formatwarning
    with printable_warnings():
        assert "\\x1b[2J" in warnings.formatwarning(EVIL, UserWarning, "file", 1)
    assert warnings.formatwarning is before


def test_commands_print_through_one_function():
    """What is printed past it could hold escapes."""
    room = Path(theodolite.cli.__file__).parent
    direct = [path.name for path in room.rglob("*.py") if re.search(r"\b(typer\.s?echo|print)\(", path.read_text())]
    assert direct == ["terminal.py"]


# Sizes


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(readers, "MOST_UNPACKED", 1 << 20)


def packed_zeros(path: Path, size: int) -> Path:
    """A file that unpacks to so many zeros."""
    zeros = bytes(size)
    if path.suffix in (".gz", ".bz2"):
        with gzip.open(path, "wb") if path.suffix == ".gz" else bz2.open(path, "wb") as file:
            file.write(zeros)
    elif path.suffix == ".npz":
        np.savez_compressed(path, x=np.zeros(size // 8), y=np.zeros(size // 8))
    else:
        torch.save({"x": torch.zeros(size // 4)}, path)
        with zipfile.ZipFile(path) as stored:
            members = {name: stored.read(name) for name in stored.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    return path


@pytest.mark.parametrize("name", ["x.txt.gz", "x.txt.bz2", "x.npz", "x.pt"])
@pytest.mark.usefixtures("small_limit")
def test_a_bomb_is_one_line(call, tmp_path, name):
    path = packed_zeros(tmp_path / name, 4 << 20)
    if path.suffix == ".npz":
        code, _, err = call("dictionary", path, "--key", "x", "--out", tmp_path / "out")
    elif path.suffix == ".pt":
        code, _, err = call("survey", "--model", "F-8", "--data", path)
    else:
        with pytest.raises(DamagedDataError, match="unpack to more than"):
            readers.read_text(path)
        return
    assert (code, err.count("\n")) == (2, 1)
    assert "unpack to more than" in err


@pytest.mark.usefixtures("small_limit")
def test_an_archive_that_is_large_itself_is_read(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros(1 << 18))  # 2 MiB, stored as they are
    assert readers.read_arrays(tmp_path / "x.npz")["x"].shape == (1 << 18,)


@pytest.mark.usefixtures("small_limit")
def test_a_sparse_member_of_an_archive_counts_as_large_as_it_would_be(tmp_path):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.size = 4 << 20
        archive.addfile(member, io.BytesIO(bytes(4 << 20)))
    with pytest.raises(DamagedDataError, match="unpack to more than"):
        readers.read_tar(tmp_path / "x.tar.gz")


def test_an_array_that_promises_more_than_there_is(call, tmp_path):
    header = np.lib.format.header_data_from_array_1_0(np.zeros(1)) | {"shape": (10**6, 10**9)}
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
    for name in ("x.npy", "x.npz"):
        code, _, err = call("dictionary", tmp_path / name, "--out", tmp_path / "out")
        assert (code, err.count("\n")) == (2, 1)
        assert "damaged" in err


def test_a_billion_components_are_one_line(call, tmp_path):
    code, _, err = call("dictionary", "--components", "1000000000", "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "1000000000 atoms of 64 numbers need some" in err


def test_memory_that_is_not_there_is_one_line(call, monkeypatch, tmp_path):
    def allocate(*given, **more):
        return torch.empty(2**55)

    monkeypatch.setattr("theodolite.report.write_gallery", allocate)
    code, _, err = call("report", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "not enough memory" in err
