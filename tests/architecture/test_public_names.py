"""The public names are there and documented, and importing them stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import theodolite as th

# One fresh process for all that must stay light: what is loaded after each import that should be.
LIGHT = """
import sys
import theodolite
early = set(sys.modules)
import theodolite.cli.app
print(*sorted(early & {heavy}), "|", *sorted(set(sys.modules) & {heavy} - {{"pandas", "sklearn"}}))
"""


def test_importing_and_asking_for_help_is_light():
    code = LIGHT.format(heavy={"torch", "matplotlib", "pandas", "sklearn"})
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "|"


def test_the_table_of_contents_is_complete():
    for name in th.__all__:
        assert getattr(th, name) is not None
    assert set(th.__all__) <= set(dir(th))
    with pytest.raises(AttributeError, match="nosuch"):
        th.nosuch  # noqa: B018


def test_every_public_name_is_documented():
    for name in th.__all__:
        assert (getattr(th, name).__doc__ or "").strip(), name
