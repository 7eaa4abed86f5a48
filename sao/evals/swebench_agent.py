"""Our agent writes predictions: env=swe under the engines and workers of `sao eval`, one weight version, a patch a task.

It keeps mini-swe-agent's contract (one bash action a turn, a stateless shell, the submit sentinel) and its trajectory schema. A task is done when its line
is in predictions.jsonl; a second start goes on with the others. An episode that ends without handing in is an empty prediction, as it is there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sao.config import Config
from sao.config_load import check
from sao.environment import Task
from sao.errors import ConfigError, EnvironmentFailure, SystemFailure, UserError
from sao.evals.job import checked, for_evaluation, run_job, subject_of, temperature_of
from sao.report.jsonl import open_for_append, read_jsonl, write_record
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner
from sao.runtime.remote import fetch
from sao.runtime.run_folder import write_atomically
from sao.swe.predictions import Prediction
from sao.tasks.procedural import HELD_OUT, task_seed
from sao.trajectory import Trajectory

if TYPE_CHECKING:
    from sao.evals.swebench import SweJob

LONGEST_PATCH = 1 << 22  # characters; the loop must not cut the message a patch comes back in
SCHEMA = "mini-swe-agent-1.1"


def write_predictions(own: Mapping[str, str], overrides: Sequence[str], job: SweJob) -> Path:
    """Bring predictions.jsonl of the job's folder to one line a task; returns it. Raises UserError before anything starts, SystemFailure when some are missing."""
    chosen = {key: own[key] for key in ("run", "model", "checkpoint") if key in own}
    subject = subject_of({**chosen, "env": "swe"}, overrides)
    config = for_evaluation(_handing_in(subject.config, own["repo"], job.backend))
    check(config, training=False)
    tasks = [
        Task(f"swe/{HELD_OUT}/{name}", config.env.name, {"instance_id": name}, task_seed(config.seed, HELD_OUT, index))
        for index, name in enumerate(job.tasks)
    ]
    evaluation = checked(subject, config, tasks, 1, temperature_of(dict(own), 0.0))
    path = job.folder / "predictions.jsonl"
    _same_agent(job.folder / "agent.json", {**subject.about, "temperature": evaluation.temperature, "env": dict(config.env.args)})
    done = {row["instance_id"] for row in read_jsonl(path)}
    left = [task for task in tasks if task.payload["instance_id"] not in done]
    print(f"{subject.name}: {len(done & set(job.tasks))} of {len(tasks)} predictions are there, {len(left)} to be written", flush=True)
    if not left or config.run.dry_run:
        return path
    with open_for_append(path) as file:
        try:
            asyncio.run(run_job(replace(evaluation, tasks=left), job.folder, lambda workers: Handing(workers, file, job.folder, subject.name)))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        except EnvironmentFailure as failure:
            raise SystemFailure(f"no prediction could be written: {failure}") from None
    missing = {task.payload["instance_id"] for task in left} - {row["instance_id"] for row in read_jsonl(path)}
    if missing:
        raise SystemFailure(f"{len(missing)} of {len(left)} episodes failed, {min(missing)} for one; the same command tries them again")
    return path


def _handing_in(config: Config, repo: str, backend: str) -> Config:
    """The configuration with tasks of this repository, patches handed back ungraded."""
    args = {**config.env.args, "repo": str(Path(repo).expanduser().resolve()), "graded": False}
    env = replace(config.env, args=args, sandbox=replace(config.env.sandbox, backend=backend))
    return replace(config, env=env, rollout=replace(config.rollout, observation_limit=LONGEST_PATCH))


def _same_agent(path: Path, about: Mapping[str, Any]) -> None:
    """Predictions of one file are of one agent. Raises UserError naming what differs."""
    if path.exists():
        there = json.loads(path.read_text())
        for key in sorted({*there, *about}):
            if there.get(key) != about.get(key):
                raise UserError(f"{path.parent} holds predictions of another agent: {key} is {there.get(key)!r} there; name another folder by out=")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dict(about), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written ({error.strerror}); name another folder by out=") from None


class Handing:
    """The episode runner that writes down what each episode handed in."""

    def __init__(self, runner: EpisodeRunner, file: IO[str], folder: Path, model: str) -> None:
        self.runner, self.file, self.folder, self.model = runner, file, folder / "trajectories", model
        self.folder.mkdir(parents=True, exist_ok=True)

    async def run(self, request: EpisodeRequest) -> Any:
        outcome = await self.runner.run(request)
        if isinstance(outcome, EpisodeFailure):
            return outcome
        trajectory = await asyncio.to_thread(fetch, outcome.handle)
        if trajectory is None:
            return EpisodeFailure(request.episode_id, "worker_lost", "its trajectory was lost with its worker", outcome.meta.sampled_tokens)
        name = str(request.task.payload["instance_id"])
        patch = handed_in(trajectory)
        text = json.dumps(record(trajectory, name, patch), indent=1)
        await asyncio.to_thread((self.folder / f"{name}.traj.json").write_text, text)
        write_record(self.file, vars(Prediction(name, self.model, patch)))
        return outcome


def handed_in(trajectory: Trajectory) -> str:
    """The patch: the environment's last message where the episode ended by itself, else nothing."""
    return str(trajectory.info["messages"][-1]["content"]) if trajectory.finish.kind == "terminal" else ""


def record(trajectory: Trajectory, name: str, patch: str) -> dict[str, Any]:
    """An episode in mini-swe-agent's trajectory schema; tokens in place of a price."""
    status = "Submitted" if trajectory.finish.kind == "terminal" else "LimitsExceeded"
    return {
        "info": {
            "model_stats": {"instance_cost": 0.0, "api_calls": int(trajectory.metrics["turns"]), "sampled_tokens": trajectory.sampled_tokens},
            "exit_status": status,
            "submission": patch,
        },
        "messages": trajectory.info["messages"],
        "trajectory_format": SCHEMA,
        "instance_id": name,
    }
