"""`sao eval` and `sao export`: what they start from, and every refusal before anything starts or is written."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path

import pytest

from sao.cli import main
from sao.config_load import compose
from sao.config_yaml import to_yaml
from sao.evals.job import make_job, result_record, summary
from sao.runtime.checkpoints import Checkpoints
from tests.unit.learner.learner_builders import save_model
from tests.unit.test_bad_input import ROWS, write_tokenizer

SMALL = ["model.path=model", "rollout.max_tokens=96", "rollout.max_turn_tokens=16"]
SCORED = ["env=single_turn", "reward=my_reward_bad_input:score"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A user's folder: a model, tasks, and a run of the calculator that left two checkpoints. Made once; a test gets a copy."""
    root = tmp_path_factory.mktemp("made")
    (root / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "my_reward_bad_input.py").write_text("def score(completion: str, row: dict) -> float:\n    return float(row['answer'] in completion)\n")
    save_model(root / "model")
    write_tokenizer(root / "model", control=True)
    make_run(root, "run", ["env=calculator", "env.args.operand_max=50", "eval.tasks=7"], ["step-000002", "final"])
    return root


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of that folder, which is where the test stands."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def make_run(root, name, overrides, checkpoints):
    run = root / name
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(compose([*SMALL, *overrides])))
    store = Checkpoints(run, keep=2)
    for checkpoint in checkpoints:
        scratch = store.begin(checkpoint)
        save_model(scratch / "policy")
        write_tokenizer(scratch / "policy", control=True)
        shutil.copytree(scratch / "policy", scratch / "critic")
        store.commit(scratch, {"version": 2, "batches_done": 2})
    return run


def test_a_run_is_evaluated_as_it_was_trained(project):
    job = make_job(["run=run"])
    assert job.model_path == str(project / "run" / "checkpoints" / "final" / "policy")
    assert (job.samples, job.temperature, len(job.tasks)) == (4, 1.0, 7)
    assert job.config.env.args["operand_max"] == 50
    assert {t.task_id for t in job.tasks} == {f"calculator/held_out/{i}" for i in range(7)}
    assert job.title == "final-calculator-t1-n4"
    assert not (project / "run" / "evals").exists()


def test_arguments_and_overrides_are_taken(project):
    job = make_job(
        ["run=run", "checkpoint=step-000002", "n=2", "temperature=0.7", "tasks=3", "env.args.tool=false", "rollout.sampling.top_p=0.95", "engine.max_num_seqs=8"]
    )  # fmt: skip
    assert (job.samples, job.temperature, len(job.tasks), job.about["version"]) == (2, 0.7, 3, 2)
    assert job.config.env.args["tool"] is False and job.config.env.args["operand_max"] == 50
    assert job.config.rollout.sampling.top_p == 0.95 and job.config.engine.max_num_seqs == 8
    assert make_job(["run=run", "temperature=0"]).samples == 1


def test_another_environment_comes_from_conf_without_the_runs_data(project):
    job = make_job(["run=run", "data.eval_path=tasks.jsonl", *SCORED, "tasks=5"])
    assert job.config.env.name == "single_turn" and "operand_max" not in job.config.env.args
    assert len(job.tasks) == 5 and all(t.environment == "single_turn" for t in job.tasks)
    make_run(project, "rows", [*SCORED, "data.path=tasks.jsonl", "data.eval_path=tasks.jsonl"], ["final"])
    assert all(t.environment == "calculator" for t in make_job(["run=rows", "env=calculator", "tasks=3"]).tasks)
    assert len(make_job(["run=rows", "env=single_turn"]).tasks) == len(ROWS)


def test_one_environment_of_a_mixture(project):
    make_run(
        project, "mixed", [*SCORED, "data.path=tasks.jsonl", "data.eval_path=tasks.jsonl", "data.mixture={single_turn: 1, calculator: 1}"], ["final"]
    )
    both = make_job(["run=mixed", "tasks=6"])
    assert {t.environment for t in both.tasks} == {"single_turn", "calculator"}
    assert {t.task_id for t in make_job(["run=mixed", "tasks=2", "env=calculator"]).tasks} == {"calculator/held_out/0", "calculator/held_out/1"}
    assert {t.environment for t in make_job(["run=mixed", "tasks=2", "env=single_turn"]).tasks} == {"single_turn"}


def test_a_plain_model_needs_an_environment_and_no_run(project):
    job = make_job(["model=model", "env=calculator", "tasks=2", *SMALL[1:]])
    assert job.model_path == str(project / "model") and job.folder.parent == project / "runs" and job.name == "model"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "run=FOLDER"),
        (["run=run", "model=model"], "one of the two"),
        (["run=nowhere"], "run=nowhere does not exist"),
        (["run=model"], "has no config.yaml"),
        (["run=run", "checkpoint=best"], "there are final, step-000002"),
        (["run=run", "n=0"], "n=0 must be at least 1"),
        (["run=run", "n=two"], "n=two is not a whole number"),
        (["run=run", "tasks=0"], "tasks=0"),
        (["run=run", "temperature=-1"], "temperature=-1"),
        (["run=run", "temperature=nan"], "temperature=nan"),
        (["run=run", "checkpont=final"], "did you mean 'checkpoint'"),
        (["run=run", "engin.threads=1"], "did you mean 'engine.threads'"),
        (["run=run", "n=1", "n=2"], "given twice"),
        (["run=run", "fast"], "key=value"),
        (["run=run", "model.path=/nowhere"], "model.path=/nowhere has no effect with run="),
        (["run=run", "warmstart.steps=3"], "warmstart.steps=3 has no effect with run="),
        (["run=run", "env=calculatr"], "calculatr"),
        (["run=run", "rollout.sampling.top_p=0"], "rollout.sampling.top_p=0"),
        (["run=run", "engine.max_num_seqs=abc"], "engine.max_num_seqs"),
        (["run=run", "experiment=demo"], "experiment=demo"),
        (["run=run", "env.args.operand=3"], "env.args"),
        (["run=run", *SCORED], "data.eval_path"),
        (["run=run", *SCORED, "data.path=tasks.jsonl"], "env=single_turn has no held-out tasks"),
        (["model=model"], "set env=NAME"),
        (["model=model", "env=calculator", "checkpoint=final"], "goes with run="),
        (["model=./nowhere", "env=calculator"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(project, capsys, arguments, says):
    before = sorted(project.rglob("*"))
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and says in error and "\n" not in error
    assert [p for p in sorted(project.rglob("*")) if "__pycache__" not in str(p)] == before


def test_the_result_file_and_the_screen(project):
    from sao.evals.heldout import EvalResult, Problem

    job = make_job(["run=run", "n=2"])
    problems = (Problem("a", (1.0, 1.0)), Problem("b", (0.0,)))
    result = EvalResult("final", "calculator", 0, 1.0, 0.5, 0.0, 1.0, 3, 1, 1, 99, 2.5, 2, problems)
    record = result_record(job, result)
    json.dumps(record)
    assert record["checkpoint"] == "final" and record["pass_at"] == {"1": 0.5, "2": 1.0}
    assert record["problems"] == [{"task_id": "a", "rewards": [1.0, 1.0]}, {"task_id": "b", "rewards": [0.0]}]
    shown = summary(record)
    assert "mean@2     0.500 [0.000, 1.000]" in shown and "pass@2 1.000" in shown and "over 2 problems, 1 episodes failed" in shown
    assert shown.index("  b ") < shown.index("  a ")
    record["problems"][1]["rewards"] = []
    assert "over 1 of 2 problems" in summary(record)


@pytest.fixture
def ready(project, monkeypatch):
    """An evaluation whose episodes have been run already: `outcome` gives the result, or raises."""
    from sao.evals import job
    from sao.evals.heldout import EvalResult, Problem

    async def run(*_):
        return ready.outcome()

    def ready(*arguments):
        return main(["eval", "run=run", "n=2", *arguments])

    ready.outcome = lambda: EvalResult("final", "calculator", 0, 1.0, 0.5, 0.0, 1.0, 1, 0, 1, 99, 2.5, 2, (Problem("a", (0.5,)),))
    monkeypatch.setattr(job, "run_job", run)
    monkeypatch.setattr(job.sweeper, "start", lambda: None)
    return ready


def test_figures_are_shown_when_the_disk_takes_no_result(project, ready, monkeypatch, capsys):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert ready() == 1
    shown = capsys.readouterr()
    assert "mean@2     0.500" in shown.out
    assert re.search(r"^failed: .*n2\.json cannot be written \(No space left on device\).*make room", shown.err) and shown.err.count("\n") == 1


def test_an_interrupted_evaluation_takes_no_name(project, ready):
    def interrupted():
        raise KeyboardInterrupt

    whole, ready.outcome = ready.outcome, interrupted
    assert ready() == 130
    ready.outcome = whole
    assert ready() == 0 and ready() == 0
    assert sorted(path.name for path in (project / "run/evals").glob("*.json")) == ["final-calculator-t1-n2-2.json", "final-calculator-t1-n2.json"]


def test_an_export_is_a_plain_copy(project, capsys):
    assert main(["export", "run=run", "checkpoint=step-000002", "to=out/model"]) == 0
    for part in ("policy/config.json", "policy/model.safetensors", "policy/tokenizer.json", "critic/model.safetensors"):
        assert (project / "out/model" / part).read_bytes() == (project / "run/checkpoints/step-000002" / part).read_bytes()
    assert [p.name for p in (project / "out").iterdir()] == ["model"]
    assert main(["export", "run=run", "to=out/model"]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["to=x"], "needs run="),
        (["run=run"], "needs to="),
        (["run=run", "to=x", "chekpoint=final"], "did you mean 'checkpoint'"),
        (["run=run", "to=x", "n=3"], "knows no key 'n'"),
        (["run=run", "to=x", "checkpoint=nine"], "there are final"),
    ],
)
def test_export_refuses_mistakes(project, capsys, arguments, says):
    assert main(["export", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (project / "x").exists()


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


DAMAGES = [
    ("final", "policy/model.safetensors", cut, "policy/model.safetensors has"),
    ("final", "critic/model.safetensors", cut, "critic/model.safetensors has"),
    ("final", "state.json", Path.unlink, "state.json is missing"),
    ("final", "critic", shutil.rmtree, "critic/.* is missing"),
    ("step-000002", "policy/model.safetensors", flip, "policy/model.safetensors is not what was written; name another: checkpoint=final"),
    ("step-000002", "manifest.json", Path.unlink, "it has no manifest"),
]


@pytest.mark.parametrize("verb", ["export", "eval"])
@pytest.mark.parametrize(("checkpoint", "victim", "damage", "says"), DAMAGES)
def test_a_damaged_checkpoint_is_neither_exported_nor_evaluated(project, capsys, verb, checkpoint, victim, damage, says):
    damage(project / "run" / "checkpoints" / checkpoint / victim)
    assert main([verb, "run=run", f"checkpoint={checkpoint}", *(["to=x"] if verb == "export" else [])]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"{checkpoint} is damaged, .*{says}", error) and error.count("\n") == 1
    assert not (project / "x").exists()


@pytest.mark.parametrize(
    ("victim", "damage", "says"),
    [
        ("policy/model.safetensors", cut, "policy/model.safetensors is not whole .it has"),
        ("critic/model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:100]), "critic/model.safetensors is not whole .its header"),
        ("critic", shutil.rmtree, "critic is missing"),
        ("state.json", Path.unlink, "state.json is missing"),
    ],
)
def test_a_final_checkpoint_without_a_manifest_is_checked_as_far_as_can_be(project, capsys, victim, damage, says):
    """Older versions wrote none."""
    final = project / "run" / "checkpoints" / "final"
    (final / "manifest.json").unlink()
    assert main(["export", "run=run", "to=whole"]) == 0 and make_job(["run=run"]).model_path == str(final / "policy")
    damage(final / victim)
    assert main(["export", "run=run", "to=x"]) == 2
    assert re.search(f"final is damaged, {says}", capsys.readouterr().err) and not (project / "x").exists()


def test_a_model_directory_whose_weights_are_cut_off_is_refused(project, capsys):
    cut(project / "model" / "model.safetensors")
    assert main(["eval", "model=model", "env=calculator"]) == 2
    assert re.search(r"model\.safetensors is damaged \(it has \d+ bytes instead of \d+\)", capsys.readouterr().err)
