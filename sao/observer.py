"""What the loop does, turned into metrics, the live screen and log lines. Observes; never decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sao.config import Config
from sao.evals.heldout import EvalResult
from sao.inference.protocol import EngineSnapshot, PublishReport
from sao.loop import TrainingLoop, total_batches
from sao.loop_seams import StepRow
from sao.report.dropped import DroppedWriter
from sao.report.live import make_progress
from sao.report.metrics import MetricsWriter, read_metrics, surviving
from sao.report.trust import EXPLAINED, LOSS, WINDOW, Verdict, judge
from sao.rollout.episodes import EpisodeFailure, Loss
from sao.runtime.run_folder import RunFolder
from sao.trajectory import Trajectory, TrajectoryMeta

IDLE_WINDOW_S = 10.0
BLOCKED = "rollout/blocked_s/"  # and an environment's name
REWARD_S = "env/reward_s"  # what an environment that asks a reward function says of the seconds it took


class RunObserver:
    """One per run, in the driver's event loop."""

    def __init__(self, folder: RunFolder, config: Config, started: float, fetch: Callable[[Any], Trajectory | None] = lambda handle: None) -> None:
        """fetch: the trajectory behind a handle of the loop's, for the record of what was dropped."""
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
        self.dropped = DroppedWriter(folder.path, sitting=folder.incarnation, keep_tokens=config.logger.trajectories == "all", fetch=fetch)
        self.log = _file_log(folder.path)
        self.loop: TrainingLoop | None = None
        self._engine_history: list[tuple[float, Sequence[EngineSnapshot]]] = []
        self._first_update: float | None = None
        self._publications = 0
        self._missed = 0
        # By step, so that a run which goes back to a checkpoint judges its critic by the steps that count.
        earlier = surviving(read_metrics(folder.path), "train")
        self._explained: dict[int, float | None] = {int(r["step"]): r.get(EXPLAINED) for r in earlier}
        self._warned = self._praised = False
        self._blocking: set[str] = set()

    def attach(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.progress.update(staleness_bound=self.config.rollout.staleness)

    # ------------------------------------------------------------------ called by the loop

    def phase(self, text: str) -> None:
        self.log.info("phase: %s", text)
        self.progress.phase(text)

    def step(self, row: StepRow) -> None:
        metas = [item.meta for item in row.batch]
        values = dict(row.report.metrics) | row.metrics | batch_metrics(metas, row.version_before, per_environment=bool(self.config.data.mixture))
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
        critic = self._judge_critic(row)
        if critic is not None:
            values["critic/trusted"] = float(critic.trusted)
        self._name_blocking(row.step, values)
        self.dropped.flush()
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
            critic=critic,
            dropped=dict(self.loop.ledger.dropped),
            refused=int(row.metrics.get("online/refused", 0)),
            rolled_back=int(row.metrics.get("online/rolled_back", 0)),
        )

    def _judge_critic(self, row: StepRow) -> Verdict | None:
        """Whether the critic is a guide yet; None where the algorithm has none. Said once when the actor moves without, and once when it is one."""
        if LOSS not in row.report.metrics:
            return None
        self._explained[row.step] = row.report.metrics.get(EXPLAINED)
        steps = range(max(0, row.step - WINDOW + 1), row.step + 1)
        verdict = judge([self._explained[step] for step in steps if step in self._explained], self.config.critic.trust_above)
        if not verdict.trusted and not self._warned and row.report.version > row.version_before:
            self._warned = True
            self.event(f"from step {row.step} on the actor trains, but {verdict.text}")
        if verdict.trusted and self._warned and not self._praised:
            self._praised = True
            self.log.info("step %d: %s", row.step, verdict.text)
            self.progress.log(f"step {row.step}: {verdict.text}")
        return verdict

    def _name_blocking(self, step: int, values: Mapping[str, float]) -> None:
        """Say, once for each, which environment keeps the event loop from the other episodes of its worker."""
        for key, seconds in values.items():
            name = key.removeprefix(BLOCKED)
            if name != key and name not in self._blocking:
                self._blocking.add(name)
                self.event(
                    f"step {step}: environment {name} held its worker's event loop, {seconds:.1f} s per trajectory; logs/worker-*.log has the method and the line"
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

    def lost(self, loss: Loss) -> None:
        self.dropped.add(loss)

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
        values |= {f"eval/{name}/mean/{workload}": mean for workload, mean in result.by_workload().items()}
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

    def shadow(self, result: EvalResult, against: float, passed: bool) -> None:
        """A held-out result of weights that do not serve yet: metrics `eval/shadow/...`, and a line when they are refused."""
        values = {"eval/shadow/mean": result.mean, "eval/shadow/n": float(result.n), "eval/shadow/failed": float(result.failed)}
        values |= {"eval/shadow/passed": float(passed), "eval/shadow/against": against, "eval/shadow/seconds": result.seconds}
        self.metrics.log("eval", result.version, values)
        if not passed:
            self.event(
                f"shadow evaluation: version {result.version} has {result.mean:.3f} {result.coverage}, the weights that serve {against:.3f}; refused"
            )

    def evaluation_missed(self, name: str, version: int, why: str) -> None:
        self._missed += 1
        self.metrics.log("eval", version, {"eval/missed": float(self._missed)})
        self.log.warning("evaluation %s of version %d is missing: %s", name, version, why)
        self.progress.log(f"evaluation {name} of version {version} is missing: {why}")

    def settle(self) -> None:
        """Bring to the disk what still lies in the actors; before they end."""
        self.dropped.wait()
        if self.dropped.tokens_missed:
            self.log.warning("the tokens of %d dropped trajectories could not be kept", self.dropped.tokens_missed)

    def close(self) -> None:
        self.dropped.close()
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
