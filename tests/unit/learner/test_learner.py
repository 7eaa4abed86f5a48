"""TorchLearner in a plain process: one SAO step, what moves and what does not, versions, values, records, canary."""

import json
import math

import numpy as np
import pytest
import torch

from sao.errors import ConfigError, LearnerFailure, UserError
from sao.learner.batching import make_batch, pack
from sao.learner.learner import TorchLearner
from sao.learner.protocol import CONTEXT, DROPPED, FROZEN, NON_FINITE, REJECTED_HIGH, REJECTED_LOW, TRAINED
from sao.learner.scoring import score
from sao.trajectory import FinishReason, Segment
from sao.weights.torch_bundle import unpack
from tests.unit.learner.learner_builders import backbone, batch, config, save_model, segment, trajectory


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model_path):
    def build(total_steps: int = 8, check_logprobs: bool = False, **changes: object) -> TorchLearner:
        return TorchLearner(config(**changes), model_path, total_steps=total_steps, check_logprobs=check_logprobs)

    return build


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def moved(before: dict[str, torch.Tensor], module: torch.nn.Module) -> set[str]:
    return {n for n, p in module.named_parameters() if not torch.equal(before[n], p)}


def on_policy(learner: TorchLearner, episodes, version: int | None = None):
    """The same episodes with behaviour log-probs taken from the learner's own policy, sampled at its version."""
    out = []
    for t in episodes:
        parts = []
        for s in t.segments:
            with torch.no_grad():
                logprobs = score(learner.policy.model, pack(make_batch([trajectory(0, [s])]).samples)).logprobs
            row = np.full(len(s), np.nan, np.float32)
            row[s.action_mask] = logprobs.numpy()
            parts.append(
                Segment(s.token_ids, s.action_mask, row, np.where(s.action_mask, learner.version if version is None else version, -1), s.sampling)
            )
        out.append(trajectory(t.episode_id.ordinal, parts, t.reward, t.finish))
    return out


def test_one_step_trains_actor_and_critic_but_not_frozen_attention(make):
    """C61: the value head moves, frozen attention does not."""
    learner = make()
    critic, policy = weights(learner.critic.model), weights(learner.policy.model)
    report = learner.step(batch(), 0)
    assert report.version == learner.version == 1 and report.step == 0
    changed = moved(critic, learner.critic.model)
    assert "value_head.weight" in changed and "value_head.bias" in changed
    assert changed == {n for n in critic if ".self_attn." not in n}
    assert moved(policy, learner.policy.model) == set(policy)
    assert not critic["value_head.weight"].any()
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm",
                 "critic/lr", "sao/ess", "sao/dis_masked_frac_low", "timing_s/critic", "timing_s/values", "timing_s/advantages", "timing_s/actor",
                 "tokens/action", "off_policy/gap_0/tokens"):  # fmt: skip
        assert math.isfinite(report.metrics[name]), name
    json.dumps(dict(report.metrics))


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_the_critic_takes_its_own_number_of_steps_on_its_own_schedule(make, updates):
    """C60."""
    learner = make(critic__updates=updates, optim__critic__schedule="linear", total_steps=2)
    learner.step(batch(), 0)
    learner.step(batch(seed=1), 1)
    assert learner.critic.gradients.steps == 2 * updates and learner.policy.gradients.steps == 2
    assert learner.critic.gradients.total_steps == 2 * max(1, updates)


def test_critic_only_steps_and_the_critic_phase_leave_the_actor_and_the_version(make):
    for changes, steps in (({"critic__critic_only_steps": 2}, 2), ({"run__phase": "critic"}, 3)):
        learner = make(**changes)
        policy = weights(learner.policy.model)
        for step in range(steps):
            report = learner.step(batch(seed=step), step)
        assert report.version == 0 and not moved(policy, learner.policy.model)
        assert "actor/pg_loss" not in report.metrics and math.isfinite(report.metrics["actor/entropy"])
        assert {int(r) for record in report.records for r in record.mask_reason} == {CONTEXT, FROZEN}
        assert np.isfinite(np.concatenate([r.trainer_logprobs for r in report.records])).any()
    learner = make(critic__critic_only_steps=2)
    assert [learner.step(batch(seed=s), s).version for s in range(4)] == [0, 0, 1, 2]


def test_values_after_or_before_the_critic_steps(make):
    records = {}
    for when in ("before", "after"):
        records[when] = make(algo__values=when, algo__whiten="off").step(batch(), 0).records[0]
    mask = records["before"].mask_reason != CONTEXT
    assert not records["before"].values[mask].any()  # the head starts at zero
    assert records["after"].values[mask].all()
    np.testing.assert_allclose(records["before"].advantages[mask][-1], records["before"].returns[mask][-1])


def test_explained_variance_uses_values_before_this_batch_and_is_absent_without_variance(make):
    learner = make(algo__values="after")
    first = learner.step(batch(), 0)
    assert first.metrics["critic/vf_explained_var"] == pytest.approx(0.0)
    flat = [trajectory(t.episode_id.ordinal, list(t.segments), 1.0) for t in batch()]
    policy = make(algo__whiten="on")
    report = policy.step(flat, 0)
    assert "critic/vf_explained_var" not in report.metrics
    assert report.metrics["sao/whitened"] == 0.0


def test_whitening_switches_itself_off(make):
    """auto: on until explained variance exceeded the threshold for `patience` steps in a row."""
    learner = make(algo__whiten_until_ev=-10.0, algo__whiten_patience=2, total_steps=8)
    assert [learner.step(batch(seed=s), s).metrics["sao/whitened"] for s in range(4)] == [1.0, 1.0, 0.0, 0.0]
    for mode, expected in (("on", 1.0), ("off", 0.0)):
        assert make(algo__whiten=mode).step(batch(), 0).metrics["sao/whitened"] == expected


def test_whitened_advantages_have_unit_spread_and_returns_do_not(make):
    records = make(algo__whiten="on").step(batch(), 0).records
    advantages = np.concatenate([r.advantages[np.isfinite(r.advantages)] for r in records])
    assert abs(advantages.mean()) < 1e-5 and advantages.std(ddof=1) == pytest.approx(1.0, abs=1e-4)
    assert set(np.concatenate([r.returns[np.isfinite(r.returns)] for r in records])) == {0.0, 1.0}


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_the_update_depends_neither_on_micro_batches_nor_on_the_order_of_arrival(make, budget):
    reference, other = make(), make(learner__tokens_per_micro_batch=budget)
    reference.step(batch(), 0)
    other.step(batch()[::-1], 0)
    for a, b in zip(reference.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


def test_the_same_batch_and_seed_give_the_same_bits(make):
    learners = [make(critic__updates=2), make(critic__updates=2)]
    for step in range(3):
        for learner, episodes in zip(learners, (batch(seed=step), batch(seed=step)[::-1]), strict=True):
            learner.step(episodes, step)
    bundles = [learner.gather()[0].buffer.tobytes() for learner in learners]
    assert bundles[0] == bundles[1]


def test_on_policy_tokens_have_ratio_one_and_no_gap(make):
    learner = make(check_logprobs=True)
    report = learner.step(on_policy(learner, batch()), 0)
    for name in ("logprob_gap/max", "logprob_gap/same_version_max"):
        assert report.metrics[name] < 1e-5
    assert report.metrics["off_policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_tokens_of_older_versions_are_checked_under_their_own_weights(make):
    """Stale tokens differ from the current policy, not from the one that sampled them."""
    learner = make(check_logprobs=True, rollout__staleness=2)
    old = on_policy(learner, batch(3))
    for step in range(2):
        learner.step(batch(seed=9), step)
    mixed = old + [trajectory(t.episode_id.ordinal + 10, list(t.segments), t.reward) for t in on_policy(learner, batch(3, seed=5))]
    report = learner.step(mixed, 2)
    assert report.metrics["logprob_gap/same_version_max"] < 1e-5
    assert report.metrics["logprob_gap/same_version_tokens"] > 0
    assert report.metrics["off_policy/gap_2/abs_log_ratio_mean"] > 1e-3 > report.metrics["off_policy/gap_0/abs_log_ratio_mean"]
    learner.step(batch(seed=9), 3)
    assert "logprob_gap/same_version_max" not in learner.step(old, 4).metrics  # version 0 has left the ring
    assert "logprob_gap/same_version_max" not in make().step(batch(), 0).metrics


def test_records_hold_every_segment_and_why_each_token_counted(make):
    rng = np.random.default_rng(0)
    learner = make(algo__eps_low=0.3, algo__eps_high=5.0, algo__truncation="drop", model__dtype="float32")
    scored = on_policy(learner, [trajectory(0, [segment([0, 1, 1, 1, 1, 0], rng=rng)], 1.0)])[0].segments[0]
    shifted = scored.logprobs.copy()
    shifted[1] -= 3.0  # ratio e^3: above the band
    shifted[2] = min(0.0, shifted[2] + 2.0)
    mask = scored.action_mask.copy()
    shifted[4], mask[4] = np.nan, False  # the engine gave no log-prob
    episodes = [
        trajectory(0, [Segment(scored.token_ids, mask, shifted, scored.versions), segment([0, 0], rng=rng)], 1.0),
        trajectory(1, [segment([0, 1], rng=rng)], 0.0, FinishReason.truncated("tokens")),
    ]
    report = learner.step(episodes, 0)
    assert [(r.episode_id, r.segment) for r in report.records] == [((0, 0), 0), ((0, 0), 1), ((1, 0), 0)]
    first, second, third = report.records
    assert first.mask_reason.tolist() == [CONTEXT, REJECTED_HIGH, REJECTED_LOW, TRAINED, NON_FINITE, CONTEXT]
    assert second.mask_reason.tolist() == [CONTEXT, CONTEXT] and third.mask_reason.tolist() == [CONTEXT, DROPPED]
    assert np.array_equal(np.isfinite(first.trainer_logprobs), mask) and first.values.dtype == np.float32
    assert report.metrics["tokens/dropped"] == 1 and report.metrics["tokens/no_logprob"] == 1


def test_gather_carries_every_weight_once_and_the_canary_matches_them(make):
    learner = make()
    learner.step(batch(), 0)
    bundle, canary = learner.gather()
    sent = dict(unpack(bundle))
    expected = weights(learner.policy.model)
    assert set(sent) == set(expected) and "lm_head.weight" not in sent
    assert all(torch.equal(sent[n], expected[n]) for n in sent)
    assert len(canary.token_ids) == 24 and len(canary.logprobs) == 23
    with torch.no_grad():
        logits = learner.policy.model(input_ids=torch.tensor([canary.token_ids]), use_cache=False).logits[0]
    plain = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(canary.token_ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(canary.logprobs), plain, atol=1e-5, rtol=0)
    learner.step(batch(seed=1), 1)
    assert learner.gather()[1].logprobs != canary.logprobs and learner.gather()[1].token_ids == canary.token_ids


def test_reset_optimizer_forgets_the_moments_of_before_a_publication(make):
    """Whether the weights were really fetched in between makes no difference: a learner that trains old batches again publishes nothing."""
    moments = {}
    for name, changes in (
        ("kept", {}),
        ("each", {"weights__reset_optimizer": True}),
        ("second", {"weights__reset_optimizer": True, "weights__publish_every": 2}),
    ):
        learner = make(**changes)
        for step in range(2):
            learner.step(batch(seed=step), step)
        state = learner.policy.gradients.optimizer.state
        moments[name] = {float(s["step"]) for s in state.values()}
        assert {float(s["step"]) for s in learner.critic.gradients.optimizer.state.values()} == {4.0}
    assert moments == {"kept": {2.0}, "each": {1.0}, "second": {2.0}}


def test_export_loads_again_and_a_critic_can_start_from_it(make, model_path, tmp_path):
    learner = make()
    learner.step(batch(), 0)
    learner.export(str(tmp_path))
    again = TorchLearner(config(critic__path=str(tmp_path / "critic")), str(tmp_path / "policy"), total_steps=2)
    for a, b in ((learner.policy.model, again.policy.model), (learner.critic.model, again.critic.model)):
        assert not moved(weights(a), b)
    assert type(backbone(str(tmp_path / "critic"))).__name__ == "LlamaModel"
    with pytest.raises(ConfigError, match="value_head"):
        TorchLearner(config(critic__path=model_path), model_path, total_steps=2)


@pytest.mark.parametrize("changes", [{}, {"model__dtype": "bfloat16"}, {"algo__whiten": "auto"}])
def test_a_saved_learner_goes_on_bit_for_bit(make, tmp_path, changes):
    learner, resumed = make(**changes), make(**changes)
    learner.step(batch(), 0)
    learner.save(str(tmp_path))
    resumed.restore(str(tmp_path))
    for one in (learner, resumed):
        one.step(batch(seed=1), 1)
    assert resumed.version == 2 and learner.gather()[0].buffer.tobytes() == resumed.gather()[0].buffer.tobytes()


def test_a_checkpoint_of_another_model_is_refused(make, tmp_path):
    learner = make()
    learner.save(str(tmp_path / "step"))
    other = TorchLearner(config(), save_model(tmp_path / "other", "qwen3"), total_steps=8)
    with pytest.raises(UserError, match="another model"):
        other.restore(str(tmp_path / "step"))


def test_lr_zero_is_a_control_that_stays_flat(make):
    learner = make(optim__policy__lr=0.0)
    policy = weights(learner.policy.model)
    assert learner.step(batch(), 0).version == 1 and not moved(policy, learner.policy.model)


SWITCHES = [
    *({"algo__truncation": x} for x in ("bootstrap", "drop")),
    *({"algo__value_level": x} for x in ("step_mean", "step_last")),
    *({f"algo__{k}": v} for k, v in {"kl_coef": 0.5, "entropy_coef": 0.1, "lambda_policy": 0.5, "detach_ratio": False, "gamma": 0.9}.items()),
    *({f"algo__{k}": v} for k, v in {"lambda_critic": 0.5, "skip_observation": False, "lambda_length": "turns", "whiten": "off"}.items()),
    *({f"algo__{k}": v} for k, v in {"alpha": 3.0, "eps_low": 0.01, "values": "before"}.items()),
    *({f"critic__{k}": v} for k, v in {"freeze": [], "head_init": "normal", "updates": 1}.items()),
    *({f"optim__policy__{k}": v} for k, v in {"grad_clip": 0.1, "weight_decay": 0.5, "betas": [0.5, 0.5], "eps": 1.0}.items()),
    *({"model__autocast": True}, {"model__dtype": "bfloat16"}, {"seed": 3, "learner__tokens_per_micro_batch": 30}),
]


def after_two_steps(learner: TorchLearner) -> bytes:
    """Two, since K, freezing and gamma act through the critic."""
    episodes = batch()
    episodes[1] = trajectory(1, list(episodes[1].segments), 1.0, FinishReason.truncated("turns"))
    for step in range(2):
        learner.step(episodes, step)
    return learner.gather()[0].buffer.tobytes()


@pytest.fixture(scope="module")
def default_outcome(model_path) -> bytes:
    return after_two_steps(TorchLearner(config(), model_path, total_steps=8))


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda s: ",".join(s))
def test_every_switch_changes_the_update(make, default_outcome, switch):
    """C89: no key that parses and does nothing."""
    assert after_two_steps(make(**switch)) != default_outcome


def test_non_finite_updates_stop_with_a_name_and_untouched_weights(make):
    learner = make()
    with torch.no_grad():
        learner.policy.model.get_output_embeddings().weight[0] = float("nan")
    with pytest.raises(LearnerFailure, match=r"optim\.policy.*not finite"):
        learner.step(batch(), 0)
    assert learner.version == 0


def test_a_batch_with_nothing_to_train_changes_nothing(make):
    learner = make(algo__truncation="drop")
    policy = weights(learner.policy.model)
    cut = [trajectory(t.episode_id.ordinal, list(t.segments), t.reward, FinishReason.truncated("time")) for t in batch(3)]
    report = learner.step(cut, 0)
    assert report.version == 0 and not moved(policy, learner.policy.model) and "actor/pg_loss" not in report.metrics
    assert all(math.isfinite(v) for v in report.metrics.values())
    assert learner.step([], 1).version == 0


def test_going_back_keeps_the_count_of_versions(make, tmp_path):
    """The state of version 1 comes back as version 3: its weights, its moments, and the numbers go on from there, also through a checkpoint."""
    learner, other = make(), make()
    learner.step(batch(), 0)
    learner.save(str(tmp_path / "good"))
    kept = weights(learner.policy.model)
    for step in (1, 2):
        learner.step(batch(), step)
    learner.restore(str(tmp_path / "good"))
    learner.renumber(3)
    assert not moved(kept, learner.policy.model) and learner.version == 3 and learner.policy.gradients.steps == 1
    learner.save(str(tmp_path / "later"))
    other.restore(str(tmp_path / "later"))
    assert learner.step(batch(), 3).version == other.step(batch(), 3).version == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run__phase": "warm"}, "phase"),
        ({"critic__updates": -1}, "updates"),
        ({"critic__freeze": ["nothing_like_it"]}, "freeze"),
        ({"critic__head_init": "ones"}, "head_init"),
        ({"learner__attention": "eager"}, "attention"),
        ({"learner__device": "tpu"}, "device"),
        ({"model__dtype": "int8"}, "dtype"),
    ],
)
def test_refusals(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_a_run_without_steps_is_refused(make):
    with pytest.raises(ConfigError, match=r"train\.steps"):
        make(total_steps=-1)


def test_it_learns_which_token_pays(make):
    """Signs, masks and positions all the way: two sampled tokens, the first pays when it is 5; success rises from chance to nearly always."""
    learner = make(total_steps=22, optim__policy__lr=2e-2, critic__critic_only_steps=2)
    rng, count, success = np.random.default_rng(0), 24, []
    mask = np.array([False, False, True, True])
    for step in range(24):
        tokens, logprobs = np.tile([1, 2], (count, 1)), np.full((count, 4), np.nan)
        for position in (2, 3):
            with torch.no_grad():
                logits = learner.policy.model(input_ids=torch.from_numpy(tokens), use_cache=False).logits[:, -1]
            logp = torch.log_softmax(logits.double(), -1).numpy()
            chosen = np.array([rng.choice(len(row), p=np.exp(row) / np.exp(row).sum()) for row in logp])
            tokens = np.concatenate([tokens, chosen[:, None]], 1)
            logprobs[:, position] = logp[np.arange(count), chosen]
        paid = (tokens[:, 2] == 5).astype(float)
        success.append(paid.mean())
        versions = np.where(mask, learner.version, -1)
        learner.step([trajectory(i, [Segment(tokens[i], mask, logprobs[i], versions)], paid[i]) for i in range(count)], step)
    assert np.mean(success[:3]) < 0.3 and np.mean(success[-3:]) > 0.9
