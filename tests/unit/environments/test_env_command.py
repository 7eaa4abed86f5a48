"""`sao env list | try | init` as a user types them, answers piped in."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.cli import main
from sao.config_load import compose, conf_dir
from sao.environment import StepResult
from sao.environments.files import _written, own_overrides
from sao.environments.play import play, spell_call
from sao.environments.skeleton import init
from sao.errors import UserError
from sao.tasks.source import build_source

HERE = __name__


class Odd:
    """Does to the loop whatever its argument says."""

    def __init__(self, task, *, how: str) -> None:
        self.how = how

    async def reset(self, context):
        if self.how == "raises":
            raise KeyError("board")
        return None if self.how == "opens with nothing" else [{"role": "user", "content": "go"}]

    async def step(self, action):
        return {"none": None, "text": "x", "no number": StepResult(reward=float("nan")), "role": StepResult([{"role": "robot", "content": "x"}])}.get(
            self.how, StepResult(terminated=True)
        )

    def tools(self):
        return [{"name": 3}] if self.how == "tool" else ()

    async def close(self):
        print("closed")

    @classmethod
    def generate_payload(cls, rng, split, *, how: str):
        return {}


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Run a command in a folder of its own with lines on stdin; the exit code, what it printed, and its complaint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["env", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_list_names_every_environment_with_arguments_and_a_command(typed):
    code, out, _ = typed("list")
    blocks = {block.splitlines()[0]: block for block in out.strip().split("\n\n")}
    assert code == 0 and set(blocks) == {path.stem for path in (conf_dir() / "env").glob("*.yaml")}
    assert all("\n  start  sao " in block for block in blocks.values())
    assert "sao train experiment=demo" in blocks["calculator"] and "operand_max=99" in blocks["calculator"]
    assert "url=..." in blocks["openenv"] and "sao online experiment=rule_stream" in blocks["rule_stream"]


def test_an_episode_is_played_from_a_pipe(typed):
    code, out, _ = typed("try", "env=calculator", stdin="/calculator expression=45*64\n/calculator\n/nothing a=1\nThe answer is 2946\n")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith(("tool", "reward", "episode"))] == [
        "tool       calculator(expression: string)",
        "reward     0, goes on",
        "tool       2880",
        "tool       error: calculator: missing expression",
        "tool       error: there is no tool nothing; tools: calculator",
        "reward     1, the end  {'calls': 1, 'errors': 0}",
        "episode    terminal, reward 1, 4 turns",
    ]


def test_a_line_that_cannot_be_read_is_told_and_the_play_goes_on(typed):
    code, out, _ = typed("try", "env=guess", stdin="/guess it='x\n1\n2\n3\n")
    assert code == 0 and "with quotes around spaces" in out and "\nepisode    terminal, reward 0, 3 turns" in out


def test_a_line_longer_than_a_turn_is_cut_off_as_the_engine_would(typed, monkeypatch):
    monkeypatch.setattr("sao.environments.play.PLENTY", 2000)
    code, out, err = typed("try", "env=guess", stdin="9" * 1500 + "\n1\n1\n")
    assert code == 0 and not err and "\nepisode    " in out


def test_answers_that_end_early_end_the_play(typed):
    code, out, _ = typed("try", "env=calculator", stdin="/calculator expression=1+1\n")
    assert code == 0 and out.endswith("the answers ended before the episode\n")


def test_random_answers_need_nobody(typed):
    for args in (["env=calculator"], ["env=gymnasium", "env.args.id=Blackjack-v1"]):
        code, out, _ = typed("try", *args, "--random", "--task", "2")
        assert code == 0 and "/train/2, seed" in out and "\nepisode " in out


def test_the_clock_stands_while_a_person_thinks(typed):
    config = compose(["env=calculator", "model.path=m"])
    config.rollout.time_limit_s = 0.1

    def slowly(tools):
        time.sleep(0.3)
        return "12"

    trajectory = asyncio.run(play(config, build_source(config, [config.env]).next(), slowly))
    assert trajectory is not None and trajectory.finish.kind == "terminal"


def test_another_task_is_another_question(typed):
    questions = [typed("try", "env=calculator", "--task", str(n))[1].split("user ")[1].splitlines()[0] for n in range(3)]
    assert len(set(questions)) == 3


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("opens with nothing", "Odd.reset must return a list of messages, returned NoneType"),
        ("raises", "Odd.reset raised KeyError on task odd/train/0: 'board'"),
        ("none", "Odd.step must return a StepResult, returned NoneType"),
        ("text", "Odd.step must return a StepResult, returned str"),
        ("no number", "Odd.step gave the reward nan, not a finite number"),
        ("role", "has the role 'robot'"),
        ("tool", "returned a tool schema without a function name"),
    ],
)
def test_a_broken_contract_is_refused_as_in_training(typed, how, said):
    code, out, err = typed("try", f"env={HERE}:Odd", f"env.args.how={how}", stdin="a\n")
    assert code == 1 and said in err and out.count("closed") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the environment to try"),
        (["env=calculater"], "did you mean 'calculator'?"),
        (["env=calculator", "env.args.tol=1"], "takes other arguments"),
        (["env=single_turn"], "needs tasks: set data.path"),
        (["env=program", "env.args.command=true", "reward=sao.rewards.builtin:last_number"], "is an agent program, which asks the policy itself"),
        (["env=tools", "env.args.cls=nowhere:X"], "there is no module 'nowhere'"),
    ],
)
def test_mistakes_are_one_sentence(typed, arguments, said):
    code, _, err = typed("try", *arguments)
    assert code == 2 and said in err and len(err.splitlines()) == 1


def test_a_line_becomes_a_call_as_the_policy_would_write_it():
    assert spell_call("hello / world") == "hello / world"
    assert spell_call("/buy item='green tea' count=2 wrap=true") == (
        '<tool_call>{"name": "buy", "arguments": {"item": "green tea", "count": 2, "wrap": true}}</tool_call>'
    )
    assert spell_call('/buy {"item": 1, "item": 2}') == '<tool_call>{"name": "buy", "arguments": {"item": 1, "item": 2}}</tool_call>'
    with pytest.raises(UserError, match="with quotes around spaces"):
        spell_call("/buy item='tea")


def test_init_writes_an_environment_whose_test_passes_and_whose_configuration_is_whole(typed, tmp_path):
    code, out, _ = typed("init", "my_game")
    assert code == 0 and "sao train env=my_game" in out
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_game"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    config = compose(["env=my_game", "train.steps=7"])
    assert (config.env.name, config.env.target, config.env.args) == ("my_game", "my_game.environment:MyGameEnvironment", {"bound": 50})
    assert config.model.warmstart and config.model.factory_args["environment"] == config.env.target
    assert (config.train.steps, config.run.name, config.eval.temperatures) == (7, "my_game", [1.0])
    code, out, _ = typed("try", "env=my_game", stdin="perhaps\nyes\n")
    assert code == 0 and "user       Say yes or no." in out and "2 turns" in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-game", "cannot be imported"),
        ("class", "cannot be imported"),
        ("_x", "cannot be imported"),
        ("spiel_ü", "cannot be imported"),
        ("json", "would hide, or be hidden by, the module json"),
        ("sao", "would hide, or be hidden by, the module sao"),
        ("calculator", "is one that ships"),
        ("there", "exists already"),
        ("module", "module.py exists already"),
    ],
)
def test_names_that_cannot_be_are_refused_and_nothing_is_written(typed, tmp_path, name, said):
    (tmp_path / "there").mkdir()
    (tmp_path / "module.py").touch()
    code, _, err = typed("init", name)
    assert code == 2 and said in err and sorted(path.name for path in tmp_path.iterdir()) == ["module.py", "there"]


@pytest.mark.parametrize("name", ["task", "step_result"])
def test_a_name_that_the_skeleton_imports_is_a_name_like_any_other(typed, name):
    assert typed("init", name)[0] == 0
    code, out, _ = typed("try", f"env={name}", stdin="yes\n")
    assert code == 0 and "episode    terminal" in out


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"new_game cannot be written \(No such file or directory"):
        init("new_game", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "cannot be read"), ("- 1", "must have a section env"), ("env: {args: {}}", "must have a section env with a target")]
)
def test_a_configuration_that_cannot_be_read_is_named(typed, tmp_path, text, said):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sao.yaml").write_text(text)
    code, _, err = typed("try", "env=mine")
    assert code == 2 and said in err and "mine/sao.yaml" in err


def test_values_of_a_file_reach_hydra_unharmed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    text = 'env:\n  target: a:B\n  args: {say: "it\'s, [odd]: ${x}=1", many: [a, 1, 2.5, null], deep: {a: true, none: {}}}\nmodel: {path: "${y}"}\n'
    Path("mine/sao.yaml").write_text(text.replace("${x}", "x").replace("${y}", "${run.name}"))
    config = compose(own_overrides("mine", ("model", "env")))  # type: ignore[arg-type]
    assert config.env.args == {"say": "it's, [odd]: x=1", "many": ["a", 1, 2.5, None], "deep": {"a": True, "none": {}}}
    assert config.model.path == "run"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab\\\\'\"$ {}[],=:#é")


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5))
@settings(max_examples=60)
def test_any_value_survives_hydras_grammar(value):
    assert OverridesParser.create().parse_override(f"key={_written(value)}").value() == value
