"""Shared prefixes computed once: the trie of a micro-batch's samples, and attention over it.

Each token that several samples share (same token, same tokens before it) is one row of the forward pass. Positions are depths, a row attends to its
ancestors and to itself, and a sample's hidden states are gathered from its path; so every sample's loss keeps its own coefficients, and the gradient
of a shared row is the sum over the samples below it. Nothing is detached. Source: psRL, "prefix sharing within a micro-batch".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# Nodes are padded to the largest of their group while that costs at most this share of extra query-key pairs.
PADDING_ALLOWED = 0.35


@dataclass(frozen=True)
class Node:
    """A run of rows with one parent node (-1: none). start: its first row; length: rows; depth: position of its first row."""

    parent: int
    start: int
    length: int
    depth: int


@dataclass(frozen=True, eq=False)
class _Group:
    """Nodes attended in one call: rows of the queries int64[n * Lq], of the keys int64[n * Lk], and who sees whom, bool[n, 1, Lq, Lk]."""

    count: int
    queries: Tensor
    keys: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class Trie:
    """token_ids, position_ids int64[U], U the unique tokens. paths int64[T]: the row of each token of the samples laid end to end."""

    token_ids: Tensor
    position_ids: Tensor
    paths: Tensor
    nodes: tuple[Node, ...]

    @cached_property
    def _groups(self) -> tuple[_Group, ...]:
        """Nodes of like length and depth together, each padded to the largest of its group."""
        members: list[list[int]] = []
        pairs = largest_keys = 0
        for index in sorted(range(len(self.nodes)), key=lambda i: (-self.nodes[i].length, -self.nodes[i].depth, i)):
            node = self.nodes[index]
            keys = node.depth + node.length
            if members:
                padded = self.nodes[members[-1][0]].length * max(largest_keys, keys) * (len(members[-1]) + 1)
                if padded <= (1 + PADDING_ALLOWED) * (pairs + node.length * keys):
                    members[-1].append(index)
                    pairs, largest_keys = pairs + node.length * keys, max(largest_keys, keys)
                    continue
            members.append([index])
            pairs, largest_keys = node.length * keys, keys
        return tuple(self._group(m) for m in members)

    def _group(self, members: Sequence[int]) -> _Group:
        nodes = [self.nodes[i] for i in members]
        queries, keys = max(n.length for n in nodes), max(n.depth + n.length for n in nodes)
        place = np.arange(queries)
        query_rows = np.stack([n.start + np.minimum(place, n.length - 1) for n in nodes])
        key_rows = np.stack(
            [np.pad(path_rows(self.nodes, i), (0, keys - n.depth - n.length), mode="edge") for i, n in zip(members, nodes, strict=True)]
        )
        own = np.array([n.depth for n in nodes])[:, None, None] + place[:, None]  # the key that is the query itself
        seen = np.arange(keys) <= own
        device = self.token_ids.device

        def placed(x: NDArray[Any]) -> Tensor:
            return torch.from_numpy(x).to(device)

        return _Group(len(nodes), placed(query_rows.reshape(-1)), placed(key_rows.reshape(-1)), placed(seen)[:, None])

    @cached_property
    def _where(self) -> Tensor:
        """int64[U]: place of each row among the groups' padded query rows laid end to end."""
        padded = torch.cat([g.queries for g in self._groups])
        places = torch.arange(len(padded), device=padded.device)
        # Padding repeats a node's last row at later places: the first place of a row is its own.
        return torch.full_like(self.token_ids, len(padded)).scatter_reduce(0, padded, places, "amin")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """query, key, value [1, H, U, D] -> [1, U, H, D]: each row over its ancestors and itself, at most `window` of them."""
        heads, width = query.shape[1], query.shape[3]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))

        def chosen(rows: Tensor, source: Tensor, group: _Group) -> Tensor:
            return source.index_select(0, rows).view(group.count, -1, heads, width).transpose(1, 2)

        outputs = []
        for group in self._groups:
            mask = group.mask if window is None else group.mask & _near(group.mask, window)
            attended = F.scaled_dot_product_attention(
                chosen(group.queries, q, group), chosen(group.keys, k, group), chosen(group.keys, v, group), attn_mask=mask, scale=scaling
            )
            outputs.append(attended.transpose(1, 2).reshape(-1, heads, width))
        return torch.cat(outputs).index_select(0, self._where)[None]


def _near(mask: Tensor, window: int) -> Tensor:
    """bool like `mask` [n, 1, Lq, Lk]: keys at most `window` positions back from the last that the query sees, that one included."""
    last = mask.sum(-1, keepdim=True) - 1
    return torch.arange(mask.shape[-1], device=mask.device) > last - window


def path_rows(nodes: Sequence[Node], index: int) -> NDArray[np.int64]:
    """Rows from the first token down to the end of node `index`; none for -1."""
    parts = []
    while index >= 0:
        node = nodes[index]
        parts.append(np.arange(node.start, node.start + node.length))
        index = node.parent
    return np.concatenate([np.zeros(0, np.int64), *reversed(parts)])


def build(sequences: Sequence[NDArray[np.int32]], device: torch.device | str = "cpu") -> Trie:
    """The trie of token sequences. Rows lie in depth-first order of the sorted sequences, so the layout depends on the set of sequences alone."""
    tokens = [s.tolist() for s in sequences]
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    common = [0, *(_common(sequences[a], sequences[b]) for a, b in pairwise(order))]
    nodes: list[Node] = []
    token_parts: list[list[int]] = []
    last_node = [-1] * len(tokens)
    rows = 0
    todo = [(0, len(order), 0, -1)] if order else []
    while todo:
        begin, end, depth, node = todo.pop()
        reach = min(common[begin + 1 : end], default=len(tokens[order[begin]]))
        if reach > depth:
            nodes.append(Node(node, rows, reach - depth, depth))
            token_parts.append(tokens[order[begin]][depth:reach])
            node = len(nodes) - 1
            rows += reach - depth
        cuts = [begin, *(k for k in range(begin + 1, end) if common[k] == reach), end]
        branches = list(pairwise(cuts))
        for first, stop in reversed(branches):
            if stop - first == 1 and len(tokens[order[first]]) == reach:
                last_node[order[first]] = node
            else:
                todo.append((first, stop, reach, node))
    paths = np.concatenate([np.zeros(0, np.int64), *(path_rows(nodes, n) for n in last_node)])
    ids = np.array([t for part in token_parts for t in part], np.int64)
    depths = np.concatenate([np.zeros(0, np.int64), *(n.depth + np.arange(n.length) for n in nodes)])
    token_ids, position_ids, rows_of = (torch.from_numpy(x).to(device) for x in (ids, depths, paths))
    return Trie(token_ids, position_ids, rows_of, tuple(nodes))


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
