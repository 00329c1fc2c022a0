"""The engines as fixtures; one Ray serves all tests of a process, because starting it takes seconds."""

from __future__ import annotations

import pytest

from theodolite.runners import ENGINES, kept_open


@pytest.fixture(scope="package")
def open_ray():
    with kept_open("ray", workers=2):
        yield


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("open_ray")
    return request.param


@pytest.fixture(params=["joblib", pytest.param("ray", marks=pytest.mark.slow)])  # in the quick tests Ray has a file of its own
def parallel(request):
    """An engine with workers that may die."""
    if request.param == "ray":
        request.getfixturevalue("open_ray")
    return request.param
