"""`sao eval aime`: n samples per problem of a set of maths problems under a named protocol; mean@n, pass@k, maj@k, resumable.

The machinery is that of `sao eval` (`sao.evals.job`): engines and workers of training, one weight version, no learner. What is added: protocols, sets of
problems from outside, samples that survive an interruption (`sao.evals.samples`), and the vote.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sao.config import Config
from sao.config_load import check, environments
from sao.environment import Task
from sao.errors import ConfigError, SystemFailure
from sao.evals import math_sets
from sao.evals.estimators import majority_at_k, normalise_answer, pass_at_k
from sao.evals.heldout import SOLVED, EvalResult, evaluate
from sao.evals.job import Job, checked, for_evaluation, number, result_record, run_job, subject_of, temperature_of
from sao.evals.samples import FILE, Drawing, Sample, Samples
from sao.evals.symbolic import read_answer
from sao.rollout.episodes import EpisodeRunner
from sao.runtime import saved, sweeper
from sao.runtime.models import facts, prepare
from sao.runtime.remote import fetch
from sao.runtime.run_folder import write_atomically
from sao.tasks.procedural import HELD_OUT, ProceduralSource, task_seed
from sao.tasks.target import load_environment

ARGUMENTS = (
    "run",
    "model",
    "checkpoint",
    "preset",
    "n",
    "temperature",
    "data",
    "split",
    "problem_column",
    "answer_column",
    "tasks",
    "tool",
    "k",
    "out",
)
SYNTHETIC = "synthetic"
SYNTHETIC_TASKS = 30  # as many as a year's AIME I and II have
PROMPT_ROOM = 4096  # tokens for the problem, beside a protocol's tokens for the answer
LONG_S = 7200.0  # a sample of tens of thousands of tokens takes its time
SHOWN = 60  # problems on the screen; the file has all of them


class Preset(NamedTuple):
    """How a paper sampled: the distribution, samples per problem, and tokens of an answer."""

    temperature: float
    top_p: float
    top_k: int
    n: int
    tokens: int
    source: str


PRESETS = {
    "sao": Preset(1.0, 1.0, 0, 16, 131072, "SAO, arXiv 2607.07508: temperature 1, mean of 16 runs"),
    "deepseek-r1": Preset(0.6, 0.95, 0, 64, 32768, "DeepSeek-R1, arXiv 2501.12948, section 3: 64 samples, at most 32,768 tokens"),
    "qwen3": Preset(0.6, 0.95, 20, 64, 38912, "Qwen3, arXiv 2505.09388, section 4.6: 64 samples, 38,912 tokens for AIME"),
}


@dataclass(frozen=True)
class AimeJob:
    """An evaluation that was checked and can start. `folder` will hold its samples and logs, `folder`.json its result."""

    job: Job
    preset: str
    set: str
    tool: str
    ks: tuple[int, ...]
    folder: Path
    identity: Mapping[str, Any]

    @property
    def result_path(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")


def aime_command(arguments: Sequence[str]) -> int:
    """Check everything, draw what samples are missing, print, write the result. Returns the exit code.

    Raises UserError before anything starts, SystemFailure when the evaluation breaks: the same command goes on from the samples it left.
    """
    sweeper.start()
    asked = make_aime_job(arguments)
    job = asked.job
    print("\n".join(describe(asked)), flush=True)
    if job.config.run.dry_run:
        return 0
    with Samples(asked.folder, asked.identity) as samples:
        total = len(job.tasks) * job.samples
        if samples.found:
            print(f"{len(samples.found)} of {total} samples are there already", flush=True)
        result = _interruptible(asked, samples, total)
        record = aime_record(asked, result, samples.found)
    print(aime_summary(record))
    try:
        write_atomically(asked.result_path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise SystemFailure(f"{asked.result_path} cannot be written ({error.strerror}), the result is on the screen only; make room first") from None
    print(f"written: {asked.result_path}")
    if result.failed:
        raise SystemFailure(f"{result.failed} of {total} samples failed and are in no figure; the same command draws them again")
    return 0


def _interruptible(asked: AimeJob, samples: Samples, total: int) -> EvalResult:
    try:
        return asyncio.run(_draw(asked, samples, total))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    except KeyboardInterrupt:
        print(f"\n{len(samples.found)} of {total} samples are kept; the same command goes on from them", flush=True)
        raise


async def _draw(asked: AimeJob, samples: Samples, total: int) -> EvalResult:
    job = asked.job

    def drawing(workers: EpisodeRunner) -> Drawing:
        return Drawing(workers, samples, per_task=job.samples, seed=job.config.seed, read=read_answer, fetch=fetch)

    if len(samples.found) < total:
        return await run_job(job, asked.folder, drawing)
    nobody: Any = None  # every sample is there: no engine need be started to count them
    return await evaluate(
        drawing(nobody),
        job.tasks,
        name=job.name,
        version=0,
        temperature=job.temperature,
        concurrency=64,
        seed=job.config.seed,
        samples_per_task=job.samples,
    )


def make_aime_job(arguments: Sequence[str]) -> AimeJob:
    """Everything the job needs, or the UserError that says what is wrong; nothing is started or written."""
    own, overrides = saved.own_arguments(arguments, ARGUMENTS, verb="eval aime", others=True)
    for text in overrides:
        if text.lstrip("+~").split("=")[0] in ("env", "data.path", "data.eval_path"):
            raise ConfigError(f"{text}: sao eval aime brings its own environment and problems; name a set by data=, and leave this out")
    name = own.get("preset", "sao")
    if name not in PRESETS:
        raise ConfigError(f"preset={name} is unknown; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    tool = own.get("tool", "")
    if tool not in ("", "none", "python"):
        raise ConfigError(f"tool={tool} is unknown; tool=python runs code in the sandbox, without it there is no tool")
    tool = tool if tool != "none" else ""
    temperature = temperature_of(own, preset.temperature)
    n = number(own, "n", int, preset.n if temperature > 0 else 1)
    count = number(own, "tasks", int, 0)
    if n < 1 or count < 0:
        raise ConfigError(f"{'n=' + str(n) if n < 1 else 'tasks=' + str(count)} must be at least 1")
    ks = _ks(own.get("k", ""), n)
    problems = _problems(own)
    env = "math_python" if tool else "math"
    subject = subject_of({**own, "env": env}, [*_protocol(preset, overrides), *overrides])
    config = for_evaluation(replace(subject.config, data=replace(subject.config.data, path="", eval_path="", mixture={}, pool=0)))
    path = subject.model_path or prepare(config)
    config = _with_room(config, preset, facts(path).context, overrides)
    check(config, training=False)
    tasks = _tasks(config, problems, count)
    job = checked(subject._replace(model_path=path), config, tasks, n, temperature)
    chosen = Path(own["data"]).name if "data" in own else SYNTHETIC
    title = re.sub(r"[^\w.+-]", "_", "-".join(filter(None, ["aime", subject.name, chosen, name, tool])))
    parent = (subject.folder if "run" in own else Path("runs").resolve() / f"aime-{subject.name}") / "evals"
    folder = Path(own["out"]).expanduser().resolve() if "out" in own else _resumable(parent, title)
    if not (folder / FILE).exists() and folder.with_name(f"{folder.name}.json").exists():
        raise ConfigError(f"out={own['out']}: {folder.name}.json is there already, without the samples it came from; name another folder")
    return AimeJob(job, name, chosen, tool, ks, folder, _identity(job, chosen))


def _ks(text: str, n: int) -> tuple[int, ...]:
    """The k of pass@k and maj@k: 1, 2, 4, ... and n, or those asked for."""
    if not text:
        return tuple(sorted({*(2**i for i in range(n.bit_length())), n}))
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"k={text} is not whole numbers joined by commas, for instance k=1,8")
    ks = tuple(sorted(set(map(int, text.split(",")))))
    if ks[0] < 1 or ks[-1] > n:
        raise ConfigError(f"k={text}: pass@{ks[-1] if ks[-1] > n else ks[0]} cannot be estimated from n={n} samples; k must lie between 1 and n")
    return ks


def _problems(own: Mapping[str, str]) -> list[math_sets.MathProblem] | None:
    """The problems of `data=`; None for the synthetic set."""
    if own.get("data", SYNTHETIC) == SYNTHETIC:
        for key in ("split", "problem_column", "answer_column"):
            if key in own:
                raise ConfigError(f"{key}={own[key]} goes with data=, a hub id or a file")
        return None
    return math_sets.load(
        own["data"], split=own.get("split", "train"), problem_column=own.get("problem_column", ""), answer_column=own.get("answer_column", "")
    )


def _protocol(preset: Preset, overrides: Sequence[str]) -> list[str]:
    """The preset as overrides, but for keys that the command sets itself. Lengths are only made to fit each other here, see `_with_room`."""
    given = {key: value for key, _, value in (text.lstrip("+").partition("=") for text in overrides)}
    values: dict[str, Any] = {
        "rollout.sampling.top_p": preset.top_p,
        "rollout.sampling.top_k": preset.top_k,
        "rollout.sampling.min_p": 0.0,
        "rollout.time_limit_s": LONG_S,
        "engine.request_timeout_s": LONG_S,
    }
    room = given.get("rollout.max_tokens", given.get("engine.max_model_len", ""))
    if room.isdecimal() and int(room) > 1:
        values |= {"rollout.max_tokens": room, "rollout.max_turn_tokens": int(room) - 1}
    return [f"{key}={value}" for key, value in values.items() if key not in given]


def _with_room(config: Config, preset: Preset, context: int, overrides: Sequence[str]) -> Config:
    """The protocol's length of an answer, as far as the model's context and `engine.max_model_len` hold it."""
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    room = min(filter(None, [preset.tokens + PROMPT_ROOM, context, config.engine.max_model_len]))
    rollout = config.rollout if "rollout.max_tokens" in given else replace(config.rollout, max_tokens=room)
    if "rollout.max_turn_tokens" not in given:
        rollout = replace(rollout, max_turn_tokens=min(preset.tokens, rollout.max_tokens - 1))
    engine = config.engine if config.engine.max_model_len else replace(config.engine, max_model_len=min(filter(None, [context, rollout.max_tokens])))
    return replace(config, rollout=rollout, engine=engine)


def _tasks(config: Config, problems: Sequence[math_sets.MathProblem] | None, count: int) -> list[Task]:
    """The first `count` problems of the set (0: all of it)."""
    env = environments(config)[0]
    if problems is None:
        source = ProceduralSource(load_environment(env.target), name=env.name, seed=config.seed, args=env.args, workload=env.workload)
        return source.held_out(count or SYNTHETIC_TASKS)
    return [
        Task(problem.name, env.name, {"question": problem.text, "answer": problem.gold}, task_seed(config.seed, HELD_OUT, index), env.workload)
        for index, problem in enumerate(problems[: count or None])
    ]


def _resumable(parent: Path, title: str) -> Path:
    """The folder of the first evaluation of this title that has no result, or one that lacks samples: what is whole is never overwritten."""
    names = (title, *(f"{title}-{count}" for count in range(2, 10_000)))
    return next(parent / name for name in names if _lacks_samples(parent / f"{name}.json"))


def _lacks_samples(result: Path) -> bool:
    try:
        return bool(json.loads(result.read_text())["failed"])
    except FileNotFoundError:
        return True
    except (ValueError, KeyError, TypeError):
        return False  # somebody else's file


def _identity(job: Job, chosen: str) -> dict[str, Any]:
    """What two evaluations must have in common for their samples to be of one distribution."""
    config = job.config
    sampling, rollout = config.rollout.sampling, config.rollout
    return {
        "policy": _weights(Path(job.model_path)),
        "set": chosen,
        "problems": hashlib.sha256(json.dumps([(task.task_id, dict(task.payload)) for task in job.tasks]).encode()).hexdigest()[:16],
        "n": job.samples,
        "temperature": job.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": rollout.max_tokens,
        "max_turn_tokens": rollout.max_turn_tokens,
        "max_turns": rollout.max_turns,
        "environment": environments(config)[0].name,
        "environment_args": dict(environments(config)[0].args),
        "seed": config.seed,
    }


def _weights(model: Path) -> str:
    """One digest of everything that makes the policy: weights, configuration, tokenizer."""
    digest = hashlib.sha256()
    for file in sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def describe(asked: AimeJob) -> list[str]:
    """What will be done, for the screen."""
    job, rollout = asked.job, asked.job.config.rollout
    sampling = rollout.sampling
    made_up = " (made up by a generator, not AIME's own)" if asked.set == SYNTHETIC else ""
    return [
        f"evaluating {job.name}: {len(job.tasks)} problems of {asked.set}{made_up}, {job.samples} samples each, {asked.tool or 'no'} tool",
        f"protocol {asked.preset}: temperature {job.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"at most {rollout.max_turn_tokens:,} tokens a turn and {rollout.max_tokens:,} in all",
        f"samples: {asked.folder}",
    ]


def aime_record(asked: AimeJob, result: EvalResult, samples: Mapping[tuple[str, int], Sample]) -> dict[str, Any]:
    """What the result file holds: that of `sao eval`, and per problem the answers and the vote."""
    job = asked.job
    problems = [_problem(task, [samples[task.task_id, i] for i in range(job.samples) if (task.task_id, i) in samples]) for task in job.tasks]
    sampling = job.config.rollout.sampling
    return {
        **result_record(job, result),
        "set": asked.set,
        "synthetic": asked.set == SYNTHETIC,
        "preset": asked.preset,
        "tool": asked.tool,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": job.config.rollout.max_tokens,
        "identity": dict(asked.identity),
        "pass_at": _at(asked.ks, problems, lambda p, k: pass_at_k(len(p["rewards"]), p["correct"], k)),
        "maj_at": _at(asked.ks, problems, lambda p, k: majority_at_k(p["votes"], p["gold"], k, normalise=_plain)),
        "unread_share": float(np.mean([answer is None for p in problems for answer in p["answers"]])),
        "problems": problems,
    }


def _at(ks: Sequence[int], problems: Sequence[Mapping[str, Any]], figure: Callable[[Mapping[str, Any], int], float]) -> dict[str, float]:
    """For every k, the mean of `figure` over the problems that have k samples; left out where none has."""
    enough = {k: [figure(problem, k) for problem in problems if len(problem["rewards"]) >= k] for k in ks}
    return {str(k): float(np.mean(values)) for k, values in enough.items() if values}


def _problem(task: Task, samples: Sequence[Sample]) -> dict[str, Any]:
    """One row of the table. A right answer votes for the gold however it is written; one cut off, or none, has no vote."""
    gold = str(task.payload["answer"])
    votes = [gold if s.reward >= SOLVED else None if s.truncated else s.answer for s in samples]
    counted = [_plain(vote) for vote in votes if vote is not None]
    return {
        "task_id": task.task_id,
        "gold": gold,
        "correct": sum(s.reward >= SOLVED for s in samples),
        "truncated": sum(s.truncated for s in samples),
        "rewards": [s.reward for s in samples],
        "answers": [s.answer for s in samples],
        "votes": votes,
        "majority": max(dict.fromkeys(counted), key=counted.count) if counted else None,
    }


def _plain(answer: str) -> str:
    return normalise_answer(re.sub(r"\\[,;! ]|\\left|\\right|\s+", "", answer.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")))


def aime_summary(record: Mapping[str, Any]) -> str:
    """The result for the screen: the figures, then a line for every problem."""
    scored = sum(bool(p["rewards"]) for p in record["problems"])
    k = record["n"]
    lines = [
        f"mean@{k:<5} {record['mean']:.3f} [{record['low']:.3f}, {record['high']:.3f}], 95 % interval over {scored} problems",
        "  ".join(f"pass@{k} {value:.3f}" for k, value in record["pass_at"].items()),
        "  ".join(f"maj@{k} {value:.3f}" for k, value in record["maj_at"].items()),
        f"truncated  {record['truncated_share']:.1%} of {record['episodes']} samples (counted as wrong); without an answer {record['unread_share']:.1%}",
        f"sampled    {record['tokens']:,} tokens in {record['seconds']:.1f} s",
        f"  {'problem':<32} {'correct':>9} {'cut':>4}  {'gold':<14} majority",
    ]
    for p in record["problems"][:SHOWN]:
        of = f"{p['correct']}/{len(p['rewards'])}"
        lines.append(f"  {p['task_id'][:32]:<32} {of:>9} {p['truncated']:>4}  {p['gold'][:14]:<14} {(p['majority'] or '-')[:30]}")
    return "\n".join(lines)
