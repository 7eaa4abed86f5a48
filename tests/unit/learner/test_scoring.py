"""Packed log-probs equal individual ones; temperature, chunks, entropy; what the attention refuses."""

import numpy as np
import pytest
import torch

from sao.errors import ConfigError
from sao.learner.attention import packed_sdpa, padding_groups
from sao.learner.batching import make_batch, pack
from sao.learner.models import load_policy
from sao.learner.scoring import score
from tests.unit.learner.learner_builders import VOCABULARY, batch, causal_model, segment, trajectory

KINDS = ("llama", "qwen3")


def plain_logprobs(model, sample, temperature: float = 1.0) -> torch.Tensor:
    """The reference: one sequence, every position's logits, log_softmax."""
    ids = torch.from_numpy(sample.data.token_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    return torch.log_softmax(logits, -1)[sample.actions - 1, ids[0, sample.actions]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_packed_equals_individual_in_any_order(kind, temperature):
    """C15, C17, C69."""
    model = causal_model(kind)
    samples = make_batch(batch(7, temperature=temperature)).samples
    expected = torch.cat([plain_logprobs(model, s, temperature) for s in samples])
    flat = torch.zeros_like(expected)
    packed = pack([samples[i] for i in (3, 0, 6, 5, 1, 2, 4)])
    flat[packed.slots] = score(model, packed).logprobs.detach()
    torch.testing.assert_close(flat, expected, atol=1e-10, rtol=0)


def test_temperatures_may_differ_within_a_pack():
    model, rng = causal_model(), np.random.default_rng(1)
    parts = [trajectory(i, [segment([0, 0, 1, 1], rng=rng, temperature=t)]) for i, t in enumerate((0.5, 2.0))]
    samples = make_batch(parts).samples
    expected = torch.cat([plain_logprobs(model, s, t) for s, t in zip(samples, (0.5, 2.0), strict=True)])
    torch.testing.assert_close(score(model, pack(samples)).logprobs, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_attention_of_transformers_agrees(kind):
    """An implementation we did not write gives the same log-probs (its softmax runs in float32)."""
    ours = causal_model(kind)
    theirs = causal_model(kind)
    theirs.set_attn_implementation("eager")
    sample = make_batch(batch(1)).samples[0]
    torch.testing.assert_close(plain_logprobs(theirs, sample), score(ours, pack([sample])).logprobs, atol=2e-6, rtol=0)


def test_a_sliding_window_is_kept_within_the_sample():
    changes = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    ours, theirs = causal_model("qwen3", **changes), causal_model("qwen3", **changes)
    theirs.set_attn_implementation("eager")
    samples = make_batch(batch(3)).samples
    expected = torch.cat([plain_logprobs(theirs, s) for s in samples])
    full = torch.cat([plain_logprobs(causal_model("qwen3"), s) for s in samples])
    got = score(ours, pack(samples)).logprobs
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert not torch.allclose(got, full)


@pytest.mark.parametrize("mode", ["none", "sampled", "graph"])
def test_chunks_change_neither_result_nor_gradient(mode):
    """C70: the head is recomputed chunk by chunk; the gradient is the same."""
    model = causal_model("qwen3")
    packed = pack(make_batch(batch(4)).samples)
    outcomes = []
    for elements in (1 << 24, 3 * VOCABULARY):
        model.zero_grad()
        scores = score(model, packed, entropy=mode, logit_elements=elements)
        loss = scores.logprobs.sum() + (scores.entropy.sum() if mode == "graph" else 0.0)
        loss.backward()
        outcomes.append((scores.logprobs.detach(), scores.entropy, [p.grad.clone() for p in model.parameters()]))
    for a, b in zip(outcomes[0], outcomes[1], strict=True):
        torch.testing.assert_close(a, b)


def test_entropy_by_hand_and_without_a_graph_unless_asked():
    model = causal_model()
    packed = pack(make_batch(batch(2, temperature=0.7)).samples)
    logits = model.get_output_embeddings()(model.base_model(**packed.model_inputs(), use_cache=False).last_hidden_state[0, packed.rows]) / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    sampled = score(model, packed, entropy="sampled").entropy
    torch.testing.assert_close(sampled, expected, atol=1e-6, rtol=1e-6)
    assert sampled.grad_fn is None and score(model, packed, entropy="graph").entropy.grad_fn is not None


def test_without_entropy_fewer_bytes_are_kept_for_backward():
    """C70: an entropy that nothing uses keeps no extra tensor alive."""

    def saved(mode: str) -> int:
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            score(causal_model(), pack(make_batch(batch(3)).samples), entropy=mode)
        return total

    assert saved("sampled") == saved("none") < saved("graph")


def test_scores_are_at_least_float32():
    packed = pack(make_batch(batch(2)).samples)
    assert score(causal_model(dtype=torch.bfloat16), packed).logprobs.dtype == torch.float32
    assert score(causal_model(dtype=torch.float32), packed, autocast=True).logprobs.dtype == torch.float32


def test_padding_groups_hold_every_sample_once_and_waste_little():
    lengths = tuple(np.random.default_rng(0).integers(1, 200, 60).tolist())
    groups = padding_groups(lengths)
    assert sorted(i for g in groups for i in g) == list(range(60))
    assert sum(lengths[g[0]] * len(g) for g in groups) <= 1.35 * sum(lengths)


def test_the_attention_refuses_what_it_cannot_do():
    x = torch.zeros(1, 2, 4, 8)
    for arguments in ({"attention_mask": torch.zeros(1, 1, 4, 4)}, {"dropout": 0.1}, {"seq_lens": (2, 1)}):
        with pytest.raises(ValueError):
            packed_sdpa(torch.nn.Identity(), x, x, x, arguments.pop("attention_mask", None), **arguments)
    with pytest.raises(ValueError, match="one row"):
        packed_sdpa(torch.nn.Identity(), x.expand(2, -1, -1, -1), x, x, None, seq_lens=(2, 2))


def test_models_and_attentions_that_cannot_be_scored_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="see each other"):
        load_policy(str(tmp_path), dtype="float32", attention_name="sdpa")
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(str(tmp_path / "nothing"), dtype="float32", attention_name="packed_sdpa")
