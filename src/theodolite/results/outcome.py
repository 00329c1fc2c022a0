"""How a computation ended. Failures are data, and each says what to do next."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How a computation ended; the value is the sentence a user reads."""

    CONVERGED = "converged"
    FINISHED = "finished"
    MAX_MATVECS = (
        "stopped at the product budget before every residual fell below tol; raise max_matvecs, raise tol or ask for fewer pairs"
    )
    UNVERIFIED = (
        "residuals are below tol, but the product budget ended before the search for missed "
        "copies of eigenvalues did; raise max_matvecs"
    )
    PRECISION = (
        "stopped because the residuals no longer fall: they have reached the rounding of the "
        "products; raise tol, or use a float64 model"
    )
    DIVERGED = "the loss became NaN or infinite; lower the learning rate, or look at the step before"
    UNBOUNDED = "no upper end was found in the range tried; raise it"
    ESTIMATED = "estimated; the error stands beside the value"

    @property
    def good(self) -> bool:
        """Whether the number may be used as it stands."""
        return self in (Outcome.CONVERGED, Outcome.FINISHED, Outcome.ESTIMATED)
