"""Instruments are found in their folders, run in their order, and those of others run last."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import theodolite as th
from tests.unit.instruments.cases import bowl
from theodolite.instruments import Instrument, Site, SurveyContext, Work, registry
from theodolite.results import Result, Severity


class Size(Result):
    """Nothing but a cost."""

    def rows(self):
        return [{"size": 2}]

    def sentence(self):
        return "There are parameters."


class Theirs(Instrument):
    """Written for an earlier version: its arguments are called `site`."""

    name, title, question, how = "theirs", "Theirs", "How many parameters?", "They are counted."

    def cost(self, site: Site, **effort):
        return Work()

    def run(self, site: Site, **effort):
        return Size()

    def findings(self, site: Site, result):
        return [self.found(Severity.NOTE, f"{site.problem.size} parameters.", label="counted")]


def test_every_class_in_a_folder_is_an_instrument_and_orders_differ():
    kinds = [type(instrument) for instrument in registry.all_instruments()]
    assert registry.names()[:4] == ["batches", "learning_rate", "progress", "settings"]
    assert len({kind.order for kind in kinds}) == len(kinds)
    assert [kind.order for kind in kinds] == sorted(kind.order for kind in kinds)
    folders = {kind.__module__.split(".")[2] for kind in kinds}
    assert folders == {"progress", "data", "advice", "curvature", "rates", "features", "language"}


def test_an_instrument_of_another_package_is_found_by_its_entry_point_and_runs_last(monkeypatch):
    point = EntryPoint("theirs", f"{__name__}:Theirs", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    registry._installed.cache_clear()
    try:
        assert registry.names()[-1] == "theirs"
        found = th.survey(bowl([1.0, 2.0]), only=["theirs"])
        assert [finding.sentence for finding in found.of("theirs")] == ["2 parameters."]
    finally:
        registry._installed.cache_clear()


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="Nearest: curvature"):
        registry.get("curvatur")


def test_the_context_is_known_by_its_earlier_name_too():
    assert Site is SurveyContext


def test_an_instrument_that_cannot_be_loaded_or_priced_ends_nothing_else(monkeypatch):
    class Unpriced(Theirs):
        name, title = "unpriced", "Unpriced"

        def cost(self, context, **effort):
            return [][1]

    broken = EntryPoint("broken", f"{__name__}:Missing", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken] if group == registry.GROUP else [])
    monkeypatch.setattr(registry, "_OWN", {"unpriced": Unpriced})
    registry._installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"'broken' of a package cannot be used: AttributeError"):
            assert registry.names()[-1] == "unpriced"
        found = th.survey(bowl([1.0, 2.0]), only=["unpriced", "parameters"])
    finally:
        registry._installed.cache_clear()
    assert "parameters" in found.results
    assert "IndexError" in str([step for step in found.plan if step["instrument"] == "unpriced"])
