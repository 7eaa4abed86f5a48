"""The arithmetic of the memory plan, and what a plan that does not fit says."""

from __future__ import annotations

import pytest

from sao.config import Config
from sao.errors import ConfigError
from sao.runtime.memory import MB, activation_bytes, engine_parts, learner_parts, object_store_mb, with_advice
from sao.runtime.models import ModelFacts
from sao.runtime.plan import Machine, check_plan, make_plan

HERE = Machine(cores=8, total_mb=32_000, available_mb=24_000, gpus=0)


def model(**changes: object) -> ModelFacts:
    """100 Mi parameters: 400 MB in float32; a quarter of them attention, a tenth an untied head."""
    tensors = {
        "model.embed_tokens.weight": 35 * MB,
        "model.layers.0.mlp.up_proj.weight": 30 * MB,
        "model.layers.0.self_attn.q_proj.weight": 25 * MB,
        "lm_head.weight": 10 * MB,
    }
    sizes = {"path": "m", "tensors": tensors, "context": 1024, "layers": 10, "width": 512, "feed_forward": 1024, "vocabulary": 32_768}
    return ModelFacts(**{**sizes, "kv_elements_per_token": 5_120, **changes})


def configured() -> Config:
    config = Config()
    config.rollout.max_tokens = config.engine.max_model_len = 512
    config.rollout.staleness = 1
    return config


def test_the_engine_holds_weights_a_packed_head_and_its_cache():
    config = configured()
    parts = engine_parts(config, model(), on_gpu=False)
    assert parts["weights"] == 400 + 64 and parts["KV"] == config.engine.kv_cache_mb
    config.engine.dtype = "bfloat16"
    assert engine_parts(config, model(), on_gpu=False)["weights"] == 200 + 32
    assert "weights" not in engine_parts(config, model(), on_gpu=True), "there they are the GPU's"


def test_the_learner_holds_weights_gradients_moments_and_kept_versions():
    config = configured()
    parts = learner_parts(config, model(), on_gpu=False)
    assert parts["policy"] == 4 * 400
    assert parts["critic"] == 360 + 3 * 260, "no head; attention frozen: weights only"
    assert parts["kept versions"] == 3 * 400 and parts["bundle"] == 400
    config.algo.advantage = "batch_mean"
    assert "critic" not in learner_parts(config, model(), on_gpu=False)
    assert "policy and critic" not in make_plan(config, model(), HERE).text()
    config.algo.advantage = "gae"
    config.critic.freeze = []
    assert learner_parts(config, model(), on_gpu=False)["critic"] == 4 * 360
    config.rollout.staleness = 4
    assert learner_parts(config, model(), on_gpu=False)["kept versions"] == 6 * 400
    config.model.dtype = "bfloat16"
    assert learner_parts(config, model(), on_gpu=False)["policy"] == 4 * 200
    config.algo.kl_coef = 0.1
    assert learner_parts(config, model(), on_gpu=False)["policy"] == 5 * 200
    config.model.dtype, config.model.autocast = "float32", True
    assert learner_parts(config, model(), on_gpu=False)["bf16 copy"] == 200
    on_gpu = learner_parts(config, model(), on_gpu=True)
    assert set(on_gpu) == {"runtime", "kept versions", "bundle"}


def test_activations_grow_with_the_micro_batch_up_to_what_a_batch_can_fill():
    config = configured()
    config.train.batch_size = 8
    sizes = []
    for tokens in (1024, 2048, 4096, 8192):
        config.learner.tokens_per_micro_batch = tokens
        sizes.append(activation_bytes(config, model()))
    assert sizes[1] - sizes[0] == pytest.approx((sizes[2] - sizes[1]) / 2) and sizes[3] == sizes[2]


def test_the_object_store_holds_two_copies_of_the_weights():
    config = configured()
    assert object_store_mb(config, model()) == 256 + 800
    config.launcher.object_store_mb = 300
    assert object_store_mb(config, model()) == 300


def test_the_plan_says_each_part_and_adds_up():
    config = configured()
    plan = make_plan(config, model(), HERE)
    assert [actor.name for actor in plan.actors] == ["ray", "engine-0", "learner", "worker-0"]
    assert plan.memory_mb == sum(sum(actor.parts.values()) for actor in plan.actors)
    text = plan.text()
    assert "kept versions 1200" in text and "KV 128" in text and f"{plan.memory_mb} MB" in text
    check_plan(config, plan, model())


def changed(key: str, value: int) -> Config:
    config = configured()
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.kv_cache_mb", 60_000),
        ("learner.tokens_per_micro_batch", 65_536),
        ("rollout.staleness", 100),
        ("rollout.workers", 200),
        ("launcher.object_store_mb", 90_000),
    ],
)
def test_what_does_not_fit_names_the_key_to_lower(key, value):
    config = changed(key, value)
    with pytest.raises(ConfigError, match=f"24000 MB available: .* lower {key}"):
        check_plan(config, make_plan(config, model(), HERE), model())


def test_a_model_that_is_too_large_and_too_many_engines_are_named():
    config = configured()
    large = model(tensors={"model.embed_tokens.weight": 3000 * MB, "model.layers.0.self_attn.q_proj.weight": MB})
    with pytest.raises(ConfigError, match=r"learner takes .* for policy; lower the model's size"):
        check_plan(config, make_plan(config, large, HERE), large)
    config.engine.replicas = 30
    with pytest.raises(ConfigError, match=r"30 engines take .* lower engine\.replicas"):
        check_plan(config, make_plan(config, model(), HERE), model())


def test_the_cache_must_hold_one_whole_sequence():
    config = configured()
    config.engine.max_model_len, config.engine.kv_cache_mb = 0, 16
    with pytest.raises(
        ConfigError, match=r"holds 819 tokens, less than one sequence of the context of 1024; raise it, or set engine\.max_model_len=512"
    ):
        check_plan(config, make_plan(config, model(), HERE), model())
    config.engine.dtype = "bfloat16"
    check_plan(config, make_plan(config, model(), HERE), model())


MEASURED = [  # MB of peak resident memory; see sao.runtime.memory
    ("float32", 1024, 2575),
    ("bfloat16", 1024, 2146),
]


@pytest.mark.parametrize(("dtype", "kv", "measured"), MEASURED)
def test_the_engine_s_bound_is_above_what_smollm2_took_and_not_far(dtype, kv, measured):
    config = configured()
    config.engine.dtype, config.engine.kv_cache_mb = dtype, kv
    planned = sum(engine_parts(config, smollm2(), on_gpu=False).values())
    assert measured <= planned <= 1.3 * measured


@pytest.mark.parametrize(("tokens", "autocast", "measured"), [(512, False, 3147), (2048, True, 5627)])
def test_the_learner_s_bound_is_above_what_a_policy_s_step_took_and_not_far(tokens, autocast, measured):
    config = configured()
    config.learner.tokens_per_micro_batch, config.model.autocast = tokens, autocast
    parts = learner_parts(config, smollm2(), on_gpu=False)
    planned = sum(parts.get(part, 0) for part in ("runtime", "policy", "activations", "bf16 copy"))
    assert measured <= planned <= 1.3 * measured


def smollm2() -> ModelFacts:
    tensors = {"model.embed_tokens.weight": 28_311_552, "model.layers.0.self_attn.q_proj.weight": 106_203_456}
    return ModelFacts("m", tensors, 8192, 30, 576, 1536, 49_152, 2 * 30 * 3 * 64)


@pytest.mark.parametrize(
    "said",
    [
        "engine-0 failed with RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "engine-0 failed with OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "engine engine-0 could not start: No available memory for the cache blocks.",
        "engine-0 died (Task was killed due to the node running low on memory.)",
        "engine-0 failed with MemoryError: ",
    ],
)
def test_a_want_of_memory_names_the_keys_to_lower_once(said):
    advised = with_advice("engine-0", said)
    assert advised.startswith(said) and "lower engine.kv_cache_mb" in advised
    assert with_advice("engine-0", advised) == advised


def test_a_kill_by_the_kernel_is_advised_on_and_another_death_is_not():
    assert "lower learner.tokens_per_micro_batch" in with_advice("learner", "learner died", killed_by_kernel=True)
    assert with_advice("learner", "learner died (connection error code 2)") == "learner died (connection error code 2)"


def test_more_threads_than_cores_are_refused_unless_asked_for():
    config = configured()
    config.engine.threads = 8
    plan = make_plan(config, model(), HERE)
    with pytest.raises(ConfigError, match=r"want 9 threads and this machine has 8 cores.*launcher.oversubscribe=true"):
        check_plan(config, plan, model())
    config.launcher.oversubscribe = True
    check_plan(config, plan, model())


def test_shared_prefixes_need_the_attention_that_follows_them():
    config = configured()
    config.learner.sharing, config.learner.attention = "packed", "flash_attention_2"
    with pytest.raises(ConfigError, match=r"learner\.sharing=packed needs learner\.attention=packed_sdpa"):
        check_plan(config, make_plan(config, model(), HERE), model())
