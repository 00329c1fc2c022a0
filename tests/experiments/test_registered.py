"""Every registered experiment keeps the contract at `tiny` size; of the longest, one job does so in the quick tests."""

from __future__ import annotations

import os

import pytest

from theodolite.experiments import get, names
from theodolite.runners import Computations
from theodolite.testing import DeclarationContract, ExperimentContract


@pytest.fixture(autouse=True, scope="session")
def _shared_computations(tmp_path_factory):
    """What one worker computed, the others find: figures of one study train nothing again."""
    base = tmp_path_factory.getbasetemp()  # of this worker, in the folder of the session; without workers it is that folder
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    ExperimentContract.computations = Computations(session / "computations")


def title(name: str) -> str:
    """`TestFigureB5_of_catapult_Line`: figures of one study stay on one worker, see `tests/conftest.py`."""
    chapter, _, figure = name.partition("/")
    words = "".join(part.capitalize() for part in figure.replace(".", "-").split("-"))
    return f"Test{words}_of_{chapter.replace('-', '_')}_{type(get(name).study).__name__}"


#: Those that take seconds at `tiny`: one job of each kind of study is quick, the whole is left to `pytest -m slow`.
LONG = (
    *("anchor/figure-3.1", "anchor/figure-3.2", "anchor/pretraining", "anchor/transfer", "anchor/worlds"),
    *("catapult/figure-3.1", "catapult/figure-3.2", "catapult/figure-3.4", "catapult/figure-B.12", "catapult/figure-B.13"),
    "catapult/theorems",
    *(f"catapult-features/figure-{number}" for number in ("4.3", "4.4", "4.7", "4.8", "4.9", "4.10", "4.11")),
    *(f"catapult-features/figure-C.{number}" for number in (3, 5, 9, 11, 12, 13, 14, 16, 18, 19, 20, 21, 22, 23)),
    *("catapult-features/table-4.2", "catapult-features/table-C.1", "catapult-features/theorems"),
    *(f"growing/figure-{number}" for number in ("5.2", "5.3", "5.4")),
    *(f"growing/table-{number}" for number in ("5.1", "5.2", "C.1", "C.2")),
    *("growing/hypotheses", "growing/left-open"),
    *(f"hessian/figure-{number}" for number in (4, 5, 9, 10, 15, 18, 20, 23, 27)),
    *("hessian/table-6", "hessian/table-8", "hessian/table-10", "hessian/theorems"),
    *("linearity/hessian-scaling", "linearity/pl", "linearity/taylor"),
    *(f"sparse-coding/figure-{number}" for number in ("2.1", "2.2", "2.3")),
    *("sparse-coding/ablations", "sparse-coding/baselines", "sparse-coding/codes", "sparse-coding/score"),
    *("sparse-coding/real-patches", "sparse-coding/theorems"),
    *(f"stability/figure-2.{number}" for number in (1, 2, 3, 4)),
    *(f"stability/figure-A.{number}" for number in (1, 2, 3, 4, 10, 11, 12, 13)),
    *("stability/stopping", "stability/table-2.1"),
    *(f"step-size/figure-{number}" for number in (5, 7, 8, 9)),
    *("step-size/equal-cost", "step-size/networks", "step-size/theorems"),
)


def slow(test):
    """The same test, left to `pytest -m slow`."""

    @pytest.mark.slow
    def left(self):
        test(self)

    return left


FIRST, AGAIN, WRITTEN = "test_its_first_job_gives_rows", "test_a_job_gives_the_same_rows_again", "test_the_figure_is_written"

_seen = set()  # kinds of studies of which a figure has done in the quick tests what its other figures leave to the slow ones
for _name in names():
    _kind, _title = type(get(_name).study), title(_name)
    _whole = {"id": _name, "test_the_figure_repeats": slow(ExperimentContract.test_the_figure_repeats)}
    if _kind in _seen:
        _whole |= {part: slow(getattr(ExperimentContract, part)) for part in (AGAIN, WRITTEN)}
    if _name in LONG:
        _first = {FIRST: slow(DeclarationContract.test_its_first_job_gives_rows)} if _kind in _seen else {}
        globals()[_title] = type(_title, (DeclarationContract,), {"id": _name, **_first})
        _title, _whole["pytestmark"] = _title.replace("_of_", "Whole_of_"), pytest.mark.slow
    _seen.add(_kind)
    globals()[_title] = type(_title, (ExperimentContract,), _whole)


def test_there_are_experiments():
    assert {"checks/stability-edge", "checks/kronecker-identity"} <= set(names())
    assert set(LONG) <= set(names())
