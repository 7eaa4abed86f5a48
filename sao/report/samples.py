"""Sample trajectories for the report: which ones to show, and their tokens with the training record behind each."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.learner.protocol import MASK_REASONS
from sao.report.rundata import RunData
from sao.report.store import StoredEpisode, read_trajectories
from sao.report.tokens import TokenText, segment_title

# Tokens shown of one segment; the middle of a longer one is left out.
SHOWN_TOKENS = 1600
PER_KIND = 2


@dataclass(frozen=True)
class Sample:
    when: str  # early, middle, late
    success: bool
    episode: StoredEpisode


def choose_samples(run: RunData) -> list[Sample]:
    """Successes and failures from the first, middle and last steps, and the trajectory that was trained stalest.

    A success has a reward above the middle of the rewards seen in the run.
    """
    steps, rewards, ordinals = (run.episodes[name] for name in ("step", "reward", "episode_ordinal"))
    if not len(steps):
        return []
    threshold = (float(rewards.min()) + float(rewards.max())) / 2
    spread = rewards.max() > rewards.min()
    first, last = int(steps.min()), int(steps.max())
    span = max(1, last - first + 1)
    wanted: dict[int, tuple[int, str, bool]] = {}
    for when, begin, end, reverse in (
        ("early", first, first + span // 6, False),
        ("middle", first + span * 2 // 5, first + span * 3 // 5, False),
        ("late", last - span // 6, last, True),
    ):
        for success in (True, False):
            good = rewards > threshold if spread else np.full(len(rewards), rewards.max() > 0)
            rows = np.flatnonzero((steps >= begin) & (steps <= end) & (good == success))
            for row in (rows[::-1] if reverse else rows)[: PER_KIND if when != "middle" else 1]:
                wanted.setdefault(int(ordinals[row]), (int(steps[row]), when, success))
    stalest = int(np.argmax(run.episodes["staleness"]))
    if run.episodes["staleness"][stalest] > 0:
        success = bool(rewards[stalest] > threshold if spread else rewards[stalest] > 0)
        wanted.setdefault(int(ordinals[stalest]), (int(steps[stalest]), "stalest", success))
    samples: list[Sample] = []
    for step in sorted({step for step, _, _ in wanted.values()}):
        for episode in read_trajectories(run.run_dir, [step]):
            ordinal = episode.trajectory.episode_id.ordinal
            if ordinal in wanted and wanted[ordinal][0] == step:
                samples.append(Sample(wanted[ordinal][1], wanted[ordinal][2], episode))
    order = {"early": 0, "middle": 1, "late": 2, "stalest": 3}
    return sorted(samples, key=lambda s: (order[s.when], not s.success, s.episode.step))


def roles(mask: NDArray[np.bool_], versions: NDArray[np.int32]) -> NDArray[np.str_]:
    """Per token: `prompt` before the first sampled token, `policy` where sampled, `observation` between and after."""
    sampled = versions >= 0
    seen = np.cumsum(sampled) > 0
    return np.where(sampled | mask, "policy", np.where(seen, "observation", "prompt"))


def sample_html(sample: Sample, text: TokenText, key: str, opened: bool = False) -> str:
    """One row that opens to the token view."""
    t = sample.episode.trajectory
    staleness = sample.episode.staleness
    turns = len(t.timings) or sum(len(s.turn_ends()) for s in t.segments)
    outcome = "good" if sample.success else "bad"
    cells = [
        f'<span class="when">{sample.when}</span>',
        f'<span class="chip {outcome}">{"success" if sample.success else "failure"}</span>',
        f"<span>step {sample.episode.step}</span>",
        f"<span>reward <b>{t.reward:.3g}</b></span>",
        f"<span>{turns} turn{'s' if turns != 1 else ''}</span>",
        f"<span>{t.action_tokens} of {sum(len(s) for s in t.segments)} tokens</span>",
        f"<span>staleness {staleness}</span>",
        f"<span>{html.escape(str(t.finish))}</span>",
        f'<span class="id">episode {t.episode_id} · {html.escape(t.task_id)}</span>',
    ]
    bodies = "".join(_segment_html(sample.episode, index, text, f"{key}-{index}") for index in range(len(t.segments)))
    return f'<details class="sample"{" open" if opened else ""}><summary>{"".join(cells)}</summary>{bodies}</details>'


def _segment_html(episode: StoredEpisode, index: int, text: TokenText, key: str) -> str:
    segment, record = episode.trajectory.segments[index], episode.records[index]
    length = len(segment)
    shown = np.arange(length)
    if length > SHOWN_TOKENS:
        shown = np.concatenate([shown[: SHOWN_TOKENS // 2], shown[-SHOWN_TOKENS // 2 :]])
    pieces = text.pieces(segment.token_ids.tolist())
    role = roles(segment.action_mask, segment.versions)
    reason = record.mask_reason if record is not None else np.where(segment.action_mask, 1, 0)
    spans: list[str] = []
    for row, at in enumerate(shown):
        if row and at != shown[row - 1] + 1:
            spans.append(f'<em class="cut">… {at - shown[row - 1] - 1} tokens left out …</em>')
        spans.append(f'<s class="{role[at][:3]} m{reason[at]}">{_visible(pieces[at])}</s>')
    data: dict[str, Any] = {
        "at": shown.tolist() if length > SHOWN_TOKENS else None,
        "id": segment.token_ids[shown].tolist(),
        "ver": segment.versions[shown].tolist(),
        "lp": _numbers(segment.logprobs[shown]),
        "why": reason[shown].tolist(),
        "tv": episode.trained_at_version,
    }
    if record is not None:
        data |= {
            "tlp": _numbers(record.trainer_logprobs[shown]),
            "val": _numbers(record.values[shown]),
            "adv": _numbers(record.advantages[shown]),
            "ret": _numbers(record.returns[shown]),
        }
    head = f"<p class='note'>{segment_title(index, segment)}</p>" if len(episode.trajectory.segments) > 1 else ""
    missing = "" if record is not None else "<p class='missing'>the learner kept no record of this segment</p>"
    payload = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return (
        f'{head}{missing}<div class="tokens" data-tokens="{key}">{"".join(spans)}</div><script type="application/json" id="{key}">{payload}</script>'
    )


def _visible(piece: str) -> str:
    """Escaped text; line ends stay line ends and get a mark, an empty piece a dot, so that every token can be pointed at."""
    if not piece:
        return "·"
    return html.escape(piece).replace("\n", "<i>↵</i>\n")


def _numbers(values: NDArray[np.float32]) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]


def section(run: RunData, text: TokenText) -> str:
    """The whole table with its legend and the choice of colouring."""
    samples: Sequence[Sample] = choose_samples(run) if run.episodes else []
    if not samples:
        return '<p class="missing">no data: no trajectories are stored for this run (none was trained, or logger.trajectories=none)</p>'
    names = "".join(f"<option value='{value}'>{label}</option>" for value, label in _COLOURINGS)
    note = "" if text.known else '<span class="note">The tokenizer was not found; token ids are shown.</span>'
    reasons = json.dumps(MASK_REASONS)
    opened = {
        next((i for i, s in enumerate(samples) if s.when == when and s.success == good), 0) for when, good in (("early", False), ("late", True))
    }
    rows = "".join(sample_html(sample, text, f"tok{i}", i in opened) for i, sample in enumerate(samples))
    legend = (
        '<span class="legend tokens-legend"><s class="pro">prompt</s><s class="obs">observation</s><s class="pol m1">policy, trained</s>'
        '<s class="pol m2">rejected: ratio too low</s><s class="pol m3">rejected: ratio too high</s><s class="pol m5">not trained</s></span>'
    )
    head = f'<div class="tools"><label>colour tokens by <select id="colouring">{names}</select></label>{legend}{note}</div>'
    return f"{head}<div class='samples' data-reasons='{html.escape(reasons)}'>{rows}</div>"


_COLOURINGS = (
    ("role", "role and mask"),
    ("adv", "advantage"),
    ("val", "value"),
    ("gap", "trainer − engine log-prob"),
    ("lp", "probability when sampled"),
    ("age", "age of the weights"),
)
