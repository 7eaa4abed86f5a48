"""The data contract: what flows from an episode to the gradient.

A `Trajectory` is one episode. It holds one or more `Segment`s, each a token sequence the trainer can score in one forward pass. Token ids are
exactly those the engine consumed and sampled; nothing here was ever decoded and encoded again.

Index convention (one for the whole code base), for token_ids = [p0 p1 a2 a3 o4 a5]:

    position        0     1     2     3     4     5
    token           p0    p1    a2    a3    o4    a5
    action_mask     F     F     T     T     F     T
    logprobs        nan   nan   l2    l3    nan   l5      log pi(token[t] | token[:t]), after temperature
    versions        -1    -1    7     7     -1    8       weights the token was sampled under
    value read at               h1    h2          h4      V(s_t) comes from the hidden state of position t - 1

Whoever makes a trajectory guarantees the invariants by constructing it; whoever reads one relies on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Purpose = Literal["train", "eval"]
AFTER_STOP = "gateway/tokens_after_stop"  # metric of a trajectory: tokens sampled after a client's stop string, which are in no segment


class ContractError(ValueError):
    """A segment or trajectory breaks the data contract; the message names the field and the position."""


@dataclass(frozen=True)
class SamplingSpec:
    """The distribution a segment was sampled from. The trainer scores with the same one.

    temperature 0 means greedy. `stop` are token ids that end a turn and are themselves sampled tokens. `max_tokens` bounds one turn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int = 256

    @property
    def is_raw(self) -> bool:
        """Whether the sampled distribution is the policy's own softmax at `temperature` (no truncation of the support)."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


@dataclass(frozen=True)
class FinishReason:
    """Why an episode ended: `terminal`, `truncated` by (`tokens` | `turns` | `time`), or `failed` with a reason."""

    kind: Literal["terminal", "truncated", "failed"]
    detail: str = ""

    TRUNCATIONS = ("tokens", "turns", "time")

    def __post_init__(self) -> None:
        if self.kind not in ("terminal", "truncated", "failed"):
            raise ContractError(f"finish kind {self.kind!r} is not terminal, truncated or failed")
        if self.kind == "truncated" and self.detail not in self.TRUNCATIONS:
            raise ContractError(f"truncated by {self.detail!r}: expected one of {', '.join(self.TRUNCATIONS)}")
        if self.kind == "failed" and not self.detail:
            raise ContractError("a failed episode needs a reason")

    @classmethod
    def terminal(cls) -> FinishReason:
        return cls("terminal")

    @classmethod
    def truncated(cls, by: str) -> FinishReason:
        return cls("truncated", by)

    @classmethod
    def failed(cls, reason: str) -> FinishReason:
        return cls("failed", reason)

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class EpisodeId(NamedTuple):
    """A global ordinal in submission order, and the attempt (0, or 1 after the retry on a fresh environment)."""

    ordinal: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.ordinal}.{self.attempt}"


def _array(values: Any, dtype: Any, name: str) -> NDArray[Any]:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.ndim != 1:
        raise ContractError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array


@dataclass(frozen=True, eq=False)
class Segment:
    """One token sequence with its per-token record; all arrays have length T.

    token_ids int32, action_mask bool, logprobs float32 (NaN where not sampled), versions int32 (-1 where not sampled). `side` holds append-only
    per-token extras of length T. `parent` is (segment index, position) when this segment forks off another.

    A token the policy sampled for which the engine reported no finite log-prob keeps its version and has action_mask false: it is context to
    the learner, and it is counted.
    """

    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    sampling: SamplingSpec = SamplingSpec()
    side: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    parent: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "token_ids", _array(self.token_ids, np.int32, "token_ids"))
        set_(self, "action_mask", _array(self.action_mask, np.bool_, "action_mask"))
        set_(self, "logprobs", _array(self.logprobs, np.float32, "logprobs"))
        set_(self, "versions", _array(self.versions, np.int32, "versions"))
        length = len(self.token_ids)
        for name in ("action_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ContractError(f"{name} has length {len(getattr(self, name))}, token_ids has {length}")
        for name, extra in self.side.items():
            if len(extra) != length:
                raise ContractError(f"side[{name!r}] has length {len(extra)}, token_ids has {length}")
        if length and self.action_mask[0]:
            raise ContractError("action_mask[0] is true, but nothing precedes the first token")
        if length and self.token_ids.min() < 0:
            raise ContractError("token_ids holds a negative id")
        sampled = self.versions >= 0
        if (self.versions < -1).any():
            raise ContractError("versions holds a value below -1")
        expected = sampled & np.isfinite(self.logprobs)
        if not np.array_equal(self.action_mask, expected):
            at = int(np.flatnonzero(self.action_mask != expected)[0])
            raise ContractError(f"action_mask[{at}] must be true exactly where the token was sampled and its log-prob is finite")
        if not np.isnan(self.logprobs[~expected]).all():
            raise ContractError("logprobs must be NaN off the action mask")
        if (self.logprobs[expected] > 1e-3).any():
            raise ContractError("a log-prob above 0 is not a log-probability")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def action_tokens(self) -> int:
        return int(self.action_mask.sum())

    @property
    def sampled_tokens(self) -> int:
        return int((self.versions >= 0).sum())

    def turn_ends(self) -> NDArray[np.int64]:
        """Positions of the last action token of each turn (a turn is a maximal run of action tokens)."""
        after = np.append(self.action_mask[1:], False)
        return np.flatnonzero(self.action_mask & ~after)


@dataclass(frozen=True)
class TurnTiming:
    """Seconds spent in one turn, and what the engine had to read for it."""

    queue_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class TrajectoryMeta:
    """What the driver and the ledger see of a trajectory; the arrays stay in the object store."""

    episode_id: EpisodeId
    task_id: str
    environment: str
    workload: str
    finish: FinishReason
    reward: float
    admitted_version: int
    oldest_version: int
    newest_version: int
    sampled_tokens: int
    action_tokens: int
    total_tokens: int
    turns: int
    segments: int
    seconds: float
    queue_s: float
    generate_s: float
    environment_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_after_stop(self) -> int:
        return int(self.metrics.get(AFTER_STOP, 0))


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished episode.

    `reward` is the outcome. With `turn_rewards` (one segment only) each turn's reward sits on that turn's last action token and `reward` is
    their sum; without, the whole reward sits on the last action token of the last segment that has one.
    """

    episode_id: EpisodeId
    task_id: str
    environment: str
    segments: tuple[Segment, ...]
    reward: float
    finish: FinishReason
    admitted_version: int
    workload: str = "default"
    turn_rewards: NDArray[np.float32] | None = None
    timings: tuple[TurnTiming, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identity = (self.episode_id,) if isinstance(self.episode_id, int) else self.episode_id
        object.__setattr__(self, "episode_id", EpisodeId(*identity))
        object.__setattr__(self, "segments", tuple(self.segments))
        if not math.isfinite(self.reward):
            raise ContractError(f"reward {self.reward} of episode {self.episode_id} is not finite")
        if self.action_tokens == 0 and self.finish.kind != "failed":
            raise ContractError(f"episode {self.episode_id} has no action token and must be failed, is {self.finish}")
        if self.turn_rewards is not None:
            rewards = _array(self.turn_rewards, np.float32, "turn_rewards")
            object.__setattr__(self, "turn_rewards", rewards)
            if len(self.segments) != 1:
                raise ContractError("turn_rewards need exactly one segment; with several only the outcome is allowed")
            turns = len(self.segments[0].turn_ends())
            if len(rewards) != turns:
                raise ContractError(f"turn_rewards has {len(rewards)} entries for {turns} turns")
            if not math.isclose(float(rewards.sum()), self.reward, rel_tol=1e-5, abs_tol=1e-5):
                raise ContractError(f"reward {self.reward} is not the sum of turn_rewards {float(rewards.sum())}")
        for index, segment in enumerate(self.segments):
            if segment.parent is not None and not 0 <= segment.parent[0] < index:
                raise ContractError(f"segment {index} names parent segment {segment.parent[0]}, which does not precede it")

    @property
    def action_tokens(self) -> int:
        return sum(s.action_tokens for s in self.segments)

    @property
    def sampled_tokens(self) -> int:
        return sum(s.sampled_tokens for s in self.segments)

    @property
    def oldest_version(self) -> int:
        """Oldest version among the action tokens; the admitted version when there is none."""
        return min(self._action_versions(), default=self.admitted_version)

    @property
    def newest_version(self) -> int:
        return max(self._action_versions(), default=self.admitted_version)

    def _action_versions(self) -> Iterable[int]:
        for segment in self.segments:
            chosen = segment.versions[segment.action_mask]
            if len(chosen):
                yield int(chosen.min())
                yield int(chosen.max())

    def token_rewards(self) -> list[NDArray[np.float32]]:
        """Rewards placed on tokens, one float32[T] per segment; they sum to `reward`."""
        placed = [np.zeros(len(s), np.float32) for s in self.segments]
        if self.turn_rewards is not None:
            placed[0][self.segments[0].turn_ends()] = self.turn_rewards
            return placed
        for segment, rewards in zip(reversed(self.segments), reversed(placed), strict=True):
            actions = np.flatnonzero(segment.action_mask)
            if len(actions):
                rewards[actions[-1]] = self.reward
                break
        return placed

    def meta(self) -> TrajectoryMeta:
        return TrajectoryMeta(
            episode_id=self.episode_id,
            task_id=self.task_id,
            environment=self.environment,
            workload=self.workload,
            finish=self.finish,
            reward=self.reward,
            admitted_version=self.admitted_version,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            sampled_tokens=self.sampled_tokens,
            action_tokens=self.action_tokens,
            total_tokens=sum(len(s) for s in self.segments),
            turns=len(self.timings) or sum(len(s.turn_ends()) for s in self.segments),
            segments=len(self.segments),
            seconds=sum(t.queue_s + t.generate_s + t.environment_s for t in self.timings),
            queue_s=sum(t.queue_s for t in self.timings),
            generate_s=sum(t.generate_s for t in self.timings),
            environment_s=sum(t.environment_s for t in self.timings),
            metrics=dict(self.metrics),
        )
