"""Sandboxes as a run has them: checked before anything starts, one for each episode whose environment asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from sao.config import EnvConfig, SandboxConfig
from sao.environment import Environment
from sao.errors import ConfigError, SandboxFailure
from sao.sandbox.client import Sandboxes, Unavailable
from sao.sandbox.levels import BACKENDS, ENGINES
from sao.sandbox.protocol import Capabilities, Sandbox, SandboxSpec
from sao.tasks.target import load_environment

log = logging.getLogger(__name__)
POSITIVE = ("memory_mb", "disk_mb", "processes", "cpu_s", "timeout_s", "output_kb")
LEAST = {"memory_mb": 32, "disk_mb": 1, "processes": 4}  # below it no shell starts


def wants_sandbox(environment_class: type) -> bool:
    return getattr(environment_class, "sandbox", False) is True


def spec_of(config: SandboxConfig) -> SandboxSpec:
    given = asdict(config)
    del given["backend"], given["unsafe"]
    return SandboxSpec(**given)


def spec_for(environment_class: type, config: SandboxConfig) -> SandboxSpec:
    """What is configured, and what the class adds to it: its `extend_spec(spec)`, if it has one."""
    extend = getattr(environment_class, "extend_spec", None)
    spec = spec_of(config)
    return extend(spec) if extend else spec


@contextlib.asynccontextmanager
async def sandbox_for(environment_class: type[Environment] | type, config: SandboxConfig) -> AsyncIterator[Sandbox | None]:
    """A fresh sandbox, closed afterwards; None where the environment asks for none. Raises SandboxFailure when there is none to be had."""
    if not wants_sandbox(environment_class):
        yield None
        return
    sandbox = await Sandboxes(config.backend).create(spec_for(environment_class, config))
    try:
        yield sandbox
    finally:
        try:
            await sandbox.close()
        except SandboxFailure as failure:  # the episode is over and stands; sandboxd closes what its owner leaves
            log.warning("a sandbox could not be closed: %s", failure)


def check_sandboxes(env_configs: Sequence[EnvConfig]) -> None:
    """Refuse limits that make no sense and a backend that this machine does not have; print what a weaker one does not enforce.

    Starts the run's daemon, so that every later process finds it. Raises ConfigError with the mend.
    """
    for env in env_configs:
        environment_class = load_environment(env.target)
        if not wants_sandbox(environment_class):
            if env.sandbox != SandboxConfig():
                raise ConfigError(
                    f"env={env.name}: env.sandbox is set, but {environment_class.__name__} runs no commands (its class does not say `sandbox = True`)"
                )
            continue
        check_limits(env.sandbox)
        try:
            capabilities = asyncio.run(_try_out(env.sandbox, spec_for(environment_class, env.sandbox)))
        except SandboxFailure as failure:
            mend = "" if isinstance(failure, Unavailable) else "; raise the limit that is too low"
            raise ConfigError(
                f"env={env.name} wants a sandbox and env.sandbox.backend={env.sandbox.backend} has none here: {failure}{mend}"
            ) from None
        for lack in capabilities.degraded:
            print(f"warning: env={env.name}: env.sandbox.backend={env.sandbox.backend}: {lack}")


def check_limits(config: SandboxConfig) -> None:
    """Raises ConfigError for a value out of range and for what contradicts."""
    if config.backend not in BACKENDS:
        raise ConfigError(f"env.sandbox.backend={config.backend} is not one of {', '.join(BACKENDS)}")
    for name in POSITIVE:
        value, least = getattr(config, name), LEAST.get(name, 0)
        if not math.isfinite(value) or value <= 0 or value < least:
            raise ConfigError(f"env.sandbox.{name}={value} must be {f'at least {least}' if least else 'positive'}")
    if config.backend == "subprocess" and not config.unsafe:
        raise ConfigError(
            "env.sandbox.backend=subprocess runs what the model writes with this user's rights; choose bwrap, or say env.sandbox.unsafe=true if you mean it"
        )
    if config.unsafe and config.backend != "subprocess":
        raise ConfigError(f"env.sandbox.unsafe=true has no effect with env.sandbox.backend={config.backend}; leave it out")
    for path in config.read_only:
        if not path.startswith("/"):
            raise ConfigError(f"env.sandbox.read_only: {path} is not an absolute path")
    if bool(config.image) != (config.backend in ENGINES):
        raise ConfigError(
            f"env.sandbox.backend={config.backend} needs env.sandbox.image, for instance python:3.12-slim"
            if not config.image
            else f"env.sandbox.image has no effect with env.sandbox.backend={config.backend}"
        )


async def _try_out(config: SandboxConfig, spec: SandboxSpec) -> Capabilities:
    sandboxes = Sandboxes(config.backend)
    capabilities = await sandboxes.start()
    sandbox = await sandboxes.create(spec)
    try:
        result = await sandbox.exec(["/bin/sh", "-c", "exit 0"], timeout_s=30.0)
    finally:
        await sandbox.close()
    if result.rc:
        raise SandboxFailure(f"under these limits not even a shell starts ({result.text.strip()[-200:]})")
    return capabilities


def probe() -> list[tuple[str, str, str]]:
    """(level, what it enforces here or why it cannot be had, the mend or "") for the levels of this machine itself."""
    found: list[tuple[str, str, str]] = []
    for name in ("bwrap", "landlock"):
        sandboxes = Sandboxes(name, key=f"probe {id(found)}")
        try:
            capabilities: Any = asyncio.run(_probe(sandboxes))
        except Unavailable as failure:
            found.append((name, failure.problem, failure.mend))
            continue
        lacks = f"; lacks: {'; '.join(capabilities.degraded)}" if capabilities.degraded else ""
        found.append((name, f"works, memory by {capabilities.memory}{lacks}", ""))
    return found


async def _probe(sandboxes: Sandboxes) -> Capabilities:
    try:
        return await sandboxes.start()
    finally:
        await sandboxes.end()
