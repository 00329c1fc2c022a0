"""Data and one solution for the tests of paths."""

from __future__ import annotations

import pytest

from tests.unit.measures.mode_connectivity.solutions import blobs, mlp, train


@pytest.fixture(scope="module")
def data():
    return blobs(300)


@pytest.fixture(scope="module")
def test_data():
    return blobs(200, seed=1)


@pytest.fixture(scope="module")
def solution(data):
    return train(mlp(), data, 200)
