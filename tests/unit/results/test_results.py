"""Results print as a sentence, become rows, and survive the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import theodolite as th
from theodolite.files import write_whole
from theodolite.results import Outcome, Result, ResultMapping
from theodolite.testing import random_symmetric

MATRIX = random_symmetric(torch.tensor([4.0, 2.0, 2.0, -1.0, 0.5]).double())
RESULTS = {
    "eigenpairs": lambda: th.top_eigenpairs(MATRIX, 3),
    "density": lambda: th.spectral_density(MATRIX, probes=2, steps=3, points=8),
    "trace": lambda: th.trace(MATRIX, matvecs=12),
    "mapping": lambda: th.top_eigenpairs({"a": MATRIX, "b <script>": 2 * MATRIX}, 2),
}
every_result = pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS.keys())


@every_result
def test_results_survive_the_disk(make, tmp_path):
    result = make()
    result.save(tmp_path / "sub" / "result")
    loaded = th.load(tmp_path / "sub" / "result.json")
    assert type(loaded) is type(result)
    assert loaded.rows() == result.rows()
    assert str(loaded) == str(result)
    assert loaded.outcome is result.outcome
    assert loaded.cost == result.cost
    assert loaded.provenance == result.provenance
    assert {p.suffix for p in (tmp_path / "sub").iterdir()} <= {".json", ".safetensors"}


@every_result
def test_results_are_frozen_and_show_themselves(make):
    result = make()
    with pytest.raises(AttributeError):
        result.seed = 1
    assert len(str(result)) > 20
    assert "<table>" in result._repr_html_()
    assert "<script>" not in result._repr_html_()
    assert len(result.to_frame()) == len(result.rows())
    assert result.provenance.torch == torch.__version__
    assert result.cost.seconds > 0


def test_tensors_come_back_bit_by_bit(tmp_path):
    pairs = RESULTS["eigenpairs"]()
    pairs.save(tmp_path / "pairs")
    loaded = th.linalg.Eigenpairs.load(tmp_path / "pairs")
    assert torch.equal(loaded.vectors, pairs.vectors)
    assert torch.equal(loaded.residuals, pairs.residuals)
    with pytest.raises(ValueError, match="holds a Eigenpairs"):
        th.linalg.Density.load(tmp_path / "pairs")


def test_files_that_are_not_results_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no result"):
        th.load(tmp_path / "nothing")
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="was not written by"):
        th.load(tmp_path / "other")
    RESULTS["trace"]().save(tmp_path / "trace")
    document = json.loads((tmp_path / "trace.json").read_text())
    del document["check"], document["tensors"]  # as earlier versions wrote it
    document["content"]["type"] = "TraceEstimat"
    (tmp_path / "typo.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="trace-estimate"):
        th.load(tmp_path / "typo")
    document["content"].update(type="trace-estimate", schema=99)
    (tmp_path / "newer.json").write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"newer.json cannot be read: its trace-estimate is of version 99; this theodolite reads 1: .* Update"
    ):
        th.load(tmp_path / "newer")
    RESULTS["eigenpairs"]().save(tmp_path / "pairs")
    (tmp_path / "pairs.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        th.load(tmp_path / "pairs")


def test_a_save_that_was_interrupted_between_its_files_is_said_not_mixed(tmp_path, monkeypatch):
    RESULTS["eigenpairs"]().save(tmp_path / "pairs")
    whole, written = write_whole, []

    def killed_at_the_second(path, content):
        if written:
            raise KeyboardInterrupt
        written.append(path)
        whole(path, content)

    monkeypatch.setattr("theodolite.results.storage.write_whole", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        th.top_eigenpairs(3 * MATRIX, 3).save(tmp_path / "pairs")
    with pytest.raises(ValueError, match=r"pairs.safetensors is damaged, or was not saved together .* Save the result again"):
        th.load(tmp_path / "pairs")


def test_tensors_beside_a_result_that_has_none_are_not_its_own(tmp_path):
    RESULTS["trace"]().save(tmp_path / "trace")
    (tmp_path / "trace.safetensors").write_bytes(b"somebody else's")
    assert th.load(tmp_path / "trace").rows() == RESULTS["trace"]().rows()


def test_names_of_new_folders_are_on_disk_too(tmp_path, monkeypatch):
    real, synced = os.fsync, []

    def noting(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr("os.fsync", noting)
    write_whole(tmp_path / "a" / "b" / "file", b"content")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


def test_folders_that_may_not_be_listed_can_be_written_to(tmp_path, monkeypatch):
    real = os.open

    def guarded(path, flags, *mode):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr("os.open", guarded)
    write_whole(tmp_path / "a" / "file", b"content")
    assert (tmp_path / "a" / "file").read_bytes() == b"content"


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        RESULTS["trace"]().save(tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


def test_every_outcome_says_what_to_do():
    assert Outcome.CONVERGED.good
    for outcome in Outcome:
        assert outcome.good or any(remedy in outcome.value for remedy in ("raise", "lower", "ask for"))


def test_mappings_are_results_too():
    mapping = RESULTS["mapping"]()
    assert isinstance(mapping, ResultMapping)
    assert isinstance(mapping, Result)
    assert list(mapping) == ["a", "b <script>"]
    assert len(mapping) == 2
    torch.testing.assert_close(mapping["b <script>"].values, 2 * mapping["a"].values)
