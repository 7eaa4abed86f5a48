"""What the loop does, turned into metrics, the live screen and log lines. Observes; never decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sao.config import Config
from sao.evals.heldout import EvalResult
from sao.inference.protocol import EngineSnapshot, PublishReport
from sao.loop import StepRow, TrainingLoop, total_batches
from sao.report.live import make_progress
from sao.report.metrics import MetricsWriter
from sao.rollout.episodes import EpisodeFailure
from sao.runtime.run_folder import RunFolder
from sao.trajectory import TrajectoryMeta

IDLE_WINDOW_S = 10.0
REWARD_S = "env/reward_s"  # what an environment that asks a reward function says of the seconds it took


class RunObserver:
    """One per run, in the driver's event loop."""

    def __init__(self, folder: RunFolder, config: Config, started: float) -> None:
        self.folder = folder
        self.config = config
        self.started = started
        model = config.model.path or config.model.factory.rsplit(":", 1)[0].rsplit(".", 1)[-1]
        self.progress = make_progress(
            config.run.progress,
            total_batches(config),
            run=folder.path.name,
            model=model,
            environment="+".join(config.data.mixture) or config.env.name,
            folder=str(folder.path),
        )
        self.metrics = MetricsWriter(folder.path, config.logger, asdict(config))
        self.log = _file_log(folder.path)
        self.loop: TrainingLoop | None = None
        self._engine_history: list[tuple[float, Sequence[EngineSnapshot]]] = []
        self._first_update: float | None = None
        self._publications = 0
        self._missed = 0

    def attach(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.progress.update(staleness_bound=self.config.rollout.staleness)

    # ------------------------------------------------------------------ called by the loop

    def phase(self, text: str) -> None:
        self.log.info("phase: %s", text)
        self.progress.phase(text)

    def step(self, row: StepRow) -> None:
        metas = [item.meta for item in row.batch]
        values = dict(row.report.metrics) | batch_metrics(metas, row.version_before, per_environment=bool(self.config.data.mixture))
        values |= {
            "timing_s/wait_for_batch": row.wait_s,
            "timing_s/learn": row.learn_s,
            "timing_s/publish": row.publish_s,
            "timing_s/held_by_eval": row.held_s,
            "timing_s/step": row.seconds,
            "perf/learner_idle_share": row.wait_s / row.seconds if row.seconds > 0 else 0.0,
            "perf/trained_tokens_per_s": sum(meta.action_tokens for meta in metas) / max(row.seconds, 1e-9),
            "train/version": float(row.report.version),
        }
        assert self.loop is not None
        values |= self.loop.ledger.metrics()
        values |= self.loop.source.metrics()
        self.metrics.log("train", row.step, values)
        self.progress.update(
            step=row.step + 1,
            version=row.report.version,
            reward=values["reward/mean"],
            staleness_mean=values["off_policy/staleness_mean"],
            staleness_max=self.loop.max_staleness,
            learner_idle=values["perf/learner_idle_share"],
            response_length=values["response_length/mean"],
            entropy=values.get("actor/entropy"),
            dropped=dict(self.loop.ledger.dropped),
        )

    def publication(self, version: int, reports: Sequence[PublishReport], seconds: float) -> None:
        self._publications += 1
        if not reports:  # every engine was being replaced; the one that joined was given these weights then
            return
        slowest = max(reports, key=lambda report: report.pause_s + report.transfer_s + report.resume_s)
        values = {
            "publish/seconds": seconds,
            "publish/pause_s": slowest.pause_s,
            "publish/transfer_s": slowest.transfer_s,
            "publish/resume_s": slowest.resume_s,
            "publish/stall_s": slowest.pause_s + slowest.transfer_s + slowest.resume_s,
            "publish/canary_gap": max(report.canary_gap for report in reports),
            "publish/in_flight": float(sum(report.in_flight for report in reports)),
            "publish/engines": float(len(reports)),
        }
        if self._first_update is None:
            self._first_update = time.monotonic() - self.started
            values["perf/first_update_s"] = self._first_update
            self.log.info("first actor update acknowledged %.1f s after the command started", self._first_update)
        self.metrics.log("publish", version, values)
        self.progress.update(publications=self._publications, canary_gap=values["publish/canary_gap"])

    def event(self, text: str) -> None:
        """A fault and its mending, or a checkpoint that failed."""
        self.log.warning(text)
        self.progress.log(text)

    def failure(self, failure: EpisodeFailure, retried: bool) -> None:
        what = "retried" if retried else "dropped"
        self.log.warning("episode %s failed (%s), %s: %s", failure.episode_id, failure.reason, what, failure.message)
        self.progress.log(f"episode {failure.episode_id} failed ({failure.reason}), {what}: {failure.message[:160]}")

    def engines(self, snapshots: Sequence[EngineSnapshot]) -> None:
        """Called about once a second with one snapshot per engine."""
        now = time.monotonic()
        self._engine_history.append((now, snapshots))
        while len(self._engine_history) > 2 and now - self._engine_history[1][0] > IDLE_WINDOW_S:
            self._engine_history.pop(0)
        _, earlier = self._engine_history[0]
        values = engine_metrics(earlier, snapshots)
        self.metrics.log("engine", round(now - self.started, 2), values)
        changes: dict[str, float | int | None] = {"tokens_per_s": values.get("engine/tokens_per_s"), "engine_idle": values.get("engine/idle_share")}
        if self.loop is not None:
            changes |= {"in_flight": self.loop.ledger.count("running"), "buffered": self.loop.ledger.count("buffered")}
        self.progress.update(**changes)

    # ------------------------------------------------------------------ called by the command

    def evaluation(self, result: EvalResult) -> None:
        """A held-out result: a line of eval.jsonl, `eval/<name>_t<temperature>/...` over versions, the log and the screen."""
        record = result.record()
        self.folder.append_json("eval.jsonl", record)
        name = f"{result.eval}_t{result.temperature:g}"
        values = {f"eval/{name}/{key}": float(record[key]) for key in ("mean", "low", "high", "n", "truncated", "failed", "seconds")}
        if result.k > 1:
            values |= {f"eval/{name}/pass_at_{k}": value for k, value in result.pass_at().items()}
        self.metrics.log("eval", result.version, values)
        text = (
            f"held-out {result.eval}, version {result.version}, temperature {result.temperature:g}: "
            f"{result.mean:.3f} [{result.low:.3f}, {result.high:.3f}] {result.coverage}"
        )
        self.log.info(text)
        self.progress.log(text)
        if result.temperature > 0:
            self.progress.update(**{f"accuracy_{result.eval}": result.mean} if result.eval in ("before", "after") else {})

    def evaluation_missed(self, name: str, version: int, why: str) -> None:
        self._missed += 1
        self.metrics.log("eval", version, {"eval/missed": float(self._missed)})
        self.log.warning("evaluation %s of version %d is missing: %s", name, version, why)
        self.progress.log(f"evaluation {name} of version {version} is missing: {why}")

    def close(self) -> None:
        self.metrics.close()
        self.progress.close()
        for handler in list(self.log.handlers):
            handler.close()
            self.log.removeHandler(handler)


def batch_metrics(metas: Sequence[TrajectoryMeta], version: int, *, per_environment: bool = False) -> dict[str, float]:
    """Per-trajectory means of one batch: each rollout counts once, however many segments it has."""
    rewards = np.array([meta.reward for meta in metas])
    lengths = np.array([meta.action_tokens for meta in metas])
    staleness = np.array([version - meta.oldest_version for meta in metas])
    spans = np.array([meta.newest_version - meta.oldest_version for meta in metas])
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/min": lengths.min(),
        "rollout/turns_mean": np.mean([meta.turns for meta in metas]),
        "rollout/segments_mean": np.mean([meta.segments for meta in metas]),
        "rollout/total_tokens_mean": np.mean([meta.total_tokens for meta in metas]),
        "rollout/truncated_frac": np.mean([meta.finish.kind == "truncated" for meta in metas]),
        "off_policy/staleness_mean": staleness.mean(),
        "off_policy/staleness_max": staleness.max(),
        "off_policy/staleness_min": staleness.min(),
        "off_policy/version_span_mean": spans.mean(),
        "timing_s/episode_mean": np.mean([meta.seconds for meta in metas]),
        "timing_s/episode_max": np.max([meta.seconds for meta in metas]),
        "timing_s/episode_generate_mean": np.mean([meta.generate_s for meta in metas]),
        "timing_s/episode_queue_mean": np.mean([meta.queue_s for meta in metas]),
    }
    reward_s = np.mean([meta.metrics.get(REWARD_S, 0.0) for meta in metas])
    values["timing_s/episode_reward_mean"] = reward_s
    values["timing_s/episode_environment_mean"] = np.mean([meta.environment_s for meta in metas]) - reward_s
    for name in sorted({key for meta in metas for key in meta.metrics}):
        if name.startswith("env/"):
            values[name] = np.mean([meta.metrics[name] for meta in metas if name in meta.metrics])
        else:
            values[f"rollout/{name}"] = np.mean([meta.metrics.get(name, 0.0) for meta in metas])
    if per_environment:
        names = {meta.environment for meta in metas}
        values |= {f"reward/mean/{name}": np.mean([meta.reward for meta in metas if meta.environment == name]) for name in names}
    for reason in {str(meta.finish) for meta in metas}:
        values[f"rollout/finish/{reason.replace(': ', '_')}"] = np.mean([str(meta.finish) == reason for meta in metas])
    return {name: float(value) for name, value in values.items()}


def engine_metrics(earlier: Sequence[EngineSnapshot], now: Sequence[EngineSnapshot]) -> dict[str, float]:
    """Rates between two moments, summed over engines; the clocks are each engine's own."""
    values = {
        "engine/running": float(sum(s.running for s in now)),
        "engine/waiting": float(sum(s.waiting for s in now)),
        "engine/kv_use_max": max((s.kv_use for s in now), default=0.0),
        "engine/generated_tokens": float(sum(s.generated_tokens for s in now)),
        "engine/prompt_tokens": float(sum(s.prompt_tokens for s in now)),
        "engine/reprefill_tokens": float(sum(s.reprefill_tokens for s in now)),
        "engine/aborted_requests": float(sum(s.aborted_requests for s in now)),
        "engine/publish_stall_s": sum(s.publish_stall_s for s in now),
        "engine/version_min": float(min((s.version for s in now), default=0)),
    }
    queries = sum(s.prefix_queries for s in now)
    if queries:
        values["engine/prefix_hit_rate"] = sum(s.prefix_hits for s in now) / queries
    before: Mapping[str, EngineSnapshot] = {s.engine: s for s in earlier}
    pairs = [(before[s.engine], s) for s in now if s.engine in before and s.at > before[s.engine].at and _same_life(before[s.engine], s)]
    if pairs:
        values["engine/tokens_per_s"] = sum((b.generated_tokens - a.generated_tokens) / (b.at - a.at) for a, b in pairs)
        values["engine/idle_share"] = float(np.mean([max(0.0, 1.0 - (b.busy_s - a.busy_s) / (b.at - a.at)) for a, b in pairs]))
    return values


def _same_life(earlier: EngineSnapshot, later: EngineSnapshot) -> bool:
    """Whether two snapshots are of one process: a replacement bears the name of the engine before it and counts from zero."""
    return abs((earlier.at - earlier.uptime_s) - (later.at - later.uptime_s)) < 1.0


def _file_log(run_dir: Path) -> logging.Logger:
    """The driver's own log, logs/driver.log."""
    path = run_dir / "logs" / "driver.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger(f"sao.run.{run_dir.name}")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
