"""The contract that every result keeps. Inherit it and write `make`; pytest does the rest.

class TestMyResult(ResultContract):
    def make(self):
        return my_measure(small_problem)
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

from theodolite.results import Cost, Outcome, Provenance, Result, load
from theodolite.testing.equality import same


class ResultContract:
    """Rows are tidy, saving and loading gives the same result, the sentence can be read, and nothing can be changed."""

    @abstractmethod
    def make(self) -> Result:
        """A small result as a user gets it."""

    def test_it_is_a_frozen_record(self) -> None:
        import pytest

        result = self.make()
        assert is_dataclass(result)
        with pytest.raises(FrozenInstanceError):
            result.seed = 7  # type: ignore[misc]
        assert isinstance(result.outcome, Outcome)
        assert isinstance(result.cost, Cost)
        assert isinstance(result.provenance, Provenance)
        assert result.seed is None or isinstance(result.seed, int)
        assert result.schema >= 1

    def test_rows_are_tidy(self) -> None:
        """One flat dictionary per observation, with the columns of the first one, and the same each time."""
        result = self.make()
        rows = result.rows()
        assert all(isinstance(name, str) and name for row in rows for name in row)
        unfit = {f"{k}: {type(v).__name__}" for row in rows for k, v in row.items() if not _is_plain(v)}
        assert unfit == set()
        assert all(set(row) <= set(rows[0]) for row in rows)
        assert same(rows, result.rows())
        frame = result.to_frame()
        assert list(frame.columns) == list(rows[0] if rows else ())
        assert len(frame) == len(rows)

    def test_the_sentence_can_be_read(self) -> None:
        result = self.make()
        sentence = result.sentence()
        assert sentence.strip()
        assert re.findall(r"\b(?:nan|inf|None|tensor\()", sentence) == []
        assert str(result) == sentence
        assert repr(result).startswith(f"<{type(result).__name__}: ")
        assert sentence in repr(result)
        assert "<script>" not in result._repr_html_()

    def test_it_can_be_drawn_or_says_that_it_has_no_picture(self) -> None:
        from matplotlib.figure import Figure

        try:
            drawn = self.make().plot()
        except ValueError as error:
            assert "no picture" in str(error)  # noqa: PT017
        else:
            assert isinstance(drawn, Figure)

    def test_saving_and_loading_gives_the_same(self, tmp_path: Path) -> None:
        result = self.make()
        result.save(tmp_path / "kept")
        for back in (load(tmp_path / "kept"), type(result).load(tmp_path / "kept")):
            assert type(back) is type(result)
            differing = [f.name for f in fields(result) if not same(getattr(back, f.name), getattr(result, f.name))]
            assert differing == []
            assert same(back.rows(), result.rows())
            assert back.sentence() == result.sentence()
        assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors"}

    def test_a_copy_is_equal(self) -> None:
        result = self.make()
        assert same(copy.copy(result).rows(), result.rows())


def _is_plain(value: object) -> bool:
    """A number, a text, a truth value, or nothing."""
    return value is None or isinstance(value, bool | int | float | str)
