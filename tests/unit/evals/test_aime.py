"""`sao eval aime`: protocols, sets, refusals, resuming by the same command, and what is made of the samples."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from sao.cli import main
from sao.errors import UserError
from sao.evals import aime
from sao.evals.aime import PRESETS, aime_record, aime_summary, describe, make_aime_job
from sao.evals.heldout import EvalResult, Problem, evaluate
from sao.evals.samples import Sample
from tests.unit.evals.test_eval_command import made, project  # noqa: F401 - fixtures

SET = [
    {"id": "I-1", "problem": "How many integers n satisfy 1 < n < 44?", "answer": "042"},
    {"id": "I-2", "problem": "Find the positive root of x^2 = 8.", "answer": "2\\sqrt{2}"},
    {"id": "I-3", "problem": "Find the probability that both dice show a six.", "answer": "1/36"},
]


@pytest.fixture
def folder(project):  # noqa: F811
    (project / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SET))
    return project


def test_a_protocol_is_what_its_paper_says(folder):
    for name, temperature, top_p, top_k, n in (("sao", 1.0, 1.0, 0, 16), ("deepseek-r1", 0.6, 0.95, 0, 64), ("qwen3", 0.6, 0.95, 20, 64)):
        asked = make_aime_job(["model=model", f"preset={name}", "tasks=2"])
        sampling = asked.job.config.rollout.sampling
        assert (asked.job.temperature, sampling.top_p, sampling.top_k, sampling.min_p, asked.job.samples) == (temperature, top_p, top_k, 0.0, n)
    assert PRESETS.keys() == {"sao", "deepseek-r1", "qwen3"}


def test_lengths_are_the_protocols_as_far_as_the_model_holds_them(folder):
    asked = make_aime_job(["model=model"])
    rollout, engine = asked.job.config.rollout, asked.job.config.engine
    assert (rollout.max_tokens, rollout.max_turn_tokens, engine.max_model_len) == (128, 127, 128)  # the tiny model's context
    assert rollout.time_limit_s == engine.request_timeout_s == 7200
    asked = make_aime_job(["model=model", "rollout.max_tokens=64", "rollout.time_limit_s=5", "rollout.sampling.top_p=0.9"])
    rollout = asked.job.config.rollout
    assert (rollout.max_tokens, rollout.max_turn_tokens, rollout.time_limit_s, rollout.sampling.top_p) == (64, 63, 5, 0.9)
    assert make_aime_job(["model=model", "engine.max_model_len=100"]).job.config.rollout.max_tokens == 100


def test_a_run_brings_its_policy_and_the_job_its_problems(folder):
    asked = make_aime_job(["run=run", "data=set.jsonl", "n=2", "checkpoint=step-000002"])
    tasks = asked.job.tasks
    assert [task.task_id for task in tasks] == ["I-1", "I-2", "I-3"] and {task.environment for task in tasks} == {"math"}
    assert asked.job.model_path == str(folder / "run/checkpoints/step-000002/policy")
    assert asked.folder == folder / "run/evals/aime-step-000002-set.jsonl-sao"
    assert len(make_aime_job(["run=run"]).job.tasks) == 30
    assert len(make_aime_job(["run=run", "tasks=5"]).job.tasks) == 5
    assert [t.task_id for t in make_aime_job(["run=run", "data=set.jsonl", "tasks=1"]).job.tasks] == ["I-1"]


def test_the_tool_is_another_environment(folder):
    asked = make_aime_job(["run=run", "tool=python", "tasks=2"])
    assert {task.environment for task in asked.job.tasks} == {"math_python"} and asked.folder.name.endswith("-python")
    assert make_aime_job(["run=run", "tool=python", "tasks=2"]).identity != make_aime_job(["run=run", "tasks=2"]).identity


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "run=FOLDER"),
        (["run=run", "preset=gpt"], "preset=gpt is unknown; there are sao, deepseek-r1, qwen3"),
        (["run=run", "tool=perl"], "tool=perl is unknown"),
        (["run=run", "n=4", "k=8"], "pass@8 cannot be estimated from n=4 samples"),
        (["run=run", "n=4", "k=0,2"], "pass@0"),
        (["run=run", "k=two"], "k=two is not whole numbers"),
        (["run=run", "n=0"], "n=0 must be at least 1"),
        (["run=run", "tasks=-1"], "tasks=-1"),
        (["run=run", "env=calculator"], "env=calculator: sao eval aime brings its own"),
        (["run=run", "data.path=x.jsonl"], "name a set by data="),
        (["run=run", "split=test"], "split=test goes with data="),
        (["run=run", "data=nowhere.jsonl"], "there is no such file"),
        (["run=run", "data=tasks.jsonl", "answer_column=gold"], "no column answer_column=gold"),
        (["run=run", "presset=sao"], "did you mean 'preset'"),
        (["run=run", "temperature=-1"], "temperature=-1"),
        (["run=run", "rollout.max_tokens=4096"], "max_model_len"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(folder, capsys, arguments, says):
    before = {path for path in folder.rglob("*") if "__pycache__" not in str(path)}
    assert main(["eval", "aime", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and says in error and "\n" not in error
    assert {path for path in folder.rglob("*") if "__pycache__" not in str(path)} == before


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(folder, capsys):
    before = {path for path in folder.rglob("*") if "__pycache__" not in str(path)}
    assert main(["eval", "aime", "run=run", "run.dry_run=true", "preset=qwen3"]) == 0
    shown = capsys.readouterr().out
    assert "30 problems of synthetic (made up by a generator, not AIME's own), 64 samples each, no tool" in shown
    assert "protocol qwen3: temperature 0.6, top_p 0.95, top_k 20" in shown
    assert {path for path in folder.rglob("*") if "__pycache__" not in str(path)} == before


@pytest.fixture
def workers(folder, monkeypatch):
    """The command with workers that never start: `workers.lives` samples are finished, then Ctrl-C; those of `workers.fails` fail."""
    from tests.unit.evals.test_samples import Policy

    async def run_job(asked, logs, through):
        policy = Policy(workers.lives, workers.fails)
        workers.asked = policy.asked
        return await evaluate(
            through(policy), asked.tasks, name=asked.name, version=0, temperature=1.0, concurrency=1, samples_per_task=asked.samples
        )

    class Workers:
        lives, fails, asked = 10**9, (), ()

    workers = Workers()
    monkeypatch.setattr(aime, "run_job", run_job)
    monkeypatch.setattr(aime, "fetch", lambda handle: handle)
    monkeypatch.setattr(aime.sweeper, "start", lambda: None)
    return workers


ASK = ["eval", "aime", "run=run", "data=set.jsonl", "n=3"]


def test_interrupted_and_asked_again_it_gives_the_same_result(folder, workers, capsys):
    workers.lives = 4
    assert main(ASK) == 130
    assert "4 of 9 samples are kept" in capsys.readouterr().out
    workers.lives = 10**9
    assert main(ASK) == 0
    assert "4 of 9 samples are there already" in capsys.readouterr().out and len(workers.asked) == 5
    cut = json.loads((folder / "run/evals/aime-final-set.jsonl-sao.json").read_text())
    assert main([*ASK, "out=whole"]) == 0
    whole = json.loads((folder / "whole.json").read_text())
    assert len(workers.asked) == 9
    for record in (cut, whole):
        del record["seconds"]
    assert cut == whole
    assert main(ASK) == 0  # a finished one is not gone on with
    assert (folder / "run/evals/aime-final-set.jsonl-sao-2.json").is_file()


def test_the_turn_loop_on_a_deterministic_engine_gives_the_same_samples_whenever_it_is_interrupted(folder, monkeypatch):
    """Everything but Ray and vLLM is real: environment, renderer, turn loop, seeds, samples on disk."""
    from sao.inference.pool import complete
    from sao.inference.scripted import ScriptedEngine
    from sao.rollout.worker import EpisodeWorker

    rows = [{"problem": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(3, 7)]
    (folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Handle:
        name = "scripted"
        engine = ScriptedEngine(stop_one_in=20)

        async def generate(self, request):
            return await complete(self.engine, request)

    async def run_job(asked, logs, through):
        worker = EpisodeWorker(asked.config, [asked.config.env], asked.model_path, [Handle()])
        done = 0

        class Workers:
            async def run(self, request):
                nonlocal done
                outcome, trajectory = await worker.run(request)
                done += 1
                if [done] == stop_after:
                    os.kill(os.getpid(), signal.SIGINT)
                return replace(outcome, handle=trajectory)

        return await evaluate(
            through(Workers()), asked.tasks, name=asked.name, version=0, temperature=1.0, concurrency=5, samples_per_task=asked.samples
        )

    monkeypatch.setattr(aime, "run_job", run_job)
    monkeypatch.setattr(aime, "fetch", lambda handle: handle)
    monkeypatch.setattr(aime.sweeper, "start", lambda: None)
    ask = ["eval", "aime", "model=model", "data=short.jsonl", "n=4", 'env.args.system=""', "rollout.max_turn_tokens=24"]
    codes, stop_after = [], []
    for lives, out in ((None, "whole"), (6, "cut"), (7, "cut"), (None, "cut")):
        stop_after[:] = [lives]
        codes.append(main([*ask, f"out={out}"]))
    assert codes == [0, 130, 130, 0]
    kept = [sorted(line for line in (folder / out / "samples.jsonl").read_text().splitlines() if "task" in line) for out in ("whole", "cut")]
    assert kept[0] == kept[1] and len(kept[0]) == 16 and len(set(kept[0])) == 16
    whole, cut = (json.loads((folder / f"{out}.json").read_text()) | {"seconds": 0} for out in ("whole", "cut"))
    assert whole == cut and 0 < whole["truncated_share"] < 1 and whole["failed"] == 0


def test_samples_that_failed_are_said_to_be_missing_and_drawn_by_the_next_call(folder, workers, capsys):
    workers.fails = [("I-2", 1)]
    assert main(ASK) == 1
    assert "1 of 9 samples failed and are in no figure" in capsys.readouterr().err
    workers.fails = ()
    assert main(ASK) == 0 and len(workers.asked) == 1
    record = json.loads((folder / "run/evals/aime-final-set.jsonl-sao.json").read_text())
    assert record["failed"] == 0 and record["episodes"] == 9


def test_other_weights_are_another_job(folder, workers):
    assert main([*ASK, "out=mine"]) == 0
    (folder / "mine.json").unlink()
    with pytest.raises(UserError, match="policy is"):
        asked = make_aime_job([*ASK[2:], "out=mine", "checkpoint=step-000002"])
        config = folder / "run/checkpoints/step-000002/policy/config.json"
        config.write_text(config.read_text().replace("}", " }"))
        aime.Samples(asked.folder, {**asked.identity, "policy": aime._weights(config.parent)}).__enter__()


def sample(task, index, answer, reward=0.0, truncated=False):
    return Sample(task, index, reward, truncated, 10, answer, "", f"\\boxed{{{answer}}}")


def test_the_figures_and_the_vote(folder):
    asked = make_aime_job(["run=run", "data=set.jsonl", "n=4", "k=1,2,4"])
    drawn = [
        *[sample("I-1", i, a, float(a in ("42", "042"))) for i, a in enumerate(["7", "042", "42", "8"])],  # 42 wins with two votes
        *[sample("I-2", i, a, float(i == 1)) for i, a in enumerate(["3", r"\sqrt{8}", "4", "5"])],  # one vote each: the first seen wins
        *[sample("I-3", i, "1/36", 0.0 if i else 1.0, truncated=i > 0) for i in range(4)],  # what was cut off has no vote
    ]
    samples = {(s.task, s.sample): s for s in drawn}
    problems = tuple(Problem(t.task_id, tuple(samples[t.task_id, i].reward for i in range(4))) for t in asked.job.tasks)
    result = EvalResult("final", "math", 0, 1.0, 1 / 3, 0.25, 0.5, 12, 3, 0, 120, 2.0, 4, problems)
    record = aime_record(asked, result, samples)
    json.dumps(record)
    assert record["pass_at"] == pytest.approx({"1": 1 / 3, "2": (5 / 6 + 1 / 2 + 1 / 2) / 3, "4": 1.0})
    assert record["maj_at"] == pytest.approx({"1": 1 / 3, "2": 1 / 3, "4": 2 / 3})
    assert [p["majority"] for p in record["problems"]] == ["42", "3", "1/36"]
    assert [p["truncated"] for p in record["problems"]] == [0, 0, 3]
    shown = aime_summary(record)
    assert "mean@4     0.333 [0.250, 0.500]" in shown and "maj@4 0.667" in shown and "truncated  25.0% of 12 samples" in shown
    assert not record["synthetic"] and record["preset"] == "sao"
    assert any("set.jsonl" in line for line in describe(asked))
