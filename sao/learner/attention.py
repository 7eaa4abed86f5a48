"""Causal attention over packed samples, registered with transformers as `packed_sdpa`.

transformers gives a model whose attention name it has no mask function for no mask at all, and passes keyword arguments through to the attention: so
`cu_seq_lens_q` reaches us, and no dense mask over the packed tokens ever exists. Each sample attends within itself through SDPA, samples of like
length padded into one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sao.learner.trie import Trie

NAME = "packed_sdpa"
# A group of samples is padded to its longest member while that costs at most this share of extra positions.
PADDING_ALLOWED = 0.35


@lru_cache(maxsize=256)
def padding_groups(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Sample indices in groups of like length: longest first, cut where padding to the group's longest would exceed PADDING_ALLOWED."""
    groups: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] == 0:
            continue
        if groups and longest * (len(groups[-1]) + 1) <= (1 + PADDING_ALLOWED) * (total + lengths[index]):
            groups[-1].append(index)
            total += lengths[index]
        else:
            groups.append([index])
            longest = total = lengths[index]
    return tuple(tuple(g) for g in groups)


@lru_cache(maxsize=32)
def _gather_plan(lengths: tuple[int, ...], device: torch.device) -> tuple[tuple[int, int, Tensor], ...]:
    """Per group: (samples, padded length, packed index int64[samples * padded length]); padding repeats the sample's last token."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    plans = []
    for group in padding_groups(lengths):
        longest = lengths[group[0]]
        begin = torch.tensor([starts[i] for i in group])[:, None]
        last = torch.tensor([lengths[i] - 1 for i in group])[:, None]
        index = begin + torch.minimum(torch.arange(longest)[None], last)
        plans.append((len(group), longest, index.reshape(-1).to(device)))
    return tuple(plans)


@lru_cache(maxsize=32)
def _scatter_plan(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int64[T]: for each packed token, its row among all groups' padded rows laid end to end."""
    where = [torch.zeros(0, dtype=torch.long)] * len(lengths)
    base = 0
    for group in padding_groups(lengths):
        longest = lengths[group[0]]
        for place, index in enumerate(group):
            where[index] = base + place * longest + torch.arange(lengths[index])
        base += len(group) * longest
    return torch.cat([torch.zeros(0, dtype=torch.long), *where]).to(device)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool[L, L]: causal, at most `window` positions back, the own one included."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[1, Hkv, T, D] -> [1, heads, T, D]: CPU kernels leave the fast path for grouped heads, so the heads are repeated."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    trie: Trie | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] with Hkv dividing Hq -> [1, T, Hq, D].

    seq_lens: sample lengths on the host, summing to T (else read from cu_seq_lens_q, which waits for the device). Without either, and for batches of
    several rows, each row is one sample. trie: the T tokens are its rows, each attending along its path.
    A dense mask, dropout, and a query that differs in length from its keys (generation) are refused.
    """
    if attention_mask is not None or dropout or query.shape[2] != key.shape[2]:
        raise ValueError("packed_sdpa takes whole sequences without a mask and without dropout; load the model with another attention to generate")
    rows, heads, tokens, width = query.shape
    if trie is not None:
        key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
        return trie.attend(query, key, value, scaling, sliding_window), None
    if seq_lens is None:
        seq_lens = (tokens,) if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    lengths = tuple(seq_lens)
    if rows > 1 and len(lengths) > 1:
        raise ValueError("packed samples must come in one row")
    if sum(lengths) != tokens:
        raise ValueError(f"sample lengths sum to {sum(lengths)}, there are {tokens} tokens")
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if sliding_window is not None and sliding_window < length:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=_band(length, sliding_window, q.device), scale=scaling)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)

    if len(lengths) == 1:
        return attend(query, key, value).transpose(1, 2), None
    if len(set(lengths)) == 1:
        q, k, v = (x[0].reshape(heads, len(lengths), lengths[0], width).transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v).transpose(1, 2).reshape(1, tokens, heads, width), None

    # [T, H, D] is how the projections left them in memory, so whole tokens are gathered.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for samples, longest, index in _gather_plan(lengths, query.device):
        padded = (x.index_select(0, index).view(samples, longest, heads, width).transpose(1, 2) for x in (q, k, v))
        outputs.append(attend(*padded).transpose(1, 2).reshape(samples * longest, heads, width))
    joined = torch.cat(outputs) if outputs else q
    return joined.index_select(0, _scatter_plan(lengths, query.device))[None], None


def register() -> None:
    """Make `attn_implementation="packed_sdpa"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_sdpa)
