"""What was recorded against what a replay computed, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.learner.protocol import MASK_REASONS, SegmentRecord
from sao.report.store import StoredEpisode

# In the order a step computes them, so that the first that departs is the nearest to the cause.
COLUMNS = ("returns", "values", "advantages", "trainer_logprobs", "mask_reason")
# Not part of the arithmetic: clocks, and a check against earlier policies that a restored learner no longer has.
LEFT_OUT = ("timing_s/", "logprob_gap/same_version_")


@dataclass(frozen=True)
class Departure:
    """One recorded number that the replay did not give. `difference` is absolute; NaN where one of the two is not a number."""

    step: int
    what: str
    where: str
    recorded: float | str
    replayed: float | str
    difference: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}{f' of {self.where}' if self.where else ''}: recorded {self.recorded!r}, replayed {self.replayed!r}"


@dataclass
class Tally:
    """Of one quantity: numbers compared, numbers that differ, and the largest difference."""

    compared: int = 0
    differ: int = 0
    largest: Departure | None = None


@dataclass
class Comparison:
    """Over all steps replayed. `first`: in the order of steps, quantities (COLUMNS, metrics, weights) and tokens."""

    tokens: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    first: Departure | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def bit_equal(self) -> bool:
        return self.first is None

    @property
    def largest(self) -> Departure | None:
        """The largest difference of all quantities; one that is not a number counts as larger than any."""
        found = [tally.largest for tally in self.tallies.values() if tally.largest is not None]
        return max(found, key=lambda d: _rank(d.difference), default=None)

    def as_json(self) -> dict[str, Any]:
        def plain(departure: Departure | None) -> dict[str, Any] | None:
            return None if departure is None else {k: _text_if_not_finite(v) for k, v in asdict(departure).items()}

        quantities = {name: {"compared": t.compared, "differ": t.differ, "largest": plain(t.largest)} for name, t in self.tallies.items()}
        return {
            "bit_equal": self.bit_equal,
            "tokens": self.tokens,
            "first": plain(self.first),
            "largest": plain(self.largest),
            "quantities": quantities,
            "notes": self.notes,
        }

    # ------------------------------------------------------------------ what is compared

    def records(self, step: int, stored: Sequence[StoredEpisode], replayed: Iterable[SegmentRecord]) -> None:
        """The per-token records of one step, token by token; `stored` in any order, as the replay's are found by episode and segment."""
        by_segment = {(record.episode_id, record.segment): record for record in replayed}
        ordered = sorted(stored, key=lambda episode: episode.trajectory.episode_id)
        pairs = [
            (record, by_segment[record.episode_id, record.segment], episode.trajectory.segments[record.segment].action_mask)
            for episode in ordered
            for record in episode.records
            if record is not None
        ]
        self.tokens += sum(int(mask.sum()) for _, _, mask in pairs)
        for name in COLUMNS:
            for before, after, mask in pairs:
                kept = mask if name != "mask_reason" else np.ones(len(mask), bool)
                where = f"episode {before.episode_id}, segment {before.segment}, token"
                self.arrays(step, name, where, getattr(before, name)[kept], getattr(after, name)[kept], np.flatnonzero(kept))

    def arrays(
        self, step: int, what: str, where: str, recorded: NDArray[Any], replayed: NDArray[Any], positions: NDArray[np.int64] | None = None
    ) -> None:
        """Two arrays of one shape and type; `positions` names their elements where these are not simply counted."""
        tally = self.tallies.setdefault(what, Tally())
        tally.compared += recorded.size
        differ = np.flatnonzero(~_same_bits(recorded.reshape(-1), replayed.reshape(-1)))
        if not len(differ):
            return
        tally.differ += len(differ)
        before, after = recorded.reshape(-1)[differ], replayed.reshape(-1)[differ]
        with np.errstate(invalid="ignore"):
            gaps = np.abs(before.astype(np.float64) - after.astype(np.float64))
        for at in sorted({0, int(np.argmax(np.where(np.isnan(gaps), np.inf, gaps)))}):
            position = differ[at] if positions is None else positions[differ[at]]
            self.departs(tally, Departure(step, what, f"{where} {position}", *_shown(what, before[at], after[at]), float(gaps[at])))

    def metrics(self, step: int, recorded: Mapping[str, Any], replayed: Mapping[str, float]) -> None:
        """The learner's metrics of a step. One that the run did not keep is no difference; it is named in `notes`."""
        tally, missing = self.tallies.setdefault("metrics", Tally()), []
        for name, value in replayed.items():
            if name.startswith(LEFT_OUT) or not math.isfinite(value):
                continue
            if name not in recorded:
                missing.append(name)
                continue
            tally.compared += 1
            if recorded[name] != value:
                tally.differ += 1
                self.departs(tally, Departure(step, f"metric {name}", "", recorded[name], value, abs(recorded[name] - value)))
        if missing:
            self.notes.append(f"step {step}: the run recorded no {', '.join(sorted(missing)[:4])}{' and others' if len(missing) > 4 else ''}")

    def departs(self, tally: Tally, departure: Departure) -> None:
        if self.first is None:
            self.first = departure
        if tally.largest is None or _rank(departure.difference) > _rank(tally.largest.difference):
            tally.largest = departure


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Elementwise; every NaN is the same."""
    if a.dtype.kind != "f":
        return np.asarray(a == b)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    return np.asarray((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b)))


def _shown(what: str, before: Any, after: Any) -> tuple[float | str, float | str]:
    if what == "mask_reason":
        return MASK_REASONS[int(before)], MASK_REASONS[int(after)]
    return float(before), float(after)


def _rank(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _text_if_not_finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
