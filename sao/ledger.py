"""Prompts and sampled tokens accounted for: everything submitted ends in exactly one place, and the ledger can prove it.

    submitted = trained + dropped(reason) + in flight          (prompts, by ordinal)
    sampled   = trained + dropped(reason) + in flight          (tokens of finished attempts)

Tokens sampled after a client's stop string are dropped as `after_stop` when their episode finishes.

In flight is running, buffered (finished, not yet in a batch) or training. A trained episode keeps its admission slot until the weights that
contain it are published (`unpublished`); it already counts as trained. A retried attempt's tokens are dropped under its failure's reason while
its prompt stays in flight. Training that a roll-back undid moves from trained to dropped.

Plain object, no Ray and no torch; one instance lives in the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sao.trajectory import EpisodeId, TrajectoryMeta

State = Literal["running", "buffered", "training"]


_NUMBERS = ("submitted", "attempts", "trained", "trained_tokens", "sampled_tokens", "unpublished")
_COUNTERS = ("dropped", "dropped_tokens", "retried", "submitted_by_workload", "trained_by_workload")


class LedgerError(RuntimeError):
    """An episode was moved from a state it is not in: an accounting bug, never a user's mistake."""


@dataclass
class Entry:
    """An episode in flight. `version` is the admitted version while running and the oldest action token's once finished."""

    episode_id: EpisodeId
    task_id: str
    environment: str
    workload: str
    version: int
    state: State = "running"
    tokens: int = 0


def _entry_of(state: Mapping[str, Any]) -> Entry:
    return Entry(**{**state, "episode_id": EpisodeId(*state["episode_id"])})


class Ledger:
    """States move running -> buffered -> training -> trained; from any of them an episode can be dropped for a named reason."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.submitted = 0
        self.attempts = 0
        self.trained = 0
        self.trained_tokens = 0
        self.sampled_tokens = 0
        self.unpublished = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.dropped_by_task: Counter[tuple[str, str]] = Counter()
        self.retried: Counter[str] = Counter()
        self.submitted_by_workload: Counter[str] = Counter()
        self.trained_by_workload: Counter[str] = Counter()
        self.undoable: list[Entry] | None = None  # trained and may yet be undone, in order; None where nothing ever is

    def submit(self, episode_id: EpisodeId, task_id: str, environment: str, workload: str, version: int) -> None:
        """A first attempt starts under weights `version`."""
        if episode_id.ordinal in self.entries:
            raise LedgerError(f"episode {episode_id} was submitted twice")
        self.entries[episode_id.ordinal] = Entry(episode_id, task_id, environment, workload, version)
        self.submitted += 1
        self.attempts += 1
        self.submitted_by_workload[workload] += 1

    def retry(self, episode_id: EpisodeId, reason: str, tokens: int, version: int) -> EpisodeId:
        """The running attempt failed; the same prompt starts again under `version`. Returns the new attempt's id."""
        entry = self._entry(episode_id, "running")
        self._lose_tokens(reason, tokens)
        self.retried[reason] += 1
        self.attempts += 1
        entry.episode_id = EpisodeId(episode_id.ordinal, episode_id.attempt + 1)
        entry.version = version
        return entry.episode_id

    def finish(self, meta: TrajectoryMeta) -> None:
        """A running episode became a trajectory and waits for a batch."""
        entry = self._entry(meta.episode_id, "running")
        entry.task_id = meta.task_id  # of a batch that is trained again; a curriculum may have drawn another task in its place
        entry.state = "buffered"
        entry.version = meta.oldest_version
        entry.tokens = meta.sampled_tokens
        self.sampled_tokens += meta.sampled_tokens
        if meta.tokens_after_stop:
            self._lose_tokens("after_stop", meta.tokens_after_stop)

    def drop(self, episode_id: EpisodeId, reason: str, tokens: int = 0) -> None:
        """An episode leaves without being trained. `tokens`: sampled tokens of a running attempt that never finished."""
        entry = self._entry(episode_id, "running", "buffered", "training")
        del self.entries[episode_id.ordinal]
        self.dropped[reason] += 1
        self.dropped_by_task[(reason, entry.task_id)] += 1
        if entry.state == "running":
            self._lose_tokens(reason, tokens)
        else:
            self.dropped_tokens[reason] += entry.tokens

    def restart(self, episode_id: EpisodeId, version: int) -> None:
        """A running attempt begins anew under `version`: its worker, or the whole run, came back from a fault."""
        self._entry(episode_id, "running").version = version

    def take(self, episode_ids: Iterable[EpisodeId]) -> None:
        """Buffered episodes enter a training step."""
        for episode_id in episode_ids:
            self._entry(episode_id, "buffered").state = "training"

    def settle(self, episode_ids: Iterable[EpisodeId], *, awaits_publication: bool) -> None:
        """A training step contains these episodes. Their slots stay taken until `published` when new weights came of it."""
        for episode_id in episode_ids:
            entry = self._entry(episode_id, "training")
            del self.entries[episode_id.ordinal]
            self.trained += 1
            self.trained_tokens += entry.tokens
            self.trained_by_workload[entry.workload] += 1
            self.unpublished += awaits_publication
            if self.undoable is not None:
                self.undoable.append(entry)

    def undo(self, mark: int, reason: str) -> list[Entry]:
        """The learner went back to weights made when `trained` was `mark`: what was trained since is in no weights any more and counts as dropped.

        Returns those episodes, as far as they were kept in `undoable`.
        """
        undone = self._trained_since(mark)
        for entry in undone:
            self.trained -= 1
            self.trained_tokens -= entry.tokens
            self.trained_by_workload[entry.workload] -= 1
            self.dropped[reason] += 1
            self.dropped_tokens[reason] += entry.tokens
            self.dropped_by_task[(reason, entry.task_id)] += 1
        self.undoable = []
        return undone

    def for_good(self, mark: int) -> None:
        """Nothing trained before `trained` was `mark` will be undone any more."""
        self.undoable = self._trained_since(mark)

    def _trained_since(self, mark: int) -> list[Entry]:
        kept = self.undoable or []
        return kept[len(kept) - min(len(kept), max(0, self.trained - mark)) :]

    def published(self) -> None:
        """Every live engine acknowledged weights that contain all that was trained."""
        self.unpublished = 0

    def count(self, state: State) -> int:
        return sum(entry.state == state for entry in self.entries.values())

    @property
    def outstanding(self) -> int:
        """Episodes that hold an admission slot: running + buffered + training + trained but not yet published."""
        return len(self.entries) + self.unpublished

    def running_versions(self) -> dict[int, int]:
        """Admitted versions of the episodes that still run, by ordinal."""
        return {ordinal: entry.version for ordinal, entry in self.entries.items() if entry.state == "running"}

    def audit(self) -> dict[str, Any]:
        """The account as plain data; `closes` is whether both identities hold."""
        in_flight_tokens = sum(entry.tokens for entry in self.entries.values())
        prompts = self.trained + self.dropped.total() + len(self.entries)
        tokens = self.trained_tokens + self.dropped_tokens.total() + in_flight_tokens
        return {
            "closes": prompts == self.submitted and tokens == self.sampled_tokens,
            "prompts": {
                "submitted": self.submitted,
                "trained": self.trained,
                "dropped": dict(self.dropped),
                "running": self.count("running"),
                "buffered": self.count("buffered"),
                "training": self.count("training"),
                "attempts": self.attempts,
                "retried": dict(self.retried),
            },
            "tokens": {
                "sampled": self.sampled_tokens,
                "trained": self.trained_tokens,
                "dropped": dict(self.dropped_tokens),
                "in_flight": in_flight_tokens,
            },
            "workloads": {
                name: {"submitted": count, "trained": self.trained_by_workload[name]} for name, count in sorted(self.submitted_by_workload.items())
            },
            "dropped_by_task": [{"reason": reason, "task": task, "count": count} for (reason, task), count in self.dropped_by_task.most_common(50)],
        }

    def metrics(self) -> dict[str, float]:
        values = {
            "ledger/submitted": self.submitted,
            "ledger/trained": self.trained,
            "ledger/dropped": self.dropped.total(),
            "ledger/retried": self.retried.total(),
            "ledger/running": self.count("running"),
            "ledger/buffered": self.count("buffered"),
            "ledger/sampled_tokens": self.sampled_tokens,
            "ledger/dropped_tokens": self.dropped_tokens.total(),
        }
        values |= {f"ledger/dropped/{reason}": count for reason, count in self.dropped.items()}
        return {name: float(value) for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """The whole account, JSON-compatible; `load_state_dict` of it gives an equal ledger."""
        return {
            "entries": [asdict(entry) for entry in self.entries.values()],
            "dropped_by_task": [[reason, task, count] for (reason, task), count in self.dropped_by_task.items()],
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: dict(getattr(self, name)) for name in _COUNTERS},
            **({"undoable": [asdict(entry) for entry in self.undoable]} if self.undoable is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entries = {entry.episode_id.ordinal: entry for entry in map(_entry_of, state["entries"])}
        if self.undoable is not None:
            self.undoable = [_entry_of(entry) for entry in state.get("undoable", [])]
        self.dropped_by_task = Counter({(reason, task): count for reason, task, count in state["dropped_by_task"]})
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for name in _COUNTERS:
            setattr(self, name, Counter(state[name]))

    def _lose_tokens(self, reason: str, tokens: int) -> None:
        self.sampled_tokens += tokens
        self.dropped_tokens[reason] += tokens

    def _entry(self, episode_id: EpisodeId, *states: State) -> Entry:
        entry = self.entries.get(episode_id.ordinal)
        if entry is None or entry.episode_id != episode_id:
            raise LedgerError(f"episode {episode_id} is not in flight")
        if entry.state not in states:
            raise LedgerError(f"episode {episode_id} is {entry.state}, expected {' or '.join(states)}")
        return entry
