"""`fetch` against a local server: whole and right, or nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import importlib
import os
import socket
import threading
import time

import pytest

from tests.unit.data import writers
from theodolite import data
from theodolite.data.catalog import Entry, File, Form

fetching = importlib.import_module("theodolite.data.fetch")  # the attribute of that name is the function


class Server:
    """Files by their path, and which of them were asked for. A path may break off or be refused."""

    def __init__(self):
        self.files, self.asked, self.short, self.says_length = {}, [], {}, True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                if self.path not in outer.files:
                    self.send_error(404)
                    return
                content = outer.files[self.path]
                self.send_response(200)
                if outer.says_length:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the caller may hang up
                    self.wfile.write(content[: outer.short.get(self.path)])

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def entry(**contents):
    """A text set of files `NAME.txt` with these contents, published at example.org."""
    files = tuple(
        File(f"{name}.txt", f"sha256:{hashlib.sha256(content).hexdigest()}", f"https://example.org/pub/{name}.txt", len(content))
        for name, content in contents.items()
    )
    forms = (Form(tuple((file.name,) for file in files), lambda *paths: data.Text(paths[0].read_text(), "", "")),)
    return Entry("poem", "text", "a poem", "none", forms, files, ("poem",))


def left(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_fetched_files_are_whole_and_found(server, tmp_path):
    server.files = {"/pub/a.txt": b"roses" * 1000, "/pub/b.txt": b"violets"}
    poem = entry(a=b"roses" * 1000, b=b"violets")
    found = data.fetch(poem, folder=tmp_path, base_url=server.url)
    assert [item.path for item in found] == [tmp_path / "poem" / "a.txt", tmp_path / "poem" / "b.txt"]
    assert all(item.downloaded for item in found)
    assert found[0].path.read_bytes() == b"roses" * 1000
    assert left(tmp_path) == ["a.txt", "b.txt"]
    assert os.stat(found[0].path).st_mode & 0o777 == 0o644


def test_what_is_right_is_left_alone_and_what_is_wrong_replaced(server, tmp_path):
    server.files = {"/pub/a.txt": b"roses", "/pub/b.txt": b"violets"}
    poem = entry(a=b"roses", b=b"violets")
    data.fetch(poem, folder=tmp_path, base_url=server.url)
    server.asked.clear()
    (tmp_path / "poem" / "b.txt").write_bytes(b"vio")
    a, b = data.fetch(poem, folder=tmp_path, base_url=server.url)
    assert server.asked == ["/pub/b.txt"]
    assert (a.downloaded, b.downloaded) == (False, True)
    assert "already there" in str(a)
    assert "fetched" in str(b)
    assert b.path.read_bytes() == b"violets"


def test_a_wrong_checksum_leaves_nothing_and_shows_both(server, tmp_path):
    server.files = {"/pub/a.txt": b"thorns"}
    with pytest.raises(data.DamagedDataError) as caught:
        data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url)
    message = str(caught.value)
    assert hashlib.sha256(b"roses").hexdigest() in message
    assert hashlib.sha256(b"thorns").hexdigest() in message
    assert f"{server.url}/pub/a.txt" in message
    assert left(tmp_path) == []


def test_a_wrong_download_does_not_replace_what_was_there(server, tmp_path):
    server.files = {"/pub/a.txt": b"thorns"}
    (tmp_path / "poem").mkdir()
    (tmp_path / "poem" / "a.txt").write_bytes(b"older")
    with pytest.raises(ValueError, match="checksum"):
        data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url)
    assert (tmp_path / "poem" / "a.txt").read_bytes() == b"older"


@pytest.mark.parametrize(("said", "problem"), [(True, "3000000 bytes where 5 are expected"), (False, "sends more than the 5")])
def test_a_download_out_of_all_proportion_is_stopped(server, tmp_path, said, problem):
    server.files, server.says_length = {"/pub/a.txt": bytes(3_000_000)}, said
    with pytest.raises(data.FetchError, match=problem):
        data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url)
    assert left(tmp_path) == []


def test_http_errors_are_one_line(server, tmp_path):
    with pytest.raises(OSError, match=r"/pub/a\.txt answered 404 Not Found\.$"):
        data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url)
    assert left(tmp_path) == []


def test_nobody_answers(tmp_path):
    with socket.socket() as taken:  # bound but not listening: nobody else gets the port, nobody answers
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(data.FetchError, match=r"could not be reached: .*refused"):
            data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert left(tmp_path) == []


def test_a_broken_connection_leaves_nothing(server, tmp_path):
    server.files, server.short = {"/pub/a.txt": b"roses" * 1000}, {"/pub/a.txt": 1234}
    with pytest.raises(data.FetchError, match="broke off"):
        data.fetch(entry(a=b"roses" * 1000), folder=tmp_path, base_url=server.url)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), data.FetchError, r"a\.txt could not be written: No space left"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_full_disk_or_an_interruption_leaves_nothing(server, tmp_path, monkeypatch, error, expected, message):
    server.files = {"/pub/a.txt": b"roses"}

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(expected, match=message):
        data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url)
    assert left(tmp_path) == []


def test_orphans_of_killed_downloads_are_cleared_and_young_ones_are_not(server, tmp_path):
    server.files = {"/pub/a.txt": b"roses"}
    (tmp_path / "poem").mkdir()
    old, young = tmp_path / "poem" / "a.txt.old.part", tmp_path / "poem" / "a.txt.young.part"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 1e5,) * 2)
    data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url)
    assert left(tmp_path) == ["a.txt", "a.txt.young.part"]


def test_where_it_goes(server, tmp_path, monkeypatch):
    server.files = {"/pub/a.txt": b"roses"}
    poem = entry(a=b"roses")
    cache, variable = tmp_path / "cache" / "theodolite" / "data", tmp_path / "variable"
    assert data.fetch(poem, base_url=server.url)[0].path == cache / "poem" / "a.txt"
    monkeypatch.setenv("THEODOLITE_DATA", str(variable))
    assert data.fetch(poem, base_url=server.url)[0].path == variable / "poem" / "a.txt"
    monkeypatch.setattr(os, "access", lambda *_: False)  # read-only
    assert data.fetch(poem, base_url=server.url)[0].path == cache / "poem" / "a.txt"
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(data.FetchError, match="cannot be written"):
        data.fetch(poem, folder=tmp_path / "file", base_url=server.url)


def test_a_whole_data_set_by_its_name(server, tmp_path, monkeypatch):
    """MNIST of the table, with the checksums of small files in the same format."""
    from dataclasses import replace

    from theodolite.data import catalog

    arrays = writers.write_idx(tmp_path / "published")
    mnist = catalog.get("mnist")
    files = []
    for file in mnist.files[:4]:
        content = (tmp_path / "published" / file.name).read_bytes()
        server.files[f"/mnist/{file.name}"] = content
        files.append(replace(file, digest=f"md5:{hashlib.md5(content).hexdigest()}", size=len(content)))
    monkeypatch.setitem(catalog._TABLE, "mnist", replace(mnist, files=tuple(files)))
    data.fetch("mnist", base_url=server.url, progress=False)
    found = data.load("mnist")
    assert found.y_train.tolist() == arrays[1].tolist()
    assert found.origin == str(tmp_path / "cache" / "theodolite" / "data" / "mnist")


def test_what_cannot_be_fetched_says_why():
    with pytest.raises(data.FetchError, match=r"no public address: put stories260k\.npz .*\$THEODOLITE_DATA"):
        data.fetch("stories260k")
    with pytest.raises(data.FetchError, match=r"Provide a folder with train/CLASS.*may not be passed on"):
        data.fetch("imagenet")
    with pytest.raises(data.FetchError, match="digits needs no files"):
        data.fetch("digits")
    with pytest.raises(ValueError, match="Nearest names: mnist"):
        data.fetch("mnits")


def test_progress_counts_the_bytes(server, tmp_path, monkeypatch):
    from contextlib import contextmanager

    seen = []

    @contextmanager
    def counting(title, *, progress, total):
        seen.append((title, progress, total))
        yield seen.append

    monkeypatch.setattr(fetching, "counting", counting)
    server.files = {"/pub/a.txt": b"roses"}
    data.fetch(entry(a=b"roses"), folder=tmp_path, base_url=server.url, progress=True)
    assert seen == [("a.txt", True, 5), 5]
