"""Writes the pages of the reference: the public names by question, the rest by room, and the help of each command.

Everything is read from the package when the documentation is built: the questions and their names from the stub
`theodolite/__init__.pyi`, the rest from what each room lists as its own. So a new name or option appears by itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_origin

import typer

import theodolite
from theodolite.cli.app import app
from theodolite.results import Result

FOLDER = "reference"
_FIELDS_OF_ALL = {"outcome", "seed", "cost", "provenance"}

#: Rooms below which the names stand that are not at the top; each is shown with the first question that takes a name from it,
#: or with the one named here.
_ROOMS = ("problem", "results", "operators", "linalg", "training", "monitors", "runners", "data", "models", "plots")
_PLACES = {
    "theodolite.measures.audit": "Which data matter?",
    "theodolite.measures.quadratic_models": "Is it a kernel machine?",
    "theodolite.models": "Reproduce",
}


def write(source: Path) -> None:
    """All pages below `source`/reference; a page that is as it was is left alone."""
    questions = by_question()
    rooms = _rooms_by_question(questions)
    pages = {_slug(title): _question_page(title, names, rooms[title]) for title, names in questions.items()}
    pages["commands"] = _commands_page()
    pages["index"] = _index(list(pages))
    folder = source / FOLDER
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def by_question() -> dict[str, list[str]]:
    """The questions of the stub, each with its names: a comment above imports is their question."""
    text = Path(theodolite.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            above = lines[node.lineno - 2]
            if above.startswith("# "):
                found[above.removeprefix("# ")] = []
            list(found.values())[-1].extend(alias.name for alias in node.names)
    return found


def rooms() -> list[str]:
    """All modules that list names of their own for the reader."""
    measures = importlib.import_module("theodolite.measures")
    below = [f"theodolite.measures.{module.name}" for module in pkgutil.iter_modules(measures.__path__)]
    own = [f"theodolite.{name}" for name in (*_ROOMS, "experiments", "instruments", "testing")]
    return [name for name in [*own, *below] if _listed(name)]


def _listed(module: str) -> list[str]:
    """What a room lists and the top level does not show."""
    return [name for name in getattr(importlib.import_module(module), "__all__", ()) if not _is_at_the_top(module, name)]


def _names_of(module: Any) -> list[str]:
    """What a module lists, or the functions and classes that it and the modules below it define."""
    own = [name for name, thing in vars(module).items() if str(getattr(thing, "__module__", "")).startswith(module.__name__)]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def _is_at_the_top(module: str, name: str) -> bool:
    return name in theodolite.__all__ and getattr(theodolite, name) is getattr(importlib.import_module(module), name)


def _rooms_by_question(questions: dict[str, list[str]]) -> dict[str, list[str]]:
    """Each room once, with the question it belongs to; rooms that no question takes a name from stand with the last."""
    placed: dict[str, list[str]] = {title: [] for title in questions}
    left = rooms()
    for title, names in questions.items():
        things = [getattr(theodolite, name) for name in names]
        homes = [thing.__name__ if inspect.ismodule(thing) else thing.__module__ for thing in things]
        for room in list(left):
            if _PLACES.get(room, title) == title and any(f"{home}.".startswith(f"{room}.") for home in homes):
                placed[title].append(room)
                left.remove(room)
    for room in left:
        placed[_PLACES.get(room, list(questions)[-1])].append(room)
    return placed


def _slug(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n\n"


def _about(module: str) -> str:
    """The first paragraph of a room's docstring, without the number of its layer."""
    doc = inspect.getdoc(importlib.import_module(module)) or ""
    text = " ".join(doc.split("\n\n")[0].split())
    return _escaped(re.sub(r"^L\d+: ", "", text))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _question_page(title: str, names: list[str], rooms: list[str]) -> str:
    text = _title(title) + "Used as ``th.name`` after ``import theodolite as th``.\n\n"
    plain = [name for name in names if not inspect.ismodule(getattr(theodolite, name))]
    text += _entries("theodolite", plain) if plain else ""
    for room in rooms:
        short = room.removeprefix("theodolite.")
        text += _title(f"More: {short}", "-") + f".. module:: {room}\n   :no-index-entry:\n\n"
        text += _sentence(_about(room)) + f"\n\nUsed as ``th.{short}.name``.\n\n" + _entries(room, _listed(room))
    for name in names:
        module = getattr(theodolite, name)
        if inspect.ismodule(module) and module.__name__ not in rooms:
            text += _title(name, "-") + _sentence(_about(module.__name__)) + f"\n\nUsed as ``th.{name}``.\n\n"
    return text


def _entries(module: str, names: list[str]) -> str:
    """A table of the names, then each in full; modules among them come last, with their own names."""
    found = {name: getattr(importlib.import_module(module), name) for name in names}
    plain = [name for name, thing in found.items() if not inspect.ismodule(thing)]
    described = [name for name in plain if callable(found[name]) and get_origin(found[name]) is None]
    text = f".. currentmodule:: {module}\n\n.. autosummary::\n   :nosignatures:\n\n"
    text += "".join(f"   {name}\n" for name in described) + "\n"
    text += "".join(_entry(name, found[name]) for name in plain)
    for name, thing in found.items():
        if inspect.ismodule(thing):
            text += _title(name, "-") + _sentence(_about(thing.__name__)) + "\n\n" + _entries(thing.__name__, _names_of(thing))
    return text


def _entry(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return f".. autoexception:: {name}\n\n"
    if inspect.isclass(thing):
        made = "()" if issubclass(thing, Result) and thing is not Result else ""  # nobody builds results by hand
        text = f".. autoclass:: {name}{made}\n   :members:\n\n"
        if issubclass(thing, Enum):
            text += "   Values: " + ", ".join(f"``{member.name}``" for member in thing) + ".\n\n"
        return text + (f"   {_fields(thing)}\n\n" if is_dataclass(thing) else "")
    if callable(thing) and get_origin(thing) is None:  # no alias of a type
        return f".. autofunction:: {name}\n\n"
    return f".. data:: {name}\n   :no-typesetting:\n\n.. rubric:: {name}\n\n``{_short(thing)}``\n\n"


def _short(thing: Any) -> str:
    text = ", ".join(map(str, thing)) if isinstance(thing, dict | list | tuple) else str(thing)
    return text if len(text) <= 100 else text[:97] + "..."


def _fields(kind: type) -> str:
    """The fields of a dataclass in one line."""
    shared = _FIELDS_OF_ALL if issubclass(kind, Result) and kind is not Result else set()
    own = [field.name for field in fields(kind) if field.name not in shared and not field.name.startswith("_")]
    text = "Fields: " + ", ".join(f"``{name}``" for name in own)
    return text + ("; and those of every result." if shared else ".")


def _index(pages: list[str]) -> str:
    listed = "".join(f"   {name}\n" for name in ("commands", *(p for p in pages if p != "commands")))
    about = "The public names by question, and the command line. Written from the package itself when these pages are built.\n\n"
    return _title("Reference") + about + f".. toctree::\n   :maxdepth: 1\n\n{listed}"


# The command line


def _commands_page() -> str:
    text = _title("The command line") + "What each command says with ``--help``.\n\n"
    group = typer.main.get_command(app)
    return text + "".join(_command(command, name) for name, command in _walk(group, "theodolite"))


def _walk(command: Any, name: str) -> list[tuple[str, Any]]:
    """A command and those below it."""
    found = [(name, command)]
    for part, below in getattr(command, "commands", {}).items():
        found += _walk(below, f"{name} {part}")
    return found


def _command(command: Any, name: str) -> str:
    text = help_text(command, name)
    body = "".join(f"   {line}\n" if line.strip() else "\n" for line in text.splitlines())
    return _title(name, "-") + f".. code-block:: text\n\n{body}\n"


def help_text(command: Any, name: str) -> str:
    """The help of a command as plain text, 100 columns wide."""
    command.rich_markup_mode = None
    context = command.context_class(command, info_name=name, terminal_width=100, max_content_width=100, color=False)
    return str(command.get_help(context))


# Docstrings


def escape(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Stars, bars and underscores of a docstring stand for themselves; sections are napoleon's business."""
    blocks = "\n".join(lines).expandtabs().split("\n\n")
    lines[:] = "\n\n".join(b if b.lstrip().startswith(">>>") else _escaped(b) for b in blocks).splitlines()


def _escaped(text: str) -> str:
    """Code in double backticks; stars, bars and underscores elsewhere stand for themselves."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*|\\])", r"\\\1", re.sub(r"_(?=\W|$)", r"\\_", parts[i]))
    for i in range(1, len(parts), 2):  # letters that touch code would undo its markup: a backslash and a blank part them
        before, after = re.search(r"\w$", parts[i - 1]), re.match(r"\w", parts[i + 1])
        code = " ".join(parts[i].strip("`").split())
        parts[i] = ("\\ " if before else "") + f"``{code}``" + ("\\ " if after else "")
    return "".join(parts)
