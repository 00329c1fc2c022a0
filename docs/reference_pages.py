"""Writes the pages of the reference: the public names by room, and the help of each command.

Everything is read from the package when the documentation is built, so a new name or option appears by itself.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer

import theodolite
from theodolite.cli.app import app
from theodolite.results import Result

FOLDER = "reference"
_FIELDS_OF_ALL = {"outcome", "seed", "cost", "provenance"}


def write(source: Path) -> None:
    """All pages below `source`/reference; a page that is as it was is left alone."""
    pages = {room: _names_page(room, names) for room, names in theodolite._CONTENTS.items()}
    for room in theodolite._ROOMS:
        names = [name for name in importlib.import_module(f"theodolite.{room}").__all__ if not _is_shown(room, name)]
        pages.setdefault(f"theodolite.{room}", "")
        pages[f"theodolite.{room}"] += _room_page(room, names, more=bool(pages[f"theodolite.{room}"]))
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


def _is_shown(room: str, name: str) -> bool:
    """Whether a name of a room is public at the top as well."""
    return theodolite._HOME.get(name) == f"theodolite.{room}"


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n\n"


def _about(module: str) -> str:
    """The first paragraph of a room's docstring, without the number of its layer."""
    doc = inspect.getdoc(importlib.import_module(module)) or ""
    text = " ".join(doc.split("\n\n")[0].split())
    return _escaped(re.sub(r"^L\d+: ", "", text))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _names_page(room: str, names: list[str]) -> str:
    text = _title(room.removeprefix("theodolite.")) + _sentence(_about(room)) + "\n\n"
    text += "Used as ``th.name`` after ``import theodolite as th``.\n\n"
    return text + _entries("theodolite", names)


def _room_page(room: str, names: list[str], *, more: bool) -> str:
    module = f"theodolite.{room}"
    text = _title("More", "-") if more else _title(room) + _sentence(_about(module)) + "\n\n"
    return text + f"Used as ``th.{room}.name``.\n\n" + _entries(module, names)


def _entries(module: str, names: list[str]) -> str:
    """A table of the names, then each in full; modules among them come last, with their own names."""
    found = {name: getattr(importlib.import_module(module), name) for name in names}
    plain = [name for name, thing in found.items() if not inspect.ismodule(thing)]
    described = [name for name in plain if callable(found[name])]
    text = f".. currentmodule:: {module}\n\n.. autosummary::\n   :nosignatures:\n\n"
    text += "".join(f"   {name}\n" for name in described) + "\n"
    text += "".join(_entry(name, found[name]) for name in plain)
    for name, thing in found.items():
        if inspect.ismodule(thing):
            text += _title(name, "-") + _sentence(_about(thing.__name__)) + "\n\n" + _entries(thing.__name__, thing.__all__)
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
    if callable(thing):
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
    about = "The public names by room, and the command line. Written from the package itself when these pages are built.\n\n"
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


def tidy(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The house's docstrings as reStructuredText: code in backticks, `Parameters` as a list, nothing else marked up."""
    blocks = "\n".join(lines).expandtabs().split("\n\n")
    done: list[str] = []
    for block in blocks:
        rows = block.strip("\n").splitlines()
        if len(rows) > 1 and re.fullmatch(r"\s*-{3,}", rows[1]):
            done.append(f"**{rows[0].strip()}**")
            done += _parameters(rows[2:])
        elif block.lstrip().startswith(">>>"):
            done.append(block.strip("\n"))
        else:
            done.append(_escaped(block.strip("\n")))
    lines[:] = [*"\n\n".join(done).splitlines(), ""]


def _parameters(rows: list[str]) -> list[str]:
    """`name : text` with further lines below it, as definitions."""
    items: list[tuple[str, list[str]]] = []
    for row in rows:
        match = re.fullmatch(r"(\S.*?) : (.*)", row)
        if match and not row.startswith(" "):
            items.append((match[1], [match[2]]))
        elif items:
            items[-1][1].append(row.strip())
    listed = [
        f"{', '.join(f'``{n.strip()}``' for n in names.split(','))}\n    {_escaped(' '.join(text))}" for names, text in items
    ]
    return ["\n".join(listed)]


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
