"""Every shipped algorithm in the learner: one step, the critic only where it is needed, splits that change nothing, and going on bit for bit."""

import math

import numpy as np
import pytest
import torch

from sao.config import Config
from sao.config_load import conf_dir, overlay
from sao.errors import LearnerFailure
from sao.learner.batching import make_batch, pack
from sao.learner.learner import TorchLearner
from sao.learner.protocol import CONTEXT, REJECTED_HIGH, TRAINED
from sao.learner.scoring import score
from sao.trajectory import FinishReason, Segment
from tests.unit.learner.learner_builders import batch, config, save_model, trajectory

ALGORITHMS = sorted(p.stem for p in (conf_dir() / "algo").glob("*.yaml"))
CRITIC_FREE = {"grpo", "grpo_dis", "running_mean", "running_mean_global", "batch_mean", "single_dis", "reinforce"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def settings(name: str, **changes: object) -> Config:
    """The algorithm as its file says, over rates a tiny model can feel and a band that lets the tests' log-probs pass."""
    made = overlay(config(**changes), [f"algo={name}"])
    if made.algo.loss == "dis":
        made.algo.eps_low, made.algo.eps_high = 0.99, 1e6
    if made.rollout.rollouts_per_prompt > 1:
        made.rollout.rollouts_per_prompt = 3
    return made


def episodes(seed: int = 0, version: int = 0):
    """Groups 0-2 and 3-5 of one task each, with outcomes that vary within them."""
    out = []
    for t in batch(seed=seed, version=version):
        group = t.episode_id.ordinal // 3
        made = trajectory(t.episode_id.ordinal + 6 * seed, list(t.segments), float((t.episode_id.ordinal + seed) % 3 == 0))
        out.append(type(made)(**{**made.__dict__, "task_id": f"task-{group}"}))
    return out


def own_samples(learner: TorchLearner, seed: int):
    """Episodes whose log-probs are the learner's own, at its version: what an engine without mismatch would log."""
    out = []
    for t in episodes(seed):
        s = t.segments[0]
        with torch.no_grad():
            logprobs = score(learner.policy.model, pack(make_batch([t]).samples)).logprobs
        row = np.full(len(s), np.nan, np.float32)
        row[s.action_mask] = logprobs.float().numpy()
        segment = Segment(s.token_ids, s.action_mask, row, np.where(s.action_mask, learner.version, -1))
        out.append(type(t)(**{**t.__dict__, "segments": (segment,)}))
    return out


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_step_with_a_critic_only_where_it_is_needed(model_path, tmp_path, name):
    learner = TorchLearner(settings(name), model_path, total_steps=4)
    report = learner.step(own_samples(learner, 0), 0)
    assert report.version == 1 and math.isfinite(report.metrics["actor/pg_loss"]) and report.metrics["actor/grad_norm"] > 0
    values = np.concatenate([r.values[r.mask_reason != CONTEXT] for r in report.records])
    advantages = np.concatenate([r.advantages[r.mask_reason != CONTEXT] for r in report.records])
    assert np.isfinite(advantages).all() and advantages.any()
    learner.export(str(tmp_path))
    critic_free = name in CRITIC_FREE
    assert (learner.critic is None) == critic_free == (not (tmp_path / "critic").exists())
    assert critic_free == (not any(key.startswith(("critic/", "timing_s/critic")) for key in report.metrics))
    assert np.isnan(values).all() if critic_free else np.isfinite(values).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_saved_learner_goes_on_bit_for_bit(model_path, tmp_path, name):
    """The running means and the policies that IcePop looks back to are part of the checkpoint."""
    learners = [TorchLearner(settings(name), model_path, total_steps=8) for _ in range(2)]
    batches = [own_samples(learners[0], 0)]
    for step in range(2):
        learners[0].step(batches[-1], step)
        batches.append(own_samples(learners[0], step + 1))
    learners[0].save(str(tmp_path))
    learners[1].restore(str(tmp_path))
    stale = [*batches[1][:3], *batches[2][3:]]  # version 1 is known from the checkpoint alone: 0 is also what a new learner starts from
    for learner in learners:
        learner.step(stale, 2)
    assert learners[0].gather()[0].buffer.tobytes() == learners[1].gather()[0].buffer.tobytes()
    assert learners[1].version == 3


@pytest.mark.parametrize("name", ["sao", "ppo_clip", "tis", "icepop", "vapo", "grpo", "running_mean", "sao_step_values"])
def test_the_update_does_not_depend_on_the_split_into_micro_batches(model_path, name):
    outcomes = []
    for budget in (1, 40, 10_000):
        learner = TorchLearner(settings(name, model__dtype="float64", learner__tokens_per_micro_batch=budget), model_path, total_steps=8)
        for step in range(2):
            learner.step(episodes(step), step)
        outcomes.append([p.detach() for p in learner.policy.model.parameters()])
    for other in outcomes[1:]:
        for a, b in zip(outcomes[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_grpo_gives_each_episode_its_place_in_its_group(model_path):
    learner = TorchLearner(settings("grpo"), model_path, total_steps=4)
    report = learner.step(episodes()[::-1], 0)
    up, down = 2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)
    for record in report.records:
        expected = up if record.episode_id.ordinal % 3 == 0 else down
        np.testing.assert_allclose(record.advantages[record.mask_reason != CONTEXT], expected, rtol=1e-6)
    assert report.metrics["actor/zero_advantage_frac"] == 0.0


def test_truncated_members_leave_the_groups_mean(model_path):
    learner = TorchLearner(settings("grpo", algo__truncation="drop"), model_path, total_steps=4)
    cut = [type(t)(**{**t.__dict__, "finish": FinishReason.truncated("tokens")}) if t.episode_id.ordinal == 0 else t for t in episodes()]
    advantages = {r.episode_id.ordinal: r.advantages[r.mask_reason != CONTEXT] for r in learner.step(cut, 0).records}
    assert not any(advantages[o].any() for o in (0, 1, 2)), "the two that are left are equal"
    assert advantages[3].all()


def test_old_log_probs_are_those_of_the_weights_that_sampled(model_path):
    """k = pi_old / pi_rollout is then 1 however stale a token is: IcePop masks the engine's mismatch, not staleness."""
    learner = TorchLearner(settings("icepop", rollout__staleness=2), model_path, total_steps=8)
    samples = [own_samples(learner, 0)]
    for step in range(2):
        learner.step(samples[-1], step)
        samples.append(own_samples(learner, step + 1))
    mixed = [t for version in samples for t in version]
    made = make_batch(mixed)
    old = learner._ring.old_logprobs(made, budget=50)
    torch.testing.assert_close(old, made.behaviour, atol=1e-5, rtol=0)
    shifted = []
    for t in mixed:
        s, row = t.segments[0], t.segments[0].logprobs.copy()
        row[np.flatnonzero(s.action_mask)[0]] -= 2.0  # k = e^2, above the band of 0.5 to 5
        shifted.append(type(t)(**{**t.__dict__, "segments": (Segment(s.token_ids, s.action_mask, row, s.versions),)}))
    report = learner.step(shifted, 2)
    reasons = [r.mask_reason[r.mask_reason != CONTEXT] for r in report.records]
    assert all(r[0] == REJECTED_HIGH for r in reasons) and any((r[1:] == TRAINED).any() for r in reasons)
    learner.step(own_samples(learner, 3), 3)
    assert torch.isnan(learner._ring.old_logprobs(made, budget=50)[made.versions < 2]).all(), "what has left the ring is missing, not guessed"


def test_the_effective_sample_size_is_that_of_the_weights_used(model_path):
    """Cut at 0.05, most of these ratios are equal; not weighted at all, every one is."""
    sizes = {}
    for name in ("reinforce", "tis", "sao"):
        made = settings(name)
        made.algo.loss_args = {"cap": 0.05} if name == "tis" else {}
        sizes[name] = TorchLearner(made, model_path, total_steps=4).step(episodes(), 0).metrics["sao/ess"]
    assert sizes["reinforce"] == pytest.approx(1.0) and sizes["reinforce"] > sizes["tis"] > sizes["sao"]


OWN = """
import numpy as np
import torch
from sao.algorithms.catalogue import needs
from sao.algorithms.policy_loss import TokenLoss, terms_of


@needs("old")
def halved(inputs, *, factor=0.5):
    terms = terms_of(inputs)
    assert inputs.old is not None and inputs.outcomes is not None
    none = torch.zeros_like(terms.counted)
    return TokenLoss(-(factor * terms.advantages * terms.logprobs).sum(), terms.counted, terms.counted, none, none, terms.log_ratio)


def best_so_far(outcomes, state, *, start=0.0):
    best = max(state.get("best", start), float(outcomes.rewards.max()))
    return outcomes.rewards - best, {"best": best}


def forgets(outcomes, state):
    return outcomes.rewards[:1], state


def counts_itself(outcomes, state):
    return outcomes.rewards, {"seen": {"mean": [np.float64(outcomes.rewards.mean())]}}


def stateless(outcomes, state):
    return outcomes.rewards


def words(outcomes, state):
    return ["good"] * len(outcomes.rewards), state


def broken(outcomes, state):
    return outcomes.rewards - state["mean"], state


def learned(outcomes, state):
    return torch.nn.Parameter(outcomes.rewards), state


def sums(inputs):
    return inputs.logprobs.sum()


def fates(inputs, **changes):
    terms = terms_of(inputs)
    none = torch.zeros_like(terms.counted)
    total = -(terms.advantages * terms.logprobs).sum()
    return TokenLoss(total, terms.counted, terms.counted, none, none, terms.log_ratio)._replace(**changes)


def detached(inputs):
    return fates(inputs, total=fates(inputs).total.detach())


def twice(inputs):
    return fates(inputs, low=terms_of(inputs).counted)


def short(inputs):
    return fates(inputs, weight=torch.ones(1))


def numbers(inputs):
    return fates(inputs, counted=torch.ones(len(inputs.mask)))


def divides(inputs):
    return 1 / (len(inputs.mask) * 0)


@needs("telepathy")
def wishes(inputs):
    return None


def positional(inputs, cap):
    return None
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_algorithms", raising=False)


def test_a_loss_and_an_advantage_from_outside_the_package(model_path, tmp_path, own):
    made = config(algo__loss="my_algorithms:halved", algo__loss_args={"factor": 0.25}, algo__advantage="my_algorithms:best_so_far")
    learner, again = (TorchLearner(made, model_path, total_steps=4) for _ in range(2))
    learner.step(episodes(), 0)
    assert learner.critic is None and learner.baseline.state == {"best": 1.0}
    learner.save(str(tmp_path))
    again.restore(str(tmp_path))
    for one in (learner, again):
        one.step(episodes(1), 1)
    assert learner.gather()[0].buffer.tobytes() == again.gather()[0].buffer.tobytes()


@pytest.mark.parametrize(
    ("kind", "function", "says"),
    [
        ("advantage", "forgets", "one finite number for each"),
        ("advantage", "stateless", "returned a value of type Tensor; it must return two things"),
        ("advantage", "words", "advantages that are no numbers"),
        ("advantage", "counts_itself", r"state\['seen'\]\['mean'\]\[0\] is of type float64; the state must be a dict of plain numbers"),
        ("advantage", "broken", r"raised KeyError: 'mean' at my_algorithms.py:\d+"),
        ("loss", "sums", "must return a TokenLoss"),
        ("loss", "detached", "a total without a graph, which trains nothing"),
        ("loss", "twice", "not one of accepted, low and high"),
        ("loss", "short", r"`weight` that is not a number for each of the \d+ tokens"),
        ("loss", "numbers", r"`counted` that is not a bool for each of the \d+ tokens"),
        ("loss", "divides", r"raised ZeroDivisionError: division by zero at my_algorithms.py:\d+"),
    ],
)
def test_a_function_that_returns_something_else_is_a_named_failure(model_path, own, kind, function, says):
    made = config(**{f"algo__{kind}": f"my_algorithms:{function}"})
    with pytest.raises(LearnerFailure, match=says) as caught:
        TorchLearner(made, model_path, total_steps=4).step(episodes(), 0)
    assert f"algo.{kind}=my_algorithms:{function}" in str(caught.value) and "\n" not in str(caught.value)


def test_an_advantage_that_brings_a_graph_is_a_constant(model_path, own):
    report = TorchLearner(config(algo__advantage="my_algorithms:learned"), model_path, total_steps=4).step(episodes(), 0)
    assert report.version == 1 and report.metrics["actor/advantage_abs_mean"] > 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algo.loss=my_algorithms:halvd"], "did you mean 'halved'"),
        (["algo.loss=my_algorithms:wishes"], "needs telepathy, which there is not; one of this kind can need old"),
        (["algo.loss=my_algorithms:positional"], "takes other arguments; write `def positional(inputs, *, option=1.0)`"),
        (["algo.loss=my_algorithms:best_so_far"], "takes other arguments"),
        (["algo.loss=my_algorithms:halved", "algo.loss_args.fator=2"], "did you mean 'factor'?"),
    ],
)
def test_mistakes_in_ones_own_are_refused_at_the_door(own, overrides, says):
    from sao.config_load import compose
    from sao.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        compose(["model.path=/models/x", "data.path=tasks.jsonl", "reward.function=pkg.mod:fn", *overrides])
    assert says in str(caught.value)
