"""The documentation builds without a warning, its links resolve, its tables are complete and its snippets run."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

import theodolite as th

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / "index.rst", *sorted((DOCS / "guide").glob("*.rst"))]
BEHIND = [DOCS / "architecture.rst", *sorted((DOCS / "decisions").glob("*.rst"))]
SOURCE = ROOT / "src" / "theodolite"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    pattern = rf"^( *)\.\. code-block:: {language}\n((?:\1 +.*\n|\s*\n)+)"
    found = re.findall(pattern, page.read_text(encoding="utf-8") + "\n", flags=re.MULTILINE)
    return [textwrap.dedent(body).strip("\n") for _, body in found]


# The pages


class Links(HTMLParser):
    """Targets and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.targets.append(given["href"])
        if tag in ("script", "img") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("href") and given.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(given["href"])


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_holds_together(tmp_path):
    """One test, because the build takes half a minute; the gallery is not executed here."""
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    pytest.importorskip("sphinx_gallery", reason="the docs extra is not installed")
    generated = shutil.ignore_patterns("_build", "gallery", "reference", "__pycache__")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=generated)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-D", "plot_gallery=0", "docs", "html"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "html"
    check_pages(site)
    check_links(site)
    check_reference(site)
    check_commands(site)


def check_pages(site: Path) -> None:
    for page in [*PAGES, *BEHIND]:
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file()
    for script in (ROOT / "examples").glob("plot_*.py"):
        assert (site / "gallery" / f"{script.stem}.html").is_file()


def check_links(site: Path) -> None:
    """They resolve, and nothing is loaded from elsewhere."""
    pages = {path.resolve(): Links(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for source in page.loaded:
            assert not urlsplit(source).netloc, f"{path.name} loads {source}"
            assert (path.parent / unquote(urlsplit(source).path)).is_file(), f"{path.name}: {source}"
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert aim.is_file(), f"{path.name} points to {target}"
            if parts.fragment and aim in pages:
                assert unquote(parts.fragment) in pages[aim].anchors, f"{path.name} points to {target}"


def check_reference(site: Path) -> None:
    """Every public name has its place, and so has what each room lists."""
    anchors = {anchor for path in (site / "reference").glob("*.html") for anchor in Links(path).anchors}
    for name in th.__all__:
        thing = getattr(th, name)
        assert inspect.ismodule(thing) or f"theodolite.{name}" in anchors, name
    for room in ("operators", "linalg", "measures.dynamics", "monitors", "plots", "data", "experiments", "testing"):
        module = importlib.import_module(f"theodolite.{room}")
        names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
        missing = [name for name in names if not {f"theodolite.{name}", f"{module.__name__}.{name}"} & anchors]
        assert missing == [], room


def check_commands(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for words in ("theodolite survey", "theodolite reproduce", "theodolite data fetch", "--dry-run"):
        assert words in text
    assert "\x1b" not in text
    assert "╭" not in text


def test_all_that_the_documentation_needs_is_pinned():
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pytest.importorskip("sphinx_gallery", reason="the docs extra is not installed")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    pending, seen = ["sphinx", "sphinx-gallery"], set()
    while pending:
        name = canonicalize_name(pending.pop())
        if name in seen:
            continue
        seen.add(name)
        assert name in pinned, name
        try:
            needed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # for another system or Python
            continue
        pending += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


# The table of labels


def strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def labels_of_instruments() -> set[str]:
    """All that is written as `label=` where a finding is made, or that a variable `label` is set to before."""
    found: set[str] = set()
    for path in (SOURCE / "instruments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("found", "Finding"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "label"] + node.args[2:3]
                found |= {s for value in given for s in strings(value)}
            if isinstance(node, ast.Assign):
                found |= {s for value in values_of_label(node) for s in strings(value)}
    # What a state, a verdict or a cause says in words of its own.
    states = {"diverges", "learned", "learning", "not learning"}
    causes = {"dead units", "exploding gradients", "saturation", "vanishing gradients"}
    rates = {"rate fits", "rate too high", "rate too low", "no warm-up", "nothing left to learn", "no rate helps"}
    return found | states | causes | rates | {"advice helps", "advice does not help"}


def values_of_label(node: ast.Assign) -> list[ast.expr]:
    """What an assignment sets `label` to, alone or among others."""
    found = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        else:
            pairs = [(target, node.value)]
        found += [part for name, value in pairs if getattr(name, "id", "") == "label" for part in branches(value)]
    return found


def regimes() -> set[str]:
    """All that a trial or theory may say: what the functions of `regimes.py` that give a word return, or set `word` to."""
    tree = ast.parse((SOURCE / "measures" / "dynamics" / "regimes.py").read_text(encoding="utf-8"))
    words = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name in ("expected_regime", "classify")]
    assert len(words) == 2
    said = [node.value for f in words for node in ast.walk(f) if isinstance(node, ast.Return | ast.Assign) and node.value]
    passed_on = {"catapult"}  # the word of a run that needs no other
    return passed_on | {part.value for value in said for part in branches(value) if isinstance(getattr(part, "value", 0), str)}


def branches(node: ast.expr) -> list[ast.expr]:
    """What an expression may come to."""
    return [*branches(node.body), *branches(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def test_every_label_is_explained():
    page = (DOCS / "guide" / "findings.rst").read_text(encoding="utf-8")
    table = page[page.index(":class: labels") :]
    rows = re.findall(r"^   \* - ``([^`]+)``\n     - (.+)\n     - (.+)\n", table, flags=re.MULTILINE)
    named = [label for label, _, _ in rows]
    known = labels_of_instruments() | regimes()
    assert {"dead layer", "catapult", "divergence expected", "failed"} <= known
    assert sorted(set(named)) == sorted(named), "a label stands twice"
    assert set(named) == known
    severities = {severity.value for severity in th.results.Severity}
    for _, severity, instrument in rows:
        assert set(severity.split(", ")) <= severities
        assert set(instrument.split(", ")) <= {*th.instruments.names(), "any"}


# The snippets


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the guide speaks of."""
    for path in (DOCS / "snippets").glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = th.instruments.registry._OWN
    monkeypatch.setattr(th.instruments.registry, "_OWN", dict(own))
    yield tmp_path
    for name in ("mine", "weight_norms", "my_experiment"):
        sys.modules.pop(name, None)


#: Pages whose code surveys, trains or starts a cluster for several seconds.
LONG = ("catapults", "certificate", "cluster", "growing", "own-model", "reproducing", "stability", "step-size", "structure")


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow if p.stem in LONG else (), id=p.stem) for p in PAGES])
def test_the_python_of_a_page_runs(page, folder):
    if page.stem == "hugging-face":
        pytest.importorskip("transformers")
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_commands_of_a_page_are_understood(page):
    """Each is parsed, with its options, by the command itself; nothing is run."""
    import typer

    from theodolite.cli.app import app

    group = typer.main.get_command(app)
    for line in "\n".join(blocks(page, "console")).splitlines():
        words = shlex.split(line.removeprefix("$ "))
        assert line.startswith("$ ")
        assert words[0] in ("theodolite", "pip"), line
        if words[0] == "theodolite":
            command = group.commands[words[1]]
            command.make_context(words[1], words[2:])


def test_the_instrument_of_the_guide_works(folder):
    import mine
    import weight_norms

    found = th.survey(mine.Net(), mine.smooth, mine.data(), only=["norms"], seed=0)
    assert "longest parameter" in found.labels()
    assert isinstance(found.results["norms"], weight_norms.WeightNorms)
    page = found.to_html("survey/index.html").read_text(encoding="utf-8")
    assert "Norms of the parameters" in page
    assert "<svg" in page


def test_the_experiment_of_the_guide_holds(folder):
    from my_experiment import TraceOfRandomMatrices

    assert th.experiments.run(TraceOfRandomMatrices(), size="tiny").good


def test_what_the_guide_says_of_batches_and_parts(folder):
    import mine

    torch.manual_seed(0)
    model = mine.Net()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*mine.data()), batch_size=256)
    assert "158 to 256 labels" in th.survey(model, mine.smooth, loader, only=["weighting"]).of("weighting")[0].sentence
    assert th.Problem(model, mine.smooth, mine.data(), params="head.*").names == ("head.weight", "head.bias")


def test_the_pages_do_not_speak_of_this_machine():
    for path in [*PAGES, *(DOCS / "snippets").glob("*.py"), *(ROOT / "examples").glob("*")]:
        if path.is_file():
            assert not re.search(r"/(tmp|work|home)/", path.read_text(encoding="utf-8")), path
