"""What the script `theodolite` imports: Ctrl-C is seen to from here on, before anything else is imported."""

from __future__ import annotations

from theodolite.cli import end_at_once, main

__all__ = ["main"]

end_at_once()
