"""From command-line overrides to a checked `Config`: Hydra composes, the schema types, `check` refuses what contradicts itself.

Every refusal is a `ConfigError` of one sentence that names the key; nothing has been started when it is raised.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from sao.config import Config, EnvConfig, OptimizerConfig
from sao.config_algo import check_algorithm
from sao.config_data import check_curriculum, environments_of
from sao.config_messages import explain
from sao.environments.files import own_overrides
from sao.errors import ConfigError
from sao.online.check import check_online

CHOICES: dict[str, tuple[str, ...]] = {
    "run.phase": ("rl", "critic"),
    "run.progress": ("auto", "rich", "plain"),
    "algo.denominator": ("all", "accepted"),
    "algo.lambda_length": ("tokens", "turns"),
    "algo.value_level": ("token", "step_mean", "step_last"),
    "algo.values": ("after", "before"),
    "algo.whiten": ("auto", "on", "off"),
    "algo.truncation": ("terminal", "bootstrap", "drop"),
    "model.dtype": ("float32", "bfloat16"),
    "model.reasoning": ("keep", "template"),
    "critic.head_init": ("zero", "normal"),
    "engine.dtype": ("float32", "bfloat16"),
    "weights.kv_on_publish": ("keep", "recompute"),
    "rollout.overdue": ("wait", "drop"),
    "learner.device": ("auto", "cpu", "cuda"),
    "learner.sharing": ("off", "packed"),
    "reward.mode": ("auto", "async", "process"),
    "eval.placement": ("hold", "replica"),
    "logger.wandb": ("offline", "online", "disabled"),
    "logger.trajectories": ("all", "none"),
    "optim.policy.schedule": ("constant", "linear", "cosine"),
    "optim.critic.schedule": ("constant", "linear", "cosine"),
}

# Groups whose choice must not be silently shadowed by a free-form mapping: keys below these are the user's own.
OPEN_KEYS = ("env.args", "model.factory_args", "data.mixture", "data.variants", "data.curriculum_args", "algo.loss_args", "algo.advantage_args")

LOWEST_TEMPERATURE = 0.01  # below it vLLM's softmax overflows; 0 is greedy

REFUSED_SAMPLING = {
    "presence_penalty": "penalties change the sampled distribution and break the importance ratio; remove the key",
    "frequency_penalty": "penalties change the sampled distribution and break the importance ratio; remove the key",
    "repetition_penalty": "penalties change the sampled distribution and break the importance ratio; remove the key",
}


def conf_dir() -> Path:
    """The folder of the shipped configuration, in a checkout and in a wheel alike."""
    import sao.conf

    return Path(sao.conf.__path__[0]).resolve()


def leaf_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, groups left out."""
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        nested = _nested(field)
        if nested:
            yield from leaf_keys(nested, f"{key}.")
        else:
            yield key


def _nested(field: dataclasses.Field[Any]) -> type | None:
    if field.default_factory is dataclasses.MISSING:
        return None
    value = field.default_factory()
    return type(value) if dataclasses.is_dataclass(value) else None


def nearest(key: str) -> str:
    """'; did you mean ...?' for an unknown key or group, or where all keys are listed."""
    keys = list(leaf_keys())
    top = [*_groups(), *ALIASES, *(k.partition(".")[0] for k in keys)]  # groups, short forms, sections and keys without a dot
    found = difflib.get_close_matches(key, top, n=1, cutoff=0.75) or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not found:
        last = key.rsplit(".", 1)[-1]
        by_last: dict[str, list[str]] = {}
        for k in keys:
            by_last.setdefault(k.rsplit(".", 1)[-1], []).append(k)
        names = difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
        found = by_last[names[0]][:3] if names else []
    return f"; did you mean {' or '.join(repr(k) for k in found)}?" if found else "; `sao config --keys` lists every key"


def _is_known(key: str) -> bool:
    return key in set(leaf_keys()) or any(key.startswith(f"{open_}.") for open_ in OPEN_KEYS)


def _groups() -> dict[str, list[str]]:
    root = conf_dir()
    return {d.name: sorted(p.stem for p in d.glob("*.yaml")) for d in sorted(root.iterdir()) if d.is_dir() and any(d.glob("*.yaml"))}


def _precheck(overrides: Sequence[str]) -> None:
    """Refuse unknown keys and groups ourselves: Hydra's own messages name its internals."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    groups = _groups()
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{text!r} is not an override of the form key=value ({str(error).splitlines()[0]})") from None
        key = override.key_or_group.lstrip("+~")
        name = key.rsplit(".", 1)[-1]
        if key.startswith("rollout.sampling.") and name in REFUSED_SAMPLING:
            raise ConfigError(f"{key} is refused for training: {REFUSED_SAMPLING[name]}")
        if key in groups:
            value = override.value()
            if isinstance(value, str) and value not in groups[key]:
                close = difflib.get_close_matches(value, groups[key], n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(groups[key])}"
                form = ", or write env=package.module:Class for a class of yours (`sao env init NAME` begins one)" if key == "env" else ""
                raise ConfigError(f"{key}={value} names no file conf/{key}/{value}.yaml; {hint}{form}")
            continue
        if key == "algo.name" and override.value() in groups["algo"]:
            raise ConfigError(f"algo.name={override.value()} would only call the algorithm so; choose it with algo={override.value()}")
        if not _is_known(key):
            section = any(k.startswith(f"{key}.") for k in leaf_keys())
            if section:
                raise ConfigError(
                    f"{key} is a section, not a value: set one of its keys, for instance {next(k for k in leaf_keys() if k.startswith(key + '.'))!r}"
                )
            raise ConfigError(f"unknown key {key!r}{nearest(key)}")


# Short forms of the commonest keys.
ALIASES = {"reward": "reward.function"}


CLASS_NAME = re.compile(r"[\w.]+:(\w+)")


def _expand(overrides: Sequence[str]) -> list[str]:
    """Short forms written out: `reward=module:function`, `env=module:Class`, and `env=NAME` of a folder here with a configuration of its own."""
    found: list[str] = []
    groups = _groups()
    for text in overrides:
        key, separator, value = text.partition("=")
        own_class = CLASS_NAME.fullmatch(value)
        own_file = own_overrides(value, groups) if key == "env" and value not in groups["env"] else None
        if key == "env" and own_class:
            found += ["env=custom", f"env.target={value}", f"env.name={own_class[1].lower()}"]
        elif own_file is not None:
            found = [*own_file, *found]
        else:
            found.append(f"{ALIASES[key]}={value}" if separator and key in ALIASES else text)
    return found


def compose(overrides: Sequence[str], *, training: bool = True) -> Config:
    """Compose conf/ with `overrides` (Hydra syntax) into a typed, checked Config. `training` as for `check`."""
    overrides = _expand(overrides)
    _precheck(overrides)
    config = _compose_raw(overrides)
    check(config, training=training)
    return config


def overlay(config: Config, overrides: Sequence[str]) -> Config:
    """A resolved configuration, such as a run's, with further overrides on top; unchecked.

    `group=choice` comes before `key=value`, as in Hydra: `env=choice` replaces the section, another group's file is merged into its own.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    texts = _expand(overrides)
    _precheck(texts)
    parsed = OverridesParser.create().parse_overrides(texts)
    groups = _groups()
    node = OmegaConf.structured(config)
    try:
        for override in sorted(parsed, key=lambda override: override.key_or_group.lstrip("+") not in groups):
            key = override.key_or_group.lstrip("+")
            if override.is_delete() or override.is_sweep_override():
                raise ConfigError(
                    f"{override.input_line!r} deletes or sweeps, which a configuration that is resolved already cannot; write {key}=VALUE"
                )
            if key == "env" and key in groups:
                node.env = OmegaConf.structured(load_env(str(override.value())))
            elif key in groups:
                _refuse(
                    not hasattr(config, key),
                    f"{key}={override.value()} composes a whole configuration, and this one is resolved already; set single keys",
                )
                node = OmegaConf.merge(node, _choice(key, str(override.value())))
            else:
                OmegaConf.update(node, key, override.value(), force_add=True)
        OmegaConf.resolve(node)
        return cast(Config, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise ConfigError(one_sentence(error)) from None


def _choice(group: str, name: str) -> Any:
    """conf/<group>/<name>.yaml as a piece of the whole configuration: below its group, or whole where its header says so (an algorithm's)."""
    from omegaconf import OmegaConf

    path = conf_dir() / group / f"{name}.yaml"
    piece = OmegaConf.load(path)
    return piece if path.read_text().startswith("# @package _global_") else {group: piece}


@functools.cache
def _register_schema() -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)


def _compose_raw(overrides: Sequence[str]) -> Config:
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_schema()
    plain = [_open_key(text) for text in overrides]
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            node = hydra.compose("config", overrides=plain)
        OmegaConf.resolve(node)
        return cast(Config, OmegaConf.to_object(node))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_sentence(error)) from None


def _open_key(text: str) -> str:
    """Let an open mapping, or a key below one, be set without Hydra's `+`."""
    key = text.split("=", 1)[0]
    return f"++{text}" if any(key == open_ or key.startswith(f"{open_}.") for open_ in OPEN_KEYS) else text


def one_sentence(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause)
    first = text.splitlines()[0].strip() if text else type(cause).__name__
    match = re.search(r"full_key: (\S+)", text)
    mend = explain(first, match.group(1) if match else "")
    if mend:
        return mend
    if match and match.group(1) not in first:
        first = f"{match.group(1)}: {first}"
    if "not in struct" in first or "not in 'Config" in first or "is not in" in first:
        key = match.group(1) if match else first
        return f"unknown key {key!r}{nearest(key)}"
    return first


def load_env(name: str) -> EnvConfig:
    """conf/env/<name>.yaml as an EnvConfig (for `data.mixture`)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = conf_dir() / "env" / f"{name}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise ConfigError(f"data.mixture names the environment {name!r}, but there is no conf/env/{name}.yaml; there are {', '.join(known)}")
    try:
        return cast(EnvConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EnvConfig), OmegaConf.load(path))))
    except OmegaConfBaseException as error:
        raise ConfigError(f"conf/env/{name}.yaml: {one_sentence(error)}") from None


def environments(config: Config) -> list[EnvConfig]:
    """The environments of a run: `env` alone, or those of `data.mixture` (with `env` as configured when it is among them)."""
    return environments_of(config, load_env)


def value_of(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)


def check(config: Config, *, training: bool = True) -> None:
    """Refuse values out of range and combinations that contradict each other.

    training=False is for a configuration that only evaluates: any sampling the engine knows is allowed, and held-out tasks are enough.
    """
    for key, choices in CHOICES.items():
        value = value_of(config, key)
        if value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1)
            raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}" + (f"; did you mean {close[0]!r}?" if close else ""))
    _check_ranges(config)
    if training:
        _check_sampling(config)
        check_algorithm(config)
    else:
        _check_evaluation_sampling(config)
    _check_combinations(config, training)
    if training:
        check_online(config)


def _check_ranges(config: Config) -> None:
    for key in leaf_keys():
        value = value_of(config, key)
        numbers = value if isinstance(value, list) else [value]
        _refuse(any(isinstance(n, float) and not math.isfinite(n) for n in numbers), f"{key}={value} is not a finite number")
    positive = (
        "train.steps", "train.batch_size", "engine.replicas", "engine.max_num_seqs", "engine.threads", "engine.tensor_parallel_size", "engine.kv_cache_mb",
        "engine.start_timeout_s", "engine.request_timeout_s", "engine.stall_s", "engine.canary_tolerance", "weights.publish_every", "rollout.workers", "rollout.time_limit_s",
        "rollout.max_turns", "rollout.max_turn_tokens", "rollout.max_tokens", "rollout.observation_limit", "data.max_prompt_chars", "learner.tokens_per_micro_batch",
        "learner.threads", "learner.timeout_s", "reward.timeout_s", "reward.processes", "eval.tasks", "eval.samples", "algo.alpha",
        "warmstart.steps", "warmstart.batch_size", "launcher.silence_s", "checkpoint.keep",
    )  # fmt: skip
    for key in positive:
        _refuse(value_of(config, key) <= 0, f"{key}={value_of(config, key)} must be above 0")
    not_negative = (
        "rollout.staleness", "rollout.retries", "rollout.max_running", "engine.step_interval_ms", "engine.block_size", "eval.every", "critic.critic_only_steps",
        "critic.updates",
        "algo.kl_coef", "algo.entropy_coef", "algo.whiten_patience", "data.pool", "data.curriculum_recent", "launcher.num_cpus", "launcher.restarts",
        "checkpoint.every",
        "launcher.object_store_mb",
    )  # fmt: skip
    for key in not_negative:
        _refuse(value_of(config, key) < 0, f"{key}={value_of(config, key)} must not be negative")
    shares = ("algo.gamma", "algo.lambda_critic", "warmstart.clean_share", "engine.gpu_memory_utilization")
    for key in shares:
        _refuse(not 0 <= value_of(config, key) <= 1, f"{key}={value_of(config, key)} must lie in [0, 1]")
    for name, optimizer in (("policy", config.optim.policy), ("critic", config.optim.critic)):
        _check_optimizer(f"optim.{name}", optimizer)
    for name, weight in config.data.mixture.items():
        _refuse(weight < 0, f"data.mixture.{name}={weight} must not be negative")
    weights = config.data.mixture.values()
    _refuse(bool(weights) and not any(weights), "data.mixture gives every environment the weight 0; raise one")
    for temperature in config.eval.temperatures:
        _refuse(temperature < 0, f"eval.temperatures holds {temperature}; a temperature must not be negative (0 is greedy)")
        _refuse(0 < temperature < LOWEST_TEMPERATURE, f"eval.temperatures holds {temperature}; below {LOWEST_TEMPERATURE} use 0, which is greedy")


def _check_optimizer(key: str, optimizer: OptimizerConfig) -> None:
    _refuse(optimizer.lr < 0, f"{key}.lr={optimizer.lr} must not be negative (0 freezes the model)")
    _refuse(len(optimizer.betas) != 2 or not all(0 <= b < 1 for b in optimizer.betas), f"{key}.betas={optimizer.betas} must be two numbers in [0, 1)")
    _refuse(optimizer.eps < 0, f"{key}.eps={optimizer.eps} must not be negative")
    _refuse(optimizer.weight_decay < 0, f"{key}.weight_decay={optimizer.weight_decay} must not be negative")
    _refuse(optimizer.grad_clip <= 0, f"{key}.grad_clip={optimizer.grad_clip} must be above 0")
    _refuse(not 0 <= optimizer.warmup_ratio < 1, f"{key}.warmup_ratio={optimizer.warmup_ratio} must lie in [0, 1)")
    _refuse(not 0 <= optimizer.final_lr_ratio <= 1, f"{key}.final_lr_ratio={optimizer.final_lr_ratio} must lie in [0, 1]")


def _check_sampling(config: Config) -> None:
    sampling = config.rollout.sampling
    why = "the importance ratio holds only for the raw softmax; use it in evaluation, not in training"
    _refuse(
        sampling.temperature <= 0,
        f"rollout.sampling.temperature={sampling.temperature} is refused for training: greedy tokens have no distribution; use 1.0",
    )
    _refuse(
        sampling.temperature < LOWEST_TEMPERATURE,
        f"rollout.sampling.temperature={sampling.temperature} is below {LOWEST_TEMPERATURE}, which no engine samples at",
    )
    _refuse(sampling.top_p != 1.0, f"rollout.sampling.top_p={sampling.top_p} is refused for training: {why} (set 1.0)")
    _refuse(sampling.top_k != 0, f"rollout.sampling.top_k={sampling.top_k} is refused for training: {why} (set 0)")
    _refuse(sampling.min_p != 0.0, f"rollout.sampling.min_p={sampling.min_p} is refused for training: {why} (set 0.0)")


def _check_evaluation_sampling(config: Config) -> None:
    sampling = config.rollout.sampling
    _refuse(not 0 < sampling.top_p <= 1, f"rollout.sampling.top_p={sampling.top_p} must lie in (0, 1] (1 is off)")
    _refuse(sampling.top_k < 0, f"rollout.sampling.top_k={sampling.top_k} must not be negative (0 is off)")
    _refuse(not 0 <= sampling.min_p < 1, f"rollout.sampling.min_p={sampling.min_p} must lie in [0, 1) (0 is off)")


def _check_combinations(config: Config, training: bool) -> None:
    rollout, every = config.rollout, config.weights.publish_every
    _refuse(
        rollout.staleness < every - 1,
        f"weights.publish_every={every} needs rollout.staleness >= {every - 1}, which is {rollout.staleness}: episodes would be stale before new weights arrive",
    )
    _refuse(
        bool(config.model.path) and bool(config.model.factory) and not config.model.path.strip(),
        "model.path is blank; name a Hugging Face directory or leave it empty to use model.factory",
    )
    _refuse(
        not config.model.path and not config.model.factory, "model.path is empty: name a local Hugging Face directory or hub id, or choose model=demo"
    )
    _refuse(
        rollout.max_turn_tokens >= rollout.max_tokens,
        f"rollout.max_turn_tokens={rollout.max_turn_tokens} must be below rollout.max_tokens={rollout.max_tokens}",
    )
    _refuse(
        config.engine.request_timeout_s < rollout.time_limit_s,
        f"engine.request_timeout_s={config.engine.request_timeout_s:g} is below rollout.time_limit_s={rollout.time_limit_s:g}: "
        "a slow request would look like a dead engine; raise it",
    )
    _refuse(
        bool(config.reward.function) and config.reward.timeout_s >= rollout.time_limit_s,
        f"reward.timeout_s={config.reward.timeout_s:g} must be below rollout.time_limit_s={rollout.time_limit_s:g}, or no reward can time out before its episode does",
    )
    _refuse(config.engine.max_model_len < 0, f"engine.max_model_len={config.engine.max_model_len} must not be negative (0 is the model's own limit)")
    for pattern in config.critic.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"critic.freeze has {pattern!r}, which is not a regular expression: {error}") from None
    check_curriculum(config)
    limit = config.engine.max_model_len
    _refuse(
        0 < limit < rollout.max_tokens,
        f"rollout.max_tokens={rollout.max_tokens} exceeds engine.max_model_len={limit}; lower the first or raise the second",
    )
    _refuse(
        config.run.phase == "critic" and config.critic.path != "", "critic.path is set with run.phase=critic, which starts a fresh critic; empty it"
    )
    _refuse(
        training and config.eval.placement == "replica" and config.engine.replicas < 2,
        f"eval.placement=replica takes one engine out of training and needs engine.replicas >= 2, which is {config.engine.replicas}; raise it or use hold",
    )
    _refuse(
        config.run.phase == "critic" and config.eval.every > 0,
        f"eval.every={config.eval.every} with run.phase=critic would evaluate a policy that never changes; set eval.at_start instead",
    )
    if config.env.name == "single_turn" and not config.data.mixture:
        paths = [config.data.path, config.env.data_path] + ([] if training else [config.data.eval_path, config.env.eval_path])
        _refuse(
            not any(paths),
            f"env=single_turn needs tasks: set data.{'' if training else 'eval_'}path to a .jsonl or .parquet file, a datasets directory or a hub id",
        )
        reward = config.env.args.get("reward") or {}
        _refuse(
            not isinstance(reward, dict), f"env.args.reward={reward} must be a mapping of reward keys, for instance {{function: package.module:name}}"
        )
        own = dict(reward).get("function")
        _refuse(not config.reward.function and not own, "env=single_turn needs a score: set reward=package.module:function")


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """`a=1,2 b=x,y` -> the four combinations, in Hydra's sweep syntax."""
    import itertools

    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    axes: list[list[str]] = []
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"the sweep cannot be read ({str(error).splitlines()[0]}); write key=a,b") from None
    for override in parsed:
        key = override.get_key_element()
        if override.is_sweep_override():
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([f"{key}={override.get_value_element_as_str()}"])
    return [list(combination) for combination in itertools.product(*axes)]
