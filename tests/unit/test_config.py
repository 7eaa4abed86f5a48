"""Configuration is refused at the door with one sentence; every key means something; the control plane stays light."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sao
from sao.config import Config
from sao.config_algo import cautions
from sao.config_load import CHOICES, compose, conf_dir, expand_sweep, leaf_keys, overlay, value_of
from sao.config_yaml import from_yaml, to_yaml
from sao.errors import ConfigError

BASE = ["model.path=/models/x", "data.path=tasks.jsonl", "reward.function=pkg.mod:fn"]
SOURCE = Path(sao.__file__).parent


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.stalenes=3"], "did you mean 'rollout.staleness'"),
        (["lr=1"], "optim.policy.lr"),
        (["tau=4"], "unknown key 'tau'"),
        (["+algo.eps_lo=0.1"], "algo.eps_lo"),
        (["algo.eps_low=abc"], "algo.eps_low"),
        (["train.steps=1.5"], "train.steps"),
        (["train=3"], "train is a section"),
        (["env=calculatr"], "did you mean 'calculator'"),
        (["experiment=dmo"], "did you mean 'demo'"),
        (["algo.whiten=yes"], "algo.whiten"),
        (["algo.name=grpo"], "choose it with algo=grpo"),
        (["foo"], "key=value"),
        (["experimnt=demo"], "did you mean 'experiment'"),
        (["rolout=3"], "did you mean 'rollout'"),
        (["train.steps=abc"], "train.steps=abc must be a whole number"),
        (["algo.gamma=abc"], "algo.gamma=abc must be a number"),
        (["algo.detach_ratio=maybe"], "algo.detach_ratio=maybe must be true or false"),
        (["critic.freeze=abc"], "critic.freeze must be a list"),
        (["data.mixture=3"], "data.mixture must be a mapping"),
        (["model.path=[1]"], "model.path=[1] must be a text"),
        (["train.steps=null"], "train.steps must not be null"),
        (["train.steps=1,2"], "add -m to sweep"),
        (["train.steps=0"], "train.steps=0 must be above 0"),
        (["rollout.rollouts_per_prompt=8"], "one rollout per prompt"),
        (["rollout.sampling.top_p=0.9"], "importance ratio"),
        (["rollout.sampling.top_k=20"], "importance ratio"),
        (["rollout.sampling.min_p=0.1"], "importance ratio"),
        (["rollout.sampling.temperature=0"], "greedy"),
        (["rollout.sampling.repetition_penalty=1.1"], "penalties"),
        (["weights.publish_every=9"], "rollout.staleness >= 8"),
        (["rollout.max_turn_tokens=4096"], "rollout.max_turn_tokens"),
        (["engine.max_model_len=100"], "engine.max_model_len=100"),
        (["rollout.context_tokens=4096", "engine.max_model_len=2048"], "rollout.context_tokens=4096 exceeds"),
        (["rollout.observation_tokens=20"], "less than a marker needs"),
        (["rollout.observation_keep=middle"], "rollout.observation_keep"),
        (["rollout.compaction=sumary"], "summary"),
        (["rollout.compact_keep=3"], "rollout.compact_keep does nothing with rollout.compaction=off"),
        (["rollout.compaction=summary"], "rollout.context_tokens or engine.max_model_len"),
        (["rollout.compaction=summary", "rollout.context_tokens=512"], "fill the context of 512"),
        (["rollout.compaction=summary", "rollout.context_tokens=2048", "rollout.summary_prompt=''"], "rollout.summary_prompt is empty"),
        (["rollout.compaction=summary", "rollout.context_tokens=2048", "rollout.compact_keep=0"], "rollout.compact_keep=0 must be above 0"),
        (["optim.policy.warmup_ratio=1.5"], "optim.policy.warmup_ratio"),
        (["optim.critic.betas=[0.9]"], "optim.critic.betas"),
        (["algo.eps_low=-0.3"], "algo.eps_low=-0.3 must be above 0: it is an epsilon"),
        (["algo.eps_high=0"], "algo.eps_high=0.0 must be above 0"),
        (["algo.loss=diss"], "did you mean 'dis'?"),
        (["algo.loss=surprise"], "there are dis, reinforce, ppo_clip"),
        (["algo.loss=no_such_module:loss"], "there is no module 'no_such_module'"),
        (["algo.advantage=grop"], "did you mean 'group'?"),
        (["algo=tis", "algo.loss_args.ceiling=3"], "algo.loss_args.ceiling: tis has no such argument; it takes cap"),
        (["algo=tis", "algo.loss_args.cap=0"], "algo.loss_args.cap=0 must be above 0"),
        (["algo=ppo_clip", "algo.loss_args.eps_low=-1"], "algo.loss_args.eps_low=-1 must be a finite number and not negative"),
        (["algo=ppo_clip", "algo.eps_low=0.1"], "algo.eps_low=0.1 is read by algo.loss=dis alone"),
        (["algo.loss_args.eps_low=0.1"], "dis reads algo.eps_low; set that"),
        (["algo=icepop", "algo.loss_args.mask_low=9"], "must be below algo.loss_args.mask_high=5.0"),
        (["algo=running_mean", "algo.advantage_args.window=0"], "algo.advantage_args.window=0 must be above 0"),
        (["algo=running_mean", "algo.advantage_args.window=1.5"], "must be a whole number"),
        (["algo=running_mean", "algo.advantage_args.per_task=7"], "must be true or false"),
        (["algo=single_dis", "algo.gamma=0.9"], "algo.gamma=0.9 is read by algo.advantage=gae alone"),
        (["algo=single_dis", "algo.truncation=bootstrap"], "needs a value to go on with"),
        (["algo=single_dis", "run.phase=critic"], "trains no critic; choose algo=sao"),
        (["algo=single_dis", "critic.path=there"], "trains no critic; empty it"),
        (["critic.updates=0"], "a critic that is never trained"),
        (["algo=single_dis", "critic.updates=-1"], "critic.updates=-1 must not be negative"),
        (["experiment=smollm2", "algo=grpo"], "algo.values=before is read by algo.advantage=gae alone"),
        (["experiment=smollm2", "algo=grpo"], "(where an experiment sets it, give algo.values=after)"),
        (["algo=single_dis", "algo.lambda_policy=0.5"], "give algo.lambda_policy=null)"),
        (["algo=vapo", "algo.denominator=accepted"], "set all"),
        (["algo=grpo", "rollout.rollouts_per_prompt=1"], "set rollout.rollouts_per_prompt to 2 or more"),
        (["algo=grpo", "train.batch_size=12"], "train.batch_size=12 must be a multiple of rollout.rollouts_per_prompt=8"),
        (["algo=grpo", "rollout.max_running=4"], "less than one group"),
        (["algo=running_mean", "rollout.rollouts_per_prompt=2"], "one rollout per prompt"),
        (["data.pool=-1"], "data.pool=-1 must not be negative"),
        (["model.path="], "model.path is empty"),
        (["optim.policy.lr=nan"], "optim.policy.lr=nan is not a finite number"),
        (["rollout.time_limit_s=inf"], "not a finite number"),
        (["rollout.sampling.temperature=0.005"], "no engine samples at"),
        (["eval.temperatures=[0.001]"], "eval.temperatures"),
        (["eval.every=-1"], "eval.every=-1 must not be negative"),
        (["eval.samples=0"], "eval.samples=0 must be above 0"),
        (["eval.placement=both"], "eval.placement=both"),
        (["eval.placement=replica"], "engine.replicas >= 2"),
        (["eval.every=5", "run.phase=critic"], "eval.every=5 with run.phase=critic"),
        (["engine.request_timeout_s=10"], "engine.request_timeout_s=10"),
        (["reward.timeout_s=60"], "reward.timeout_s=60"),
        (["algo.skip_observation=false", "algo.value_level=step_mean"], "algo.value_level"),
        (["optim.policy.warmup_ratio=-0.1"], "optim.policy.warmup_ratio"),
        (["critic.freeze=['(']"], "critic.freeze"),
        (["engine.max_model_len=-1"], "engine.max_model_len=-1"),
        (["env.args.reward=3"], "env.args.reward=3"),
        (["data.path="], "data.path"),
        (["reward.function="], "reward=package.module:function"),
        (["data.mixture={calculator: 0}"], "every environment the weight 0"),
    ],
)
def test_mistakes_are_one_sentence_naming_the_key(overrides, says):
    with pytest.raises(ConfigError) as caught:
        compose([*BASE, *overrides])
    message = str(caught.value)
    assert says in message
    assert "\n" not in message and len(message) < 400


def test_values_reach_the_schema_typed():
    config = compose(
        [
            *BASE,
            "rollout.staleness=2",
            "algo=sao_coding",
            "algo.lambda_policy=0.9",
            "env.args.anything=3",
            "data.mixture={calculator: 0.5, single_turn: 0.5}",
        ]
    )
    assert (config.rollout.staleness, config.algo.eps_low, config.algo.eps_high, config.algo.lambda_policy) == (2, 0.8, 3.0, 0.9)
    assert config.env.args["anything"] == 3
    assert config.data.mixture == {"calculator": 0.5, "single_turn": 0.5}


def test_a_sweep_that_cannot_be_read_is_one_sentence():
    with pytest.raises(ConfigError, match="the sweep cannot be read"):
        expand_sweep(["foo["])


def test_the_short_form_of_the_reward():
    assert compose([*BASE, "reward=my.module:score"]).reward.function == "my.module:score"


def test_a_resolved_config_reads_back_equal(tmp_path):
    config = compose(BASE)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config


DAMAGED = {
    "zero-length": lambda text: "",
    "cut between two lines": lambda text: text[: text.index("eval:")],
    "one line lost": lambda text: text.replace("  batch_size:", "  #batch_size:", 1),
    "cut in a line": lambda text: text[: text.index("rollout:")] + "x: [1, ",
    "zeroed": lambda text: "\0" * len(text),
    "not a mapping": lambda text: "- 1\n- 2\n",
    "a section lost": lambda text: re.sub(r"(?m)^train:\n(  .*\n)+", "train: {}\n", text),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_config_file_is_one_sentence_and_never_filled_up_with_defaults(tmp_path, damage):
    file = tmp_path / "config.yaml"
    text = to_yaml(compose(BASE))
    file.write_text(damage(text))
    assert file.read_text() != text
    with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
        from_yaml(file)
    assert "\n" not in str(caught.value)


def test_an_overlay_changes_a_resolved_config_and_nothing_else():
    config = compose([*BASE, "engine.max_model_len=4096", "env.args.depth=2", "env.args.width=3"])
    same = overlay(config, [])
    assert same == config and same is not config
    changed = overlay(config, ["engine.threads=2", "env.args.depth=5", "engine=gpu", "+env.args.extra=[1]"])
    assert (changed.engine.max_model_len, changed.engine.threads, changed.engine.dtype) == (4096, 2, "bfloat16")
    assert changed.env.args == {"depth": 5, "width": 3, "extra": [1]} and config.env.args == {"depth": 2, "width": 3}
    assert overlay(config, ["env=calculator", "env.args.tool=false"]).env.args == {"tool": False, "operand_min": 10, "operand_max": 99}
    for text in ("engine.thread=2", "train.steps=1,2", "~env.args.depth", "train.steps=x", "experiment=demo"):
        with pytest.raises(ConfigError) as caught:
            overlay(config, [text])
        assert "\n" not in str(caught.value)


def test_evaluation_may_sample_as_training_must_not():
    sampling = ["rollout.sampling.top_p=0.95", "rollout.sampling.top_k=20"]
    assert compose([*BASE, *sampling], training=False).rollout.sampling.top_k == 20
    for text in ("rollout.sampling.top_p=1.5", "rollout.sampling.top_k=-1", "rollout.sampling.min_p=1"):
        with pytest.raises(ConfigError, match=text.split("=")[0]):
            compose([*BASE, text], training=False)


ALGORITHMS = sorted(p.stem for p in (conf_dir() / "algo").glob("*.yaml"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_composes_alone_and_with_an_experiment(name):
    """`name` says which, the file says where its definition comes from, and choosing it over a resolved configuration gives the same."""
    config = compose([*BASE, f"algo={name}"])
    assert config.algo.name == name
    assert compose(["experiment=demo", f"algo={name}"]).algo.loss == config.algo.loss
    assert overlay(compose(BASE), [f"algo={name}"]) == config
    comment = [line for line in (conf_dir() / "algo" / f"{name}.yaml").read_text().splitlines() if line.startswith("# ") and "@package" not in line]
    assert comment


def test_one_part_of_sao_off_changes_that_part_alone():
    base = compose(BASE)
    for name in ("sao_no_dis", "sao_k1", "sao_full_critic", "sao_fixed_lambda", "sao_no_skip", "sao_step_values", "ppo_clip", "tis", "icepop"):
        other = compose([*BASE, f"algo={name}"])
        changed = [key for key in leaf_keys() if value_of(base, key) != value_of(other, key)]
        assert "algo.name" in changed and len(changed) == 2, (name, changed)


def test_bounds_given_as_epsilons_are_legal_and_warned_of():
    assert not cautions(compose(BASE), None)
    for overrides in (["algo.eps_low=1.2"], ["algo=ppo_clip", "algo.loss_args.eps_low=1"]):
        (line,) = cautions(compose([*BASE, *overrides]), None)
        assert "eps_low=1" in line and "leaves no lower bound" in line


@pytest.mark.parametrize(("tasks", "warned"), [(None, True), (40, True), (39, False), (64, True)])
def test_a_running_mean_per_prompt_whose_prompts_never_come_again_is_warned_of(tasks, warned):
    """Every advantage would be 0, and the run would look like one that trains."""
    config = compose([*BASE, "algo.advantage=running_mean", "train.steps=5", "train.batch_size=8"])
    assert bool(cautions(config, tasks)) == warned
    config.algo.advantage_args = {"per_task": False}
    assert not cautions(config, tasks)


def test_choices_name_real_keys_and_contain_the_default():
    for key, choices in CHOICES.items():
        assert value_of(Config(), key) in choices


def test_every_key_is_read_somewhere():
    """A key that parses and does nothing is the field's oldest trap (C89): each leaf must be read outside the schema and its checks."""
    code = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.name not in ("config.py", "config_load.py", "config_algo.py"))
    unread = [key for key in leaf_keys() if not re.search(rf"\.{key.rsplit('.', 1)[-1]}\b|\"{key.rsplit('.', 1)[-1]}\"", code)]
    assert not unread


def test_sweeps_expand_to_every_combination():
    assert expand_sweep(["a=1,2", "b=x", "c=range(0,2)"]) == [
        ["a=1", "b=x", "c=0"],
        ["a=1", "b=x", "c=1"],
        ["a=2", "b=x", "c=0"],
        ["a=2", "b=x", "c=1"],
    ]


def test_the_control_plane_imports_neither_torch_nor_vllm_nor_ray():
    code = (
        "import sys, sao.cli, sao.loop, sao.ledger, sao.rollout.staleness, sao.config_load, sao.inference.pool, sao.inference.protocol, sao.tasks.source, "
        "sao.report.metrics, sao.rewards.runner, sao.agents.turns, sao.runtime.plan, sao.evals.heldout, sao.evals.job, sao.runtime.export, sao.observer, sao.train, "
        "sao.replay.command, sao.report.inspect, sao.report.trust\n"
        "sao.cli.parser()\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_package_is_in_the_wheel():
    import tomllib

    root = SOURCE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("installed from a wheel")
    listed = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(("sao", *p.parent.relative_to(SOURCE).parts)) for p in SOURCE.rglob("__init__.py")}
    found |= {
        ".".join(("sao", "envs", *p.parent.relative_to(root / "envs").parts)) for p in (root / "envs").rglob("__init__.py") if "tests" not in p.parts
    }
    found |= {"sao.conf"}
    assert found == listed


def test_an_environment_of_ones_own_is_named_by_its_class():
    own = "env=sao.envs.calculator.environment:CalculatorEnvironment"
    config = compose(["experiment=demo", own, "env.args.operand_max=20"])
    assert (config.env.name, config.env.target, config.env.args) == ("calculatorenvironment", own.removeprefix("env="), {"operand_max": 20})
    assert overlay(compose(["experiment=demo"]), [own]).env.target == own.removeprefix("env=")
    with pytest.raises(ConfigError, match=r"env=package\.module:Class"):
        compose([*BASE, "env=nope"])
