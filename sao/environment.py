"""The Environment protocol: what an agent acts on.

An environment is built for one task, used for one episode and closed. It sees actions as text and typed tool calls, never token ids, and
answers with messages in the OpenAI form (`{"role": ..., "content": ...}`). All methods but `tools` are coroutines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One prompt's worth of work. `payload` is what the environment needs to build the episode (a data row, a generated question).

    place: where its source finds it again, JSON-compatible; the source's own affair.
    """

    task_id: str
    environment: str
    payload: Mapping[str, Any]
    seed: int = 0
    workload: str = "default"
    place: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call of a known tool: `arguments` is a JSON object."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True)
class ParseError:
    """A call that cannot be executed: kind is invalid_json, unclosed, unknown_tool or bad_args; `message` goes back to the model."""

    kind: str
    message: str
    name: str = ""


@dataclass(frozen=True)
class Action:
    """One turn of the policy: the text outside tool calls, the calls that can be executed, and those that cannot."""

    text: str
    tool_calls: Sequence[ToolCall] = ()
    parse_errors: Sequence[ParseError] = ()


@dataclass(frozen=True)
class StepResult:
    """Gymnasium's five values. `observation` is a list of messages to append; `reward` is this turn's."""

    observation: Sequence[Message] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What an episode gives its environment.

    seed: for any randomness of the environment. sandbox: where model-written commands run, or None. generate: asks the policy or a judge for
    a completion of messages, or None. deadline: `time.monotonic()` value at which the episode is cut; later by the time in which no engine was there.
    """

    seed: int = 0
    sandbox: Any = None
    generate: Callable[..., Awaitable[str]] | None = None
    deadline: float = float("inf")


@runtime_checkable
class Environment(Protocol):
    """Built as `Class(task, **env.args)`, used for one episode."""

    async def reset(self, context: Context) -> Sequence[Message]:
        """Return the opening messages (system, user)."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Apply one turn of the policy. Turns whose every tool call was malformed never reach here: the turn loop answers them."""
        ...

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tool schemas in the OpenAI function form; empty when the environment has none."""
        ...

    async def close(self) -> None:
        """Release what the episode held. Called exactly once, also after a failure."""
        ...
