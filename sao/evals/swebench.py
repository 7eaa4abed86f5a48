"""`sao eval swebench`: patches, from a file or written by a model, graded; a verdict with its reason for each task.

    sao eval swebench repo=DIR predictions=FILE        a task repository that can be built offline, in the sandbox
    sao eval swebench repo=DIR model=DIR | run=FOLDER  our agent writes the predictions first (sao/evals/swebench_agent.py)
    sao eval swebench dataset=ID|FILE predictions=FILE the official harness, where Docker is (sao/evals/swebench_official.py)

The folder of a job holds predictions.jsonl in the official form, verdicts.jsonl (one line as soon as it is known, which is what a second start
goes on from), a log for each task, and report.json.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.errors import ConfigError, SandboxFailure, SystemFailure, UserError
from sao.evals.estimators import wilson_interval
from sao.report.jsonl import open_for_append, read_jsonl, write_record
from sao.runtime import saved, sweeper
from sao.runtime.run_folder import write_atomically
from sao.sandbox.client import Sandboxes
from sao.swe.grading import VERDICTS, Verdict, grade
from sao.swe.predictions import Prediction, Predictions, read_predictions
from sao.swe.repo import HELD_OUT, SweTask, read_repo
from sao.swe.workspace import Create

ARGUMENTS = ("predictions", "repo", "dataset", "split", "ids", "tasks", "model", "run", "checkpoint", "temperature", "parallel", "out", "backend")
SAY_EVERY_S = 5.0
ATTEMPTS = 2  # at grading one patch, when the sandbox fails and not the patch
SHOWN = 10


@dataclass(frozen=True)
class SweJob:
    """A job that was checked. tasks: by id, in order. predictions: None while an agent still has to write them."""

    tasks: Mapping[str, SweTask]
    predictions: Predictions | None
    name: str
    folder: Path
    parallel: int
    backend: str


def swebench_command(arguments: Sequence[str]) -> int:
    """Check, let the agent work if one was named, grade what is not graded yet, print, write. Returns the exit code.

    Raises UserError before anything starts, SystemFailure when some task could not be graded: the same command goes on.
    """
    own, overrides = saved.own_arguments(arguments, ARGUMENTS, verb="eval swebench", others=True)
    if "dataset" in own:
        from sao.evals.swebench_official import official_command

        return official_command(own, overrides)
    job = make_job(own, overrides)
    sweeper.start()
    if job.predictions is None:
        from sao.evals.swebench_agent import write_predictions

        file = write_predictions(own, overrides, job)
        job = SweJob(job.tasks, read_predictions(file, job.tasks), job.name, job.folder, job.parallel, job.backend)
    assert job.predictions is not None
    for line in job.predictions.bad[:SHOWN]:
        print(f"line {line.line} of the predictions is not evaluated ({line.kind}): {line.text}")
    print(f"grading {len(job.predictions.good)} predictions of {len(job.tasks)} tasks, {job.parallel} at once, into {job.folder}", flush=True)
    with VerdictFile(job.folder) as verdicts:
        try:
            missing = asyncio.run(_grade_all(job, verdicts))
        except KeyboardInterrupt:
            print(f"\n{len(verdicts.of(job.predictions))} verdicts are kept; the same command goes on from them", flush=True)
            raise
        record = report(job, verdicts.of(job.predictions))
    print(summary(record))
    try:
        write_atomically(job.folder / "report.json", json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise SystemFailure(f"{job.folder}/report.json cannot be written ({error.strerror}); make room and give the same command again") from None
    print(f"written: {job.folder / 'report.json'}")
    if missing:
        name, failure = next(iter(missing.items()))
        raise SystemFailure(f"{len(missing)} tasks could not be graded, {name} for one ({failure}); the same command tries them again")
    return 0


def make_job(own: Mapping[str, str], overrides: Sequence[str]) -> SweJob:
    """Everything the grading needs; nothing is started or written. Raises UserError."""
    sources = [key for key in ("predictions", "model", "run") if key in own]
    if "repo" not in own or len(sources) != 1:
        raise ConfigError(
            "sao eval swebench needs repo=DIR (or dataset=ID) and one of predictions=FILE, model=DIRECTORY and run=FOLDER; sao env make swe makes a repository"
        )
    if overrides and sources == ["predictions"]:
        raise ConfigError(f"{overrides[0]} has no effect with predictions=, which no model writes; leave it out")
    parallel = whole(own, "parallel", 8)
    tasks = chosen(read_repo(Path(own["repo"]).expanduser()), own)
    predictions = read_predictions(Path(own["predictions"]).expanduser(), tasks) if sources == ["predictions"] else None
    subject = Path(own[sources[0]]).expanduser()
    name = re.sub(r"[^\w.+-]", "_", f"{Path(own['repo']).resolve().name}-{subject.stem if predictions else subject.resolve().name}")
    folder = Path(own["out"]).expanduser() if "out" in own else Path("runs") / f"swebench-{name}"
    return SweJob(tasks, predictions, name, folder.resolve(), parallel, own.get("backend", "bwrap"))


def chosen(tasks: Mapping[str, SweTask], own: Mapping[str, str]) -> dict[str, SweTask]:
    """The tasks of `ids=a,b`, `split=` and `tasks=N`; all by default, and the held-out split where an agent works. Raises ConfigError for what is not there."""
    split = own.get("split", "" if "predictions" in own else HELD_OUT)
    found = {name: task for name, task in tasks.items() if split in ("", "all", task.split)}
    if "ids" in own:
        names = own["ids"].split(",")
        if unknown := [name for name in names if name not in tasks]:
            raise ConfigError(f"ids= names {unknown[0]!r}, which is not in repo=; look into its tasks/")
        found = {name: tasks[name] for name in names}
    count = whole(own, "tasks", len(found)) if found else 0
    if not found:
        splits = ", ".join(sorted({task.split for task in tasks.values()}))
        raise ConfigError(f"split={split} has no task; repo= has {splits} (split=all takes every task)")
    return dict(list(found.items())[:count])


def whole(own: Mapping[str, str], key: str, default: int) -> int:
    try:
        value = int(own[key]) if key in own else default
    except ValueError:
        raise ConfigError(f"{key}={own[key]} is not a whole number") from None
    if value < 1:
        raise ConfigError(f"{key}={value} must be at least 1")
    return value


class VerdictFile:
    """verdicts.jsonl, locked while it is open. A verdict belongs to a task and to the bytes of a patch: another patch is graded anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "verdicts.jsonl"
        self.found: dict[tuple[str, str], Verdict] = {}

    def __enter__(self) -> VerdictFile:
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            self.file = open_for_append(self.path)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written ({error.strerror}); name another folder by out=") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise UserError(f"{self.folder} is being written by another evaluation; wait for it, or name another folder by out=") from None
        for row in read_jsonl(self.path):
            key = row["instance_id"], row.pop("patch")
            fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
            self.found[key] = Verdict(**fields)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def get(self, prediction: Prediction) -> Verdict | None:
        return self.found.get((prediction.instance_id, digest(prediction)))

    def of(self, predictions: Predictions) -> dict[str, Verdict]:
        """The verdicts there are on these predictions, by task."""
        known = ((prediction.instance_id, self.get(prediction)) for prediction in predictions.good)
        return {name: verdict for name, verdict in known if verdict is not None}

    def add(self, prediction: Prediction, verdict: Verdict) -> None:
        """Raises SystemFailure when the disk takes no more."""
        try:
            (self.folder / "logs" / f"{prediction.instance_id}.log").write_text(verdict.log, errors="replace")
            write_record(self.file, {**verdict.record(), "patch": digest(prediction)})
        except OSError as error:
            raise SystemFailure(f"{self.path} cannot be written ({error.strerror}); make room, the same command goes on") from None
        self.found[prediction.instance_id, digest(prediction)] = verdict


def digest(prediction: Prediction) -> str:
    return hashlib.sha256(prediction.model_patch.encode("utf-8", "surrogatepass")).hexdigest()[:16]


async def _grade_all(job: SweJob, verdicts: VerdictFile) -> dict[str, str]:
    """Grade what has no verdict; returns what could not be graded, and why."""
    assert job.predictions is not None
    waiting = [prediction for prediction in job.predictions.good if verdicts.get(prediction) is None]
    if len(waiting) < len(job.predictions.good):
        print(f"{len(job.predictions.good) - len(waiting)} verdicts are there already", flush=True)
    if not waiting:
        return {}
    boxes = Sandboxes(job.backend)
    await boxes.start()
    try:
        return await grade_each(job, waiting, boxes.create, verdicts.add, _Progress(len(waiting)))
    finally:
        await boxes.end()


async def grade_each(
    job: SweJob,
    waiting: Sequence[Prediction],
    create: Create,
    add: Callable[[Prediction, Verdict], None],
    said: Callable[[Verdict], None],
) -> dict[str, str]:
    """Grade predictions, `job.parallel` at once; `add` keeps each verdict. Returns the tasks whose sandbox failed, with the failure."""
    gate = asyncio.Semaphore(job.parallel)
    missing: dict[str, str] = {}

    async def one(prediction: Prediction) -> None:
        async with gate:
            for attempt in range(ATTEMPTS):
                try:
                    verdict = await grade(job.tasks[prediction.instance_id], prediction.model_patch, create)
                except SandboxFailure as failure:
                    if attempt + 1 == ATTEMPTS:
                        missing[prediction.instance_id] = str(failure)
                    continue
                add(prediction, verdict)
                said(verdict)
                return

    async with asyncio.TaskGroup() as group:
        for prediction in waiting:
            group.create_task(one(prediction))
    return missing


class _Progress:
    """A line on the screen now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.counts, self.at = total, Counter[str](), time.monotonic()

    def __call__(self, verdict: Verdict) -> None:
        self.counts[verdict.verdict] += 1
        done = sum(self.counts.values())
        if time.monotonic() - self.at >= SAY_EVERY_S or done == self.total:
            self.at = time.monotonic()
            print(f"{done} of {self.total} graded: " + ", ".join(f"{n} {name}" for name, n in self.counts.most_common()), flush=True)


def report(job: SweJob, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """What report.json holds. The resolve rate is over ALL tasks: one without a prediction is not resolved, and one that could not be graded is in no list."""
    assert job.predictions is not None
    predictions = job.predictions
    solved = sum(name in verdicts and verdicts[name].resolved for name in job.tasks)
    low, high = wilson_interval(solved, len(job.tasks))
    by: dict[str, list[str]] = {kind: sorted(name for name, v in verdicts.items() if v.verdict == kind) for kind in VERDICTS}
    packages = sorted({task.package for task in job.tasks.values()})
    answered = {prediction.instance_id for prediction in predictions.good}
    return {
        "name": job.name,
        "resolve_rate": solved / len(job.tasks),
        "low": low,
        "high": high,
        "total_instances": len(job.tasks),
        "prediction_lines": predictions.lines,
        "bad_lines": [vars(line) for line in predictions.bad],
        "submitted_instances": len(predictions.good),
        "ungraded_ids": sorted(answered - set(verdicts)),
        "missing_ids": list(predictions.unanswered),
        **{f"{kind}_instances": len(by[kind]) for kind in VERDICTS},
        **{f"{kind}_ids": by[kind] for kind in VERDICTS},
        "reasons": dict(Counter(f"{v.verdict}: {v.reason}" for v in verdicts.values() if v.reason).most_common()),
        "by_package": {
            package: {
                "tasks": sum(task.package == package for task in job.tasks.values()),
                "resolved": sum(job.tasks[name].package == package for name in by["resolved"]),
            }
            for package in packages
        },
        "tasks": {name: verdict.record() for name, verdict in sorted(verdicts.items())},
    }


def summary(record: Mapping[str, Any]) -> str:
    """The result for the screen."""
    lines = [
        f"resolved     {record['resolved_instances']} of {record['total_instances']} tasks, "
        f"{record['resolve_rate']:.1%} [{record['low']:.1%}, {record['high']:.1%}], 95 % interval over tasks",
        "  ".join(f"{kind} {record[f'{kind}_instances']}" for kind in VERDICTS)
        + f"  ungraded {len(record['ungraded_ids'])}  without a prediction {len(record['missing_ids'])}",
        f"predictions  {record['prediction_lines']} lines = {record['submitted_instances']} evaluated + {len(record['bad_lines'])} bad",
    ]
    lines += [f"  {count:>4} {reason}" for reason, count in record["reasons"].items()]
    lines += [f"  {package:<24} {part['resolved']}/{part['tasks']}" for package, part in record["by_package"].items()]
    return "\n".join(lines)
