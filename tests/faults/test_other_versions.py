"""Files of a version that is yet to come, or without what they must have: one line that says which, what is read, what to do."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import theodolite as th
from tests.unit.monitors.logs import fake_run, header, write_lines
from theodolite.experiments.running import load_run
from theodolite.files import json_check_sum
from theodolite.monitors.log import SCHEMA, read_log
from theodolite.report.watch import WatchServer, write_watch
from theodolite.runners import RunStore
from theodolite.runners.store import READ_VERSIONS, VERSION, read_manifest

ODD_VERSIONS = [99, 0, -1, 1.5, "two", None, [1], {"major": 3}]


def said(path: Path, read: Callable[[], Any]) -> str:
    """The one line that reading a file raises, which names it."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        read()
    text = str(raised.value)
    assert "\n" not in text
    return text


# The manifest of a run


def write_manifest(folder: Path, **changes: Any) -> Path:
    """A manifest with its check sum; `changes` to ... are taken out."""
    whole = {"format": "theodolite-run", "version": VERSION, "name": "one", "settings": {}, "keys": [], **changes}
    content = {name: value for name, value in whole.items() if value is not ...}
    path = folder / "manifest.json"
    path.write_text(json.dumps({**content, "crc": json_check_sum(content)}))
    return path


@pytest.mark.parametrize("version", ODD_VERSIONS)
def test_a_manifest_of_another_version(tmp_path, version):
    path = write_manifest(tmp_path, version=version)
    text = said(path, lambda: read_manifest(tmp_path))
    assert f"is of version {version!r}; this theodolite reads 1, 2:" in text
    assert "Update theodolite, or run in another folder." in text


def test_a_run_of_another_version_is_not_gone_on_with(tmp_path):
    path = write_manifest(tmp_path, version=3)
    before = path.read_bytes()
    said(path, lambda: RunStore.open(tmp_path, {"name": "one"}, resume=True))
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", READ_VERSIONS)
def test_a_manifest_without_what_it_must_have(tmp_path, version):
    path = write_manifest(tmp_path, version=version, name=...)
    assert f"is of version {version}, which must state the name" in said(path, lambda: read_manifest(tmp_path))
    for name in ("keys", "settings"):
        path = write_manifest(tmp_path, version=version, **{name: ...})
        assert "must state name, keys, and settings" in said(path, lambda: load_run(tmp_path))


def test_what_a_later_version_adds_to_a_manifest_does_no_harm(tmp_path):
    write_manifest(tmp_path, added={"later": 1})
    assert read_manifest(tmp_path)["added"] == {"later": 1}


# Results


@pytest.fixture
def rewritten(tmp_path):
    """Changes the content of a result on disk and gives its path."""
    th.top_eigenpairs(torch.diag(torch.arange(1.0, 7.0)).double(), 2).save(tmp_path / "pairs")
    path = tmp_path / "pairs.json"

    def changed(change: Callable[[dict[str, Any]], object]) -> Path:
        document = json.loads(path.read_text())
        change(document["content"])
        parts = {name: document[name] for name in ("content", "tensors")}
        path.write_text(json.dumps({**document, "check": json_check_sum(parts)}))
        return path

    return changed


@pytest.fixture
def saved(rewritten):
    """Changes the content of a result on disk and gives what reading it raises."""
    return lambda change: said(path := rewritten(change), lambda: th.load(path))


@pytest.mark.parametrize("version", ODD_VERSIONS)
def test_a_result_of_another_version(saved, version):
    text = saved(lambda content: content.update(schema=version))
    assert f"its eigenpairs is of version {version!r}; this theodolite reads 1: " in text
    assert "Update theodolite" in text


@pytest.mark.parametrize("field", ["values", "vectors"])
def test_a_result_that_lacks_a_field(saved, field):
    text = saved(lambda content: content["fields"].pop(field))
    assert f"its Eigenpairs lacks '{field}', which version 1 of it must have. Save the result again" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: content.pop("fields"), "its Eigenpairs has no fields"),
        (lambda content: content.pop("type"), "no type that is known"),
        (lambda content: content.update(type="of-the-future"), "Unknown result type 'of-the-future'"),
        (lambda content: content["fields"].update(outcome={"outcome": "DREAMT"}), "the outcome 'DREAMT'"),
        (lambda content: content["fields"].update(outcome={"outcome": ["FINISHED"]}), "the outcome ['FINISHED']"),
        (lambda content: content["fields"].update(values={"part": "Later", "fields": {}}), "the part 'Later'"),
        (lambda content: content["fields"].update(values={"quaternion": 1}), "'quaternion'"),
    ],
)
def test_what_a_later_version_may_write_into_a_result(saved, change, named):
    text = saved(change)
    assert named in text
    assert "Update theodolite" in text or "Save the result again" in text


def test_fields_that_were_added_later_are_left_out(rewritten):
    before = th.load(rewritten(lambda content: content))
    after = th.load(rewritten(lambda content: content["fields"].update(added_later=3)))
    assert after.rows() == before.rows()


# Logs of monitors


@pytest.mark.parametrize("version", ODD_VERSIONS)
def test_a_log_of_another_version(tmp_path, version):
    path = write_lines(tmp_path / "run" / "monitor.jsonl", [header(schema=version), *list(fake_run(20))[1:]])
    readers = [
        lambda: read_log(path.parent),
        lambda: th.compare_runs(path, path),
        lambda: write_watch(path, tmp_path / "page.html"),
        lambda: WatchServer(path),
    ]
    for read in readers:
        text = said(path, read)
        assert f"is of version {version!r}; this theodolite reads {SCHEMA}: " in text
        assert "Update theodolite" in text
    assert not (tmp_path / "page.html").exists()


def test_a_log_that_a_later_version_goes_on_with_while_it_is_watched(tmp_path, capfd):
    path = write_lines(tmp_path / "monitor.jsonl", fake_run(20, end=False))
    with WatchServer(path) as server:
        Thread(target=server.serve, daemon=True).start()
        with urllib.request.urlopen(f"{server.address}data") as answer:
            assert answer.status == 200
        write_lines(path, [header(schema=99)])
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.address}data")
        server.stop()
    assert b"is of version 99" in refused.value.read()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["run", "step", "look", "spike", "end"])
def test_records_that_lack_fields_cost_themselves_at_most(tmp_path, kind):
    """One record of a kind loses all its fields, one at a time: the others are read, compared and drawn."""
    records = list(fake_run(200))
    place = next(i for i, record in enumerate(records) if record["kind"] == kind)
    whole = read_log(write_lines(tmp_path / "whole.jsonl", records))
    for field in records[place]:
        thinned = {name: value for name, value in records[place].items() if name != field}
        path = write_lines(tmp_path / f"without-{field}.jsonl", [*records[:place], thinned, *records[place + 1 :]])
        found = read_log(path)
        assert found.bad_lines <= 1
        assert len(found.steps) >= len(whole.steps) - 1
        assert len(found.looks) >= len(whole.looks) - 1
        assert th.compare_runs(path, path).ahead == ""
        assert write_watch(path, tmp_path / "page.html").stat().st_size
