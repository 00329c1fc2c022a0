"""Every registered experiment keeps the contract at `tiny` size."""

from __future__ import annotations

from theodolite.experiments import names
from theodolite.testing import ExperimentContract

for _name in names():
    _title = "Test" + "".join(part.capitalize() for part in _name.replace("/", "-").replace(".", "-").split("-"))
    globals()[_title] = type(_title, (ExperimentContract,), {"id": _name})


def test_there_are_experiments():
    assert {"checks/stability-edge", "checks/kronecker-identity"} <= set(names())
