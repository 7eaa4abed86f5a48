"""W&B as a mirror of metrics.jsonl, on a thread of its own: the loop never waits for it and never fails because of it."""

from __future__ import annotations

import logging
import netrc
import os
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sao.config import LoggerConfig
from sao.errors import UserError

log = logging.getLogger(__name__)

MODES = ("offline", "online", "disabled")
_DEFAULT_HOST = "api.wandb.ai"
_BACKLOG = 10_000  # records kept while W&B is slow; beyond that they are counted as failures, metrics.jsonl has them all


def check_wandb(mode: str, environ: Mapping[str, str]) -> None:
    """Raise UserError when the mode is unknown, or online and no API key is to be found (WANDB_API_KEY or the netrc of `wandb login`)."""
    if mode not in MODES:
        raise UserError(f"logger.wandb={mode} is not one of {', '.join(MODES)}")
    if mode != "online" or environ.get("WANDB_API_KEY"):
        return
    host = environ.get("WANDB_BASE_URL", _DEFAULT_HOST).split("://")[-1].split("/")[0].split(":")[0]
    try:
        found = netrc.netrc(environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        found = None
    if not found:
        raise UserError("logger.wandb=online needs an API key: set WANDB_API_KEY or run `wandb login`, or use logger.wandb=offline")


class WandbMirror:
    """Queues records for one W&B run whose files lie in <run>/wandb.

    The first failure is logged with its cause, all are counted in `failures`; after a failed start nothing more is tried.
    """

    def __init__(self, run_dir: Path, logger: LoggerConfig, config: Mapping[str, Any], *, close_timeout_s: float = 30.0) -> None:
        self.failures = 0
        self._run_dir = run_dir
        self._logger = logger
        self._config = dict(config)
        self._close_timeout_s = close_timeout_s
        self._run: Any = None
        self._defined: set[str] = set()
        self._queue: queue.Queue[tuple[str, float, dict[str, float]] | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._serve, name="wandb-mirror", daemon=True)
        self._thread.start()

    def log(self, step_metric: str, step: float, values: Mapping[str, float]) -> None:
        """Hand one record over; returns at once."""
        try:
            self._queue.put_nowait((step_metric, step, dict(values)))
        except queue.Full:
            self._failed("its queue is full")

    def close(self) -> None:
        """Send what is queued and finish the W&B run, waiting at most `close_timeout_s`."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            self._failed("its queue is full")
            return
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._failed(f"it did not finish within {self._close_timeout_s:.0f} s")

    def _serve(self) -> None:
        self._guard(self._start)
        while (item := self._queue.get()) is not None:
            if self._run is None:
                self.failures += 1
            else:
                self._guard(partial(self._send, *item))
        if self._run is not None:
            self._guard(lambda: self._run.finish())

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever W&B raises, the run goes on; it is counted and said once
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, cause: str) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("W&B failed (%s); the run goes on, metrics.jsonl is complete", cause)

    def _start(self) -> None:
        if self._logger.wandb == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        wandb.setup(settings)  # what wandb prints before a run exists (its advice on weave, say) obeys these settings only
        self._run = wandb.init(
            mode="online" if self._logger.wandb == "online" else "offline",
            project=self._logger.wandb_project,
            name=self._run_dir.resolve().name,
            dir=str(self._run_dir),
            config=self._config,
            settings=settings,
        )

    def _send(self, step_metric: str, step: float, values: Mapping[str, float]) -> None:
        if step_metric not in self._defined:
            self._run.define_metric(step_metric, hidden=True)
            self._defined.add(step_metric)
        for name in values:
            if name not in self._defined:  # by name, not by glob: a group may appear on two axes
                self._run.define_metric(name, step_metric=step_metric)
                self._defined.add(name)
        self._run.log({**values, step_metric: step})
