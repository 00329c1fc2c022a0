"""Every public function says what it returns, and every public name shows how it is used."""

from __future__ import annotations

import inspect

import pytest

import theodolite as th

PUBLIC = [name for name in th.__all__ if callable(getattr(th, name))]
FUNCTIONS = [name for name in PUBLIC if not inspect.isclass(getattr(th, name))]
#: Errors are met, not written, and enumerations have their members.
USED = [name for name in PUBLIC if not (inspect.isclass(getattr(th, name)) and issubclass(getattr(th, name), Exception))]


def text_of(name: str) -> str:
    return inspect.getdoc(getattr(th, name)) or ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_return(name):
    assert "\nReturns:\n" in text_of(name)


@pytest.mark.parametrize("name", USED)
def test_there_is_an_example(name):
    assert ">>> " in text_of(name) or "::\n" in text_of(name)
