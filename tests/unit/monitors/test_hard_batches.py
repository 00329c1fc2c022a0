"""A batch that is merely harder than others is no fault; one with wrong labels is."""

from __future__ import annotations

import pytest

from theodolite.monitors.spikes.diagnosis import Cause, Spike, finding_of
from theodolite.results import Severity


@pytest.mark.parametrize(
    ("before", "highest", "took", "guess", "severity"),
    [
        (0.1, 0.3, 1, None, Severity.NOTE),  # one step
        (0.1, 0.3, 8, 2.3, Severity.NOTE),  # longer, far below a guess
        (0.1, 0.3, 8, None, Severity.WARNING),  # nothing is known of a guess
        (0.9, 2.7, 3, 2.3, Severity.WARNING),  # wrong labels cost more than a guess
        (0.1, 1.0, 3, 2.3, Severity.WARNING),  # ten times the usual loss
    ],
)
def test_how_much_a_bad_batch_matters(before, highest, took, guess, severity):
    height, rise = highest / before, highest - before
    spike = Spike(start=5, peak=5, cause=Cause.BAD_BATCH, end=5 + took, height=height, rise=rise, took=took, aftermath="settled")
    assert finding_of(spike, guess=guess).severity is severity
