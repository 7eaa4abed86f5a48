"""Every error SAO raises on purpose.

Two families that are never mixed: a `UserError` is a mistake in a command, a configuration or a data file and is shown as one
sentence without a stack trace; a `SystemFailure` is something that broke while running. Failures are typed and counted, and they are
never turned into data (a reward of 0, an empty answer).
"""

from __future__ import annotations

from typing import Any

INTERRUPTED = 130  # exit code of a command that was asked to stop, by signal or Ctrl-C


class SaoError(Exception):
    """Base of every deliberate error."""


class UserError(SaoError):
    """A mistake of the user: the message is one sentence naming the key, file or actor and the mend."""


class ConfigError(UserError):
    """A configuration key is unknown, has the wrong type, or contradicts another."""


class DataError(UserError):
    """A task file cannot be used; the message names file, line and reason."""


class SystemFailure(SaoError):
    """Something broke while running.

    `reason` is the short name under which the ledger counts it. Set by the turn loop: `sampled_tokens`, the tokens lost with it, and `trajectory`, the
    episode as far as it had got (None before its first token).
    `lost`: the actor died or fell silent, so a replacement may do what was asked of it. `overdue`: lost because this very call was not answered in time.
    """

    reason = "system"
    sampled_tokens: int = 0
    trajectory: Any = None
    lost: bool = False
    overdue: bool = False

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, self.__dict__


class EngineFailure(SystemFailure):
    """An inference engine died, hung or refused a request."""

    reason = "engine"


class PublishFailure(SystemFailure):
    """New weights did not reach an engine, or the canary shows other weights than the trainer's."""

    reason = "publish"


class LearnerFailure(SystemFailure):
    """The learner died or produced a non-finite update."""

    reason = "learner"


class CheckpointFailure(SystemFailure):
    """A checkpoint could not be written; the run goes on with the one before it."""

    reason = "checkpoint"


class WorkerFailure(SystemFailure):
    """An episode worker died."""

    reason = "worker"


class EnvironmentFailure(SystemFailure):
    """An environment raised, hung, or broke its own contract."""

    reason = "environment"


class RewardFailure(SystemFailure):
    """A reward function raised, hung, crashed its process, or returned something that is not a finite number."""

    reason = "reward"

    def __init__(self, message: str, kind: str = "raised") -> None:
        super().__init__(message, kind)
        self.reason = f"reward_{kind}"

    def __str__(self) -> str:
        return str(self.args[0])


class SandboxFailure(SystemFailure):
    """A sandbox could not be had or did not do its work; what a command did inside is an ExecResult instead."""

    reason = "sandbox"
