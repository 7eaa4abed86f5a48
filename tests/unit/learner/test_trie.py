"""Shared prefixes: the trie, and that log-probs, values, losses and every gradient equal the step without it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import AlgoConfig, OptimizerConfig
from sao.errors import ConfigError
from sao.learner import trie
from sao.learner.batching import make_batch, pack
from sao.learner.critic import Critic, CriticBatch
from sao.learner.parity import check_sharing
from sao.learner.policy import Policy, PolicyBatch
from sao.trajectory import SamplingSpec, Segment
from tests.unit.learner.learner_builders import causal_model, critic_model, trajectory

# Few tokens and short sequences, so that prefixes, duplicates and sequences that begin others are common.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=9)


def arrays(sequences):
    return [np.array(s, np.int32) for s in sequences]


@given(SEQUENCES)
def test_every_distinct_prefix_is_one_row(sequences):
    built = trie.build(arrays(sequences))
    assert len(built.token_ids) == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    assert built.token_ids[built.paths].tolist() == [t for s in sequences for t in s]
    assert built.position_ids[built.paths].tolist() == [n for s in sequences for n in range(len(s))]


@given(SEQUENCES)
def test_a_branch_is_a_node_and_a_parent_comes_before_its_children(sequences):
    built = trie.build(arrays(sequences))
    assert all(node.parent < index for index, node in enumerate(built.nodes))
    starts, rows = [n.start for n in built.nodes], [n.length for n in built.nodes]
    assert starts == np.cumsum([0, *rows])[:-1].tolist() and min(rows) > 0
    children = [sum(n.parent == i for n in built.nodes) for i in range(len(built.nodes))]
    ends = {tuple(s) for s in sequences}
    for index, count in enumerate(children):
        path = tuple(built.token_ids[trie.path_rows(built.nodes, index)].tolist())
        assert count != 1 or path in ends  # one child alone is the same run, unless a sequence ends here


def samples(sequences, seed=0):
    """A batch whose segments are the sequences, with masks, versions and behaviour of their own."""
    rng = np.random.default_rng(seed)
    made = []
    for number, tokens in enumerate(sequences):
        asked = rng.random(len(tokens)) < 0.7
        asked[0], asked[-1] = False, True
        logprobs = np.where(asked, rng.normal(-2.5, 0.5, len(tokens)), np.nan)
        made.append(trajectory(number, [Segment(np.array(tokens), asked, logprobs, np.where(asked, 0, -1), SamplingSpec())], float(rng.random())))
    return make_batch(made).samples


def policy_step(model, packed, seed=0, entropy=0.0):
    generator = torch.Generator().manual_seed(seed)
    n = len(packed.rows)
    slots = packed.slots  # per-token data belong to the batch's place, not to the packing
    behaviour, advantages = (torch.randn(n, generator=generator, dtype=torch.float64)[slots] for _ in range(2))
    mask = (torch.rand(n, generator=generator) < 0.8)[slots]
    policy = Policy(model, AlgoConfig(eps_low=0.9, eps_high=4.0, entropy_coef=entropy), OptimizerConfig(), total_steps=4)
    policy.accumulate(PolicyBatch(packed, behaviour - 3.0, advantages, mask))
    return policy.last[0].logprobs, [p.grad for p in model.parameters()]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@settings(max_examples=25)
@given(SEQUENCES, st.sampled_from(["llama", "qwen3"]), st.sampled_from([0.0, 0.1]))
def test_the_policys_logprobs_and_gradients_equal_the_unshared(sequences, kind, entropy):
    chosen = samples(sequences)
    plain = policy_step(causal_model(kind), pack(chosen), entropy=entropy)
    shared = policy_step(causal_model(kind), pack(chosen, sharing=True), entropy=entropy)
    close(shared[0], plain[0])
    for a, b in zip(shared[1], plain[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b)


@settings(max_examples=15)
@given(SEQUENCES)
def test_the_critics_values_and_gradients_equal_the_unshared(sequences):
    chosen = samples(sequences)
    outcomes = []
    for sharing in (False, True):
        packed, model = pack(chosen, sharing=sharing), critic_model()
        critic = Critic(model, OptimizerConfig(), total_steps=4)
        returns = torch.randn(len(packed.rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        critic.accumulate(CriticBatch(packed, returns[packed.slots], torch.ones(len(packed.rows), dtype=torch.bool)))
        outcomes.append((critic.last_values, [p.grad for p in model.parameters()]))
    close(outcomes[1][0], outcomes[0][0])
    for a, b in zip(outcomes[1][1], outcomes[0][1], strict=True):
        close(a, b)


def test_a_sliding_window_counts_along_the_path():
    sequences = [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 2, 2, 1], [0, 1, 1]]
    changes = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    chosen = samples(sequences)
    plain = policy_step(causal_model("qwen3", **changes), pack(chosen))[0]
    shared = policy_step(causal_model("qwen3", **changes), pack(chosen, sharing=True))[0]
    close(shared, plain)
    wide = policy_step(causal_model("qwen3"), pack(chosen))[0]
    assert (wide - plain).abs().max() > 1e-3  # the window matters here


def test_a_model_whose_layers_mix_branches_is_refused():
    model = causal_model("qwen3")
    check_sharing(model)
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x) + 0.1 * plain(x).cumsum(1)  # a running sum over the row, as a recurrent layer has
    with pytest.raises(ConfigError, match=r"learner.sharing=packed changes this model's log-probs"):
        check_sharing(model)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_model_runs_on_the_unique_tokens_alone(order):
    chosen = samples([[0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 2, 0]])
    packed = pack([chosen[i] for i in order], sharing=True)
    assert (packed.tokens, packed.computed_tokens) == (12, 5)
    assert packed.model_inputs()["input_ids"].shape == (1, 5)
