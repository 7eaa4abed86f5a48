"""Every mistake a user is likely to make ends in one clear sentence and exit code 2, before any actor starts and with nothing written."""

from __future__ import annotations

import json
import shutil

import pytest

from sao.cli import main
from sao.runtime.run_folder import RunFolder
from tests.unit.learner.learner_builders import save_model

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]

ENVIRONMENTS = """
from sao.envs.single_turn.environment import SingleTurnEnvironment


class Raises(SingleTurnEnvironment):
    async def reset(self, context):
        raise ValueError("no database")


class CannotBeBuilt(SingleTurnEnvironment):
    def __init__(self, task, **args):
        task.payload["board"]


class SaysNothing(SingleTurnEnvironment):
    async def reset(self, context):
        return []
"""


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """Made once: every test gets a copy of its files."""
    path = tmp_path_factory.mktemp("model") / "model"
    save_model(path)
    write_tokenizer(path, control=True)
    return path


@pytest.fixture
def project(tmp_path, monkeypatch, saved_model):
    """A user's folder: tasks, a reward, a model whose tokenizer speaks ChatML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my_reward_bad_input.py").write_text(
        "def score(completion: str, row: dict) -> float:\n    return float(row['answer'] in completion)\n"
    )
    (tmp_path / "environments_bad_input.py").write_text(ENVIRONMENTS)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    shutil.copytree(saved_model, tmp_path / "model")
    return tmp_path


def write_tokenizer(directory, *, control: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"] if control else ["<eos>"]
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[-1]).save_pretrained(directory)


def train(*overrides: str, verb: tuple[str, ...] = ("train",)) -> int:
    base = [
        "env=single_turn",
        "data.path=tasks.jsonl",
        "reward=my_reward_bad_input:score",
        "model.path=model",
        "rollout.max_tokens=96",
        "rollout.max_turn_tokens=16",
    ]
    return main([*verb, *base, "run.dry_run=true", *overrides])


def test_the_good_case_passes_and_starts_nothing(project, capsys):
    assert train() == 0
    out = capsys.readouterr().out
    assert "nothing was started" in out and "engine-0" in out and "8 tasks" in out and "renderer   chatml\n" in out
    assert not (project / "runs").exists()


def test_what_auto_chose_is_said(project, capsys):
    assert train("model.renderer=auto") == 0
    assert "renderer   chatml (model.renderer=auto: the tokenizer has <|im_start|>, <|im_end|>)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=/no/such/model", "model.path=/no/such/model does not exist"),
        ("model.path=./nowhere", "does not exist"),
        ("rollout.stalenes=1", "did you mean"),
        ("data.path=missing.jsonl", "missing.jsonl"),
        ("data.path=tasks.csv", "tasks.csv"),
        ("reward=my_reward_bad_input:nothing", "reward.function"),
        ("reward=no_such_module:score", "reward.function"),
        ("data.prompt_column=question", "question"),
        ("engine.kv_cache_mb=90000000", "lower engine.kv_cache_mb"),
        ("engine.threads=4096", "lower engine.replicas, engine.threads"),
        ("engine.replicas=4096", "engine.replicas"),
        ("rollout.max_tokens=100000", "exceeds the context"),
        ("rollout.sampling.top_k=5", "refused for training"),
        ("rollout.rollouts_per_prompt=4", "one rollout per prompt"),
        ("env.target=no.such:Thing", "env.target"),
        ("model.renderer=nope", "nope"),
        ("model.renderer=template", "template"),
        ("model.renderer=glm45", "model.renderer=glm45 needs [gMASK]"),
        ("model.thinking=false", "model.thinking=false does nothing with model.renderer=chatml"),
        ("model.reasoning=template", "model.reasoning=template does nothing with model.renderer=chatml"),
        ("eval.at_end=true", "held-out"),
        ("launcher.num_cpus=-1", "launcher.num_cpus"),
        ("learner.device=cuda", "no GPU"),
        ("engine.tensor_parallel_size=2", "no GPU"),
        ("critic.freeze=[nothing_matches]", "matches no parameter"),
        ("critic.freeze=['.*']", "freezes every parameter"),
        ("critic.path=nowhere", "critic.path=nowhere holds no value_head.safetensors; name the critic of a checkpoint"),
        ("critic.updates=0", "critic.updates=0"),
        ("critic.freeze=['^model','value_head']", "freezes every parameter"),
        ("critic.freeze=[lm_head]", "matches no parameter"),
        ("env.args.unknown=1", "env.args"),
        ("rollout.max_tokens=17", "raise rollout.max_tokens above"),
        ("env.target=environments_bad_input:Raises", "env=single_turn cannot open task single_turn/train/0 (ValueError: no database)"),
        ("env.target=environments_bad_input:CannotBeBuilt", "env=single_turn cannot be built for task single_turn/train/0 (KeyError: 'board')"),
        ("env.target=environments_bad_input:SaysNothing", "reset returned no message"),
        ("logger.wandb=online", "logger.wandb=online needs an API key"),
    ],
)
def test_mistakes_in_the_command(project, capsys, override, says):
    refused(train(override), says, capsys)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"answer": "1"}\n', "prompt"),
        (b'{"prompt": "", "answer": "1"}\n', "empty"),
        (json.dumps({"prompt": "x" * 1_000_000, "answer": "1"}).encode() + b"\n", "max_prompt_chars"),
        (b'{"prompt": "\xff\xfe", "answer": "1"}\n', "UTF-8"),
        (b'{"prompt": "a", \n', "JSON"),
        (b"[1, 2]\n", "tasks.jsonl"),
        (b'{"prompt": 7, "answer": "1"}\n', "prompt"),
    ],
)
def test_bad_rows_are_named_with_file_and_line(project, capsys, line, says):
    path = project / "tasks.jsonl"
    path.write_bytes(path.read_bytes() + line)
    error = refused(train(), says, capsys)
    assert "tasks.jsonl" in error and "9" in error


def test_a_tokenizer_without_the_control_tokens(project, capsys):
    write_tokenizer(project / "model", control=False)
    refused(train(), "<|im_start|>", capsys)


def test_a_directory_without_weights(project, capsys):
    (project / "model" / "model.safetensors").unlink()
    refused(train(), "safetensors", capsys)


def test_damaged_model_files(project, capsys):
    (project / "model" / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(train(), "damaged", capsys)
    (project / "model" / "config.json").write_text("{")
    refused(train(), "config.json", capsys)


def test_a_missing_model_under_a_warm_start(project, capsys):
    assert main(["train", "experiment=demo", "model.path=/nope", "model.factory=", "run.dry_run=true"]) == 2
    assert "model.path=/nope does not exist" in capsys.readouterr().err


def test_gpu_shares_are_summed():
    from sao.config import Config
    from sao.errors import ConfigError
    from sao.runtime.plan import Machine, _check_gpus

    config = Config()
    _check_gpus(config, Machine(8, 64000, 60000, 1))
    config.engine.replicas = 2
    with pytest.raises(ConfigError, match=r"1\.6 GPUs"):
        _check_gpus(config, Machine(8, 64000, 60000, 1))


def test_two_runs_in_the_same_folder(project, capsys):
    with RunFolder(project / "runs" / "one"):
        pass
    first = RunFolder(project / "runs" / "one")
    with first, pytest.raises(Exception, match="in use by process"), RunFolder(project / "runs" / "one"):
        pass


def test_a_finished_run_is_not_overwritten(project):
    with RunFolder(project / "runs" / "one") as folder:
        folder.write_text("ledger.json", "{}\n")
    with pytest.raises(Exception, match="already holds a run"), RunFolder(project / "runs" / "one"):
        pass
    assert (project / "runs" / "one" / "ledger.json").read_text() == "{}\n"


def refused(code: int, says: str, capsys) -> str:
    captured = capsys.readouterr()
    assert code == 2, captured
    error = captured.err.strip().splitlines()[-1]
    assert error.startswith("error: ") and says in error, captured.err
    assert "Traceback" not in captured.err
    return error


@pytest.mark.parametrize("folders", ["run.dir=runs/same", "run.dir=runs/same,runs/../runs/same"])
def test_a_sweep_into_one_folder(project, capsys, monkeypatch, folders):
    monkeypatch.setattr("sao.multirun.run_cell", lambda command: pytest.fail("a run was started"))
    refused(train(folders, "seed=1,2", verb=("train", "-m")), "run.dir=runs/", capsys)


@pytest.mark.parametrize("dry", ["true", "false"])
def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(project, capsys, dry):
    folder = project / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "ledger.json").write_text("{}")
    refused(train(f"run.dir={folder}", f"run.dry_run={dry}"), f"run.dir={folder} already holds a run; go on with it by resume=", capsys)
    assert [path.name for path in folder.iterdir()] == ["ledger.json"]


def test_some_prompts_that_do_not_fit_are_a_warning(project, capsys):
    with open(project / "tasks.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "x" * 100, "answer": "1"}) + "\n")
    assert train() == 0
    assert "warning: env=single_turn: 1 of the 4 prompts looked at leave no room for an answer" in capsys.readouterr().out


def test_rows_without_the_column_of_the_reward(project, capsys):
    (project / "tasks.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"], "gold": row["answer"]}) + "\n" for row in ROWS))
    error = refused(train(), "reward.function=my_reward_bad_input:score needs the column answer", capsys)
    assert "columns: prompt, gold" in error
    refused(train("reward=sao.rewards.builtin:exact_match"), "needs the column answer, ground_truth or reward_model.ground_truth", capsys)


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("parses", "return float(completion)", "raised ValueError"),
        ("looks_up", "return {'1': 1.0}[completion]", "raised KeyError"),
        ("forgets", "return None", "returned a value of type NoneType"),
        ("hangs", "while True: pass", "no score within the preflight's 0.5 s"),
    ],
)
def test_a_reward_that_trips_over_an_empty_answer_is_a_warning(project, capsys, monkeypatch, name, body, says):
    monkeypatch.setattr("sao.rewards.preflight.SCORE_LIMIT_S", 0.5)
    (project / f"reward_that_{name}.py").write_text(f"def score(completion, row):\n    {body}\n")
    assert train(f"reward=reward_that_{name}:score") == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "an empty answer to task single_turn/train/" in warning and says in warning


def test_a_critic_path_that_is_no_fitted_critic_of_this_model(project, capsys):
    from sao.learner.models import load_critic, save_critic

    made = dict(head_init="zero", dtype="float32", attention_name="packed_sdpa")
    save_critic(load_critic("model", "", **made), project / "critic")
    assert train("critic.path=critic") == 0
    capsys.readouterr()
    refused(train("critic.path=model"), "critic.path=model holds no value_head.safetensors", capsys)
    shutil.copytree(project / "critic", project / "run/checkpoints/final/critic")
    refused(train("critic.path=run"), "is the folder of a run; name its fitted critic, critic.path=run/checkpoints/final/critic", capsys)
    config = json.loads((project / "critic/config.json").read_text())
    (project / "critic/config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    refused(train("critic.path=critic"), "is of another model than the policy (width 32, the policy's 16)", capsys)
