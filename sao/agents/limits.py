"""What bounds an episode, and how a context that runs full is compacted."""

from __future__ import annotations

from dataclasses import dataclass

from sao.config import SUMMARY_PROMPT, Config, RolloutConfig
from sao.errors import ConfigError

LEAST_TOKENS = 48  # of a cut observation: room for the marker in a vocabulary of bytes


@dataclass(frozen=True)
class Compaction:
    """Compaction by summary: the policy sums up the conversation, and a new segment goes on from that (`sao.agents.compaction`).

    at: length of the next prompt from which on it is asked for, a share of the context (up to 1) or tokens (above). keep: last turns that stay word
    for word. summary_tokens sampled for one summary. prompt: what asks for it. most: summaries of one episode.
    """

    at: float = 1.0
    keep: int = 2
    summary_tokens: int = 256
    prompt: str = SUMMARY_PROMPT
    most: int = 8

    def threshold(self, context: int) -> int:
        """The longest prompt in tokens that asks for none."""
        return int(self.at * context) if self.at <= 1 else int(self.at)


@dataclass(frozen=True)
class Limits:
    """What bounds an episode.

    max_turns with the environment; max_turn_tokens sampled in one of them; max_tokens of the whole episode: every token of every segment, but for what a
    new segment has in common with the start of the one before; max_model_len and context_tokens of one segment, so of a turn's prompt with its answer: the
    engine's limit and our own (0: none); time_limit_s from start to end; observation_limit characters and observation_tokens of one message of a step
    (0: none), of which observation_keep (head | tail | both) stays. answer_grace_s: how long after the deadline an engine, which ends the request then,
    may take to hand over what it sampled. compaction needs a context.
    """

    max_turns: int = 8
    max_turn_tokens: int = 256
    max_tokens: int = 2048
    max_model_len: int = 0
    context_tokens: int = 0
    time_limit_s: float = 60.0
    observation_limit: int = 4096
    observation_tokens: int = 0
    observation_keep: str = "head"
    answer_grace_s: float = 3.0
    compaction: Compaction | None = None

    @property
    def context(self) -> int:
        """Most tokens of one segment; 0: as many as the episode has."""
        return min((limit for limit in (self.max_model_len, self.context_tokens) if limit > 0), default=0)

    @classmethod
    def of(cls, config: Config) -> Limits:
        """The limits a configuration asks for."""
        rollout = config.rollout
        compaction = Compaction(rollout.compact_at, rollout.compact_keep, rollout.summary_tokens, rollout.summary_prompt, rollout.max_compactions)
        return cls(
            max_turns=rollout.max_turns,
            max_turn_tokens=rollout.max_turn_tokens,
            max_tokens=rollout.max_tokens,
            max_model_len=config.engine.max_model_len or rollout.max_tokens,
            context_tokens=rollout.context_tokens,
            time_limit_s=rollout.time_limit_s,
            observation_limit=rollout.observation_limit,
            observation_tokens=rollout.observation_tokens,
            observation_keep=rollout.observation_keep,
            compaction=compaction if rollout.compaction == "summary" else None,
        )


def check_programs(config: Config) -> None:
    """Refuse limits that do nothing where every environment is an agent program. Raises ConfigError."""
    for key in ("compaction", "observation_limit", "observation_tokens", "observation_keep"):
        if getattr(config.rollout, key) != getattr(RolloutConfig, key):
            raise ConfigError(f"rollout.{key} does nothing where an agent program keeps its own conversation (env=program); leave it out")


def check_long_episodes(config: Config) -> None:
    """Refuse limits that contradict each other. Raises ConfigError."""
    rollout, longest = config.rollout, config.engine.max_model_len
    if 0 < longest < rollout.context_tokens:
        raise ConfigError(
            f"rollout.context_tokens={rollout.context_tokens} exceeds engine.max_model_len={longest}; lower the first or raise the second"
        )
    if 0 < rollout.observation_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"rollout.observation_tokens={rollout.observation_tokens} is less than a marker needs; give {LEAST_TOKENS} or more, or 0 for none"
        )
    if rollout.compaction == "off":
        for key in ("compact_at", "compact_keep", "summary_tokens", "summary_prompt", "max_compactions"):
            if getattr(rollout, key) != getattr(RolloutConfig, key):
                raise ConfigError(f"rollout.{key} does nothing with rollout.compaction=off; set rollout.compaction=summary")
        return
    context = rollout.context_tokens or longest
    if not context:
        raise ConfigError("rollout.compaction=summary needs to know when a context is full: set rollout.context_tokens or engine.max_model_len")
    if rollout.summary_tokens + rollout.max_turn_tokens >= context:
        raise ConfigError(
            f"rollout.summary_tokens={rollout.summary_tokens} and rollout.max_turn_tokens={rollout.max_turn_tokens} fill the context of {context} "
            "tokens and leave none for a prompt; lower them"
        )
    if not rollout.summary_prompt.strip():
        raise ConfigError("rollout.summary_prompt is empty: write what asks the policy for a summary, or leave the key out")
