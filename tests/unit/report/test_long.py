"""Long episodes in the report and in `sao inspect`: what ended them, how long they were, and what became of their context."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from fake_run import encode, make_run, write_tokenizer
from rich.console import Console

from sao.observer import batch_metrics
from sao.report.html import render
from sao.report.inspect import main as inspect
from sao.report.jsonl import open_for_append, write_record
from sao.report.long import bins, concerns, endings
from sao.report.rundata import load_run
from sao.report.store import TrajectoryWriter
from sao.trajectory import EpisodeId, FinishReason, Segment, Trajectory, TurnTiming

BEGIN, GENERATE = "<|im_start|>user\ngo<|im_end|>\n", "<|im_start|>assistant\n"
SUMMARY = "<|im_start|>user\n[Summary of the conversation so far]\nseen 4<|im_end|>\n"
OLD = [(False, BEGIN + GENERATE), (True, "one<|im_end|>"), (False, "\n<|im_start|>user\nsum up<|im_end|>\n" + GENERATE), (True, "seen 4<|im_end|>")]
NEW = [(False, BEGIN + SUMMARY + GENERATE + "one<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n" + GENERATE), (True, "two<|im_end|>")]
MESSAGES = ["go", "one", "4", "sum up", "seen 4", "[Summary of the conversation so far]\nseen 4", "two"]
ROLES = ["user", "assistant", "tool", "user", "assistant", "user", "assistant"]


def segment(parts, parent=None) -> Segment:
    ids = np.concatenate([encode(text) for _, text in parts])
    sampled = np.concatenate([np.full(len(encode(text)), acted) for acted, text in parts])
    return Segment(ids, sampled, np.where(sampled, -0.5, np.nan), np.where(sampled, 3, -1), parent=parent)


def compacted(ordinal: int, finish: FinishReason) -> Trajectory:
    old = segment(OLD)
    first = len(old) - len(encode("seen 4<|im_end|>"))
    shared = len(encode(BEGIN)) + 1
    return Trajectory(
        EpisodeId(ordinal),
        "task",
        "walk",
        (old, segment(NEW, (0, shared))),
        1.0,
        finish,
        3,
        timings=(TurnTiming(0.1, 0.2, 0.1),) * 3,
        metrics={"turns": 3.0, "compactions": 1.0, "summary_tokens": 7.0, "observations": 4.0, "observations_cut": 1.0, "blocked_s/walk": 0.7},
        info={
            "messages": [{"role": role, "content": content} for role, content in zip(ROLES, MESSAGES, strict=True)],
            "segments": [{"messages": [0, 1, 3, 4], "summary": [first, len(old)]}, {"because": "compaction", "messages": [0, 5, 1, 2, 6]}],
        },
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "long"
    run.mkdir()
    write_tokenizer(run / "checkpoints" / "final" / "policy")
    (run / "config.yaml").write_text(
        "rollout:\n  compaction: summary\n  context_tokens: 112\n  max_turns: 6\n  max_tokens: 400\n  time_limit_s: 60\n"
    )
    (run / "ledger.json").write_text(json.dumps({"prompts": {"submitted": 3, "trained": 2, "dropped": {"prompt_too_long": 1}}, "tokens": {}}))
    episodes = [compacted(0, FinishReason.terminal()), compacted(1, FinishReason.truncated("tokens"))]
    TrajectoryWriter(run).write(0, episodes, [], 3)
    with open_for_append(run / "metrics.jsonl") as file:
        write_record(file, {"t": 1.0, "axis": "train", "step": 0, **batch_metrics([episode.meta() for episode in episodes], 3)})
    return run


def test_the_report_says_what_ended_episodes_and_shows_compactions(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert endings(run) == {"terminal": 1, "truncated: tokens": 1}
    page = render(run)
    assert "could not be made" not in page
    section = page[page.index('<section id="long">') :].split("</section>")[0]
    text = html.unescape(re.sub(r"<[^>]+>", " ", section))
    assert re.search(r"truncated: tokens: out of tokens\s+1\s+50\.0%\s+rollout\.max_tokens=400\s+rollout\.context_tokens=112", text)
    assert re.search(r"dropped: the opening left no room for a token\s+1", text)
    for title in ("Segments of an episode", "Compactions", "Tokens of summaries", "Observations cut", "Event loop held"):
        assert title in text
    plots = [html.unescape(data) for data in re.findall(r'data-plot="([^"]*)"', section)]
    assert any('"share"' in plot and "0.25" in plot for plot in plots), "one of four observations was cut"
    assert "goes on from a summary, parent segment 0" in page and "the summary" in page


def test_an_episode_of_one_turn_is_not_long(tmp_path: Path, run_dir: Path) -> None:
    short = tmp_path / "short"
    TrajectoryWriter(short).write(0, [Trajectory(EpisodeId(0), "t", "walk", (segment(OLD[:2]),), 1.0, FinishReason.terminal(), 3)], [], 3)
    assert not concerns(load_run(short)) and 'id="long"' not in render(load_run(short)) and concerns(load_run(run_dir))


def test_without_stored_trajectories_the_metrics_tell(run_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "ledger.json"):
        (bare / name).write_bytes((run_dir / name).read_bytes())
    run = load_run(bare)
    assert concerns(run) and endings(run) == {"terminal": 0.5, "truncated: tokens": 0.5} and "could not be made" not in render(run)


def test_a_run_of_many_turns_shows_the_section(tmp_path: Path) -> None:
    page = render(load_run(make_run(tmp_path / "demo", steps=3)))
    assert "Turns of an episode" in page and "Tokens of summaries" not in page and "could not be made" not in page


def test_inspect_names_each_segment_its_parent_and_its_summary(run_dir: Path) -> None:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    inspect(run_dir, (0, None), console=console)
    text = console.export_text()
    old = segment(OLD)
    first = len(old) - len(encode("seen 4<|im_end|>"))
    assert f"segment 0 · sampled at {first}-{len(old) - 1}: the summary" in text
    assert f"segment 1 · goes on from a summary, parent segment 0, the same up to position {len(encode(BEGIN)) + 1}" in text
    after = text[text.index("segment 1 ·") :]
    by = [line.split() for line in after.splitlines() if re.match(r"\s+\d+(-\d+)?\s", line)]
    assert any("earlier" in cells for cells in by) and any("prompt" in cells for cells in by), (
        "the kept turn is read again, the tool's answer is context"
    )


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 1, 3], (1, ["1", "2", "3"], [2, 0, 1])), ([0, 31], (2, [str(2 * i) for i in range(16)], [1] + [0] * 14 + [1]))]
)
def test_bins(values, expected) -> None:
    width, labels, counts = bins(np.array(values))
    assert (width, labels, counts) == (expected[0], expected[1], [float(count) for count in expected[2]])
