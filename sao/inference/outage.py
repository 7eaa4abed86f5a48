"""Time without an engine: no episode answers for it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Outage:
    """Time in which a kind of request found no engine: seconds of the outages that are over, and when the present one began."""

    total_s: float = 0.0
    since: float | None = None

    def note(self, served: bool) -> None:
        now = time.monotonic()
        if not served and self.since is None:
            self.since = now
        elif served and self.since is not None:
            self.total_s, self.since = self.total_s + now - self.since, None
