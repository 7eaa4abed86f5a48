"""`sao inspect`: what became of every token of a run, from its folder alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_run import encode, make_run, write_tokenizer
from rich.console import Console

from sao.errors import UserError
from sao.learner.protocol import DROPPED, NON_FINITE, REJECTED_HIGH, REJECTED_LOW, TRAINED, SegmentRecord
from sao.report.dropped import DroppedWriter
from sao.report.inspect import main as inspect
from sao.report.store import TrajectoryWriter, write_file
from sao.report.tokens import makers
from sao.rollout.episodes import Loss
from sao.trajectory import EpisodeId, FinishReason, Segment, Trajectory

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "abc"},
    {"role": "tool", "content": "42"},
]
OPENING = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def shown(run: Path, *arguments: object, **keywords: object) -> str:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    inspect(run, *arguments, console=console, **keywords)
    return console.export_text()


def row(text: str, position: int) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [str(position)])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=12)


def episode(ordinal: int, *, attempt: int = 0, finish: FinishReason | None = None) -> Trajectory:
    """OPENING, `abc`, ANSWER, `de`; the engine gave no log-prob of `b`."""
    parts = [(False, OPENING), (True, "abc"), (False, ANSWER), (True, "de")]
    ids = np.concatenate([encode(text) for _, text in parts])
    sampled = np.concatenate([np.full(len(encode(text)), acted) for acted, text in parts])
    logprobs = np.where(sampled, -0.5, np.nan)
    logprobs[np.flatnonzero(sampled)[1]] = np.nan
    segment = Segment(ids, np.isfinite(logprobs), logprobs, np.where(sampled, 3, -1))
    info = {"messages": [*MESSAGES, {"role": "assistant", "content": "de"}]}
    return Trajectory(EpisodeId(ordinal, attempt), "task-7", "tools", (segment,), 1.0, finish or FinishReason.terminal(), 3, info=info)


def record(trajectory: Trajectory, reasons: list[int]) -> SegmentRecord:
    segment = trajectory.segments[0]
    columns = [np.where(segment.action_mask, value, np.nan).astype(np.float32) for value in (-0.6, 0.25, 0.75, 1.0)]
    reason = np.zeros(len(segment), np.uint8)
    reason[segment.versions >= 0] = reasons
    trainer, values, advantages, returns = columns
    return SegmentRecord(trajectory.episode_id, 0, trainer, values, advantages, returns, reason)


def folder(tmp_path: Path, name: str = "run") -> Path:
    run = tmp_path / name
    write_tokenizer(run / "checkpoints" / "final" / "policy")
    (run / "config.yaml").write_text("algo:\n  eps_low: 0.3\n  eps_high: 5.0\n")
    return run


def lose(run: Path, *losses: Loss, sitting: int = 0, keep_tokens: bool = True) -> None:
    writer = DroppedWriter(run, sitting=sitting, keep_tokens=keep_tokens, fetch=lambda handle: handle)
    for loss in losses:
        writer.add(loss)
    writer.wait()
    writer.close()


def loss(ordinal: int, reason: str, message: str = "said so", *, attempt: int = 0, tokens: int = 0, **more: object) -> Loss:
    return Loss(EpisodeId(ordinal, attempt), "task-7", "tools", "default", reason, message, tokens, version=3, step=5, **more)


def test_a_step_is_listed_and_an_episode_is_shown(run_dir: Path) -> None:
    assert "step 16 of 0..16: 32 trajectories" in shown(run_dir)
    listed = shown(run_dir, step=3)
    assert "step 3 of 0..16" in listed and "98.0" in listed
    text = shown(run_dir, (98, None))
    for word in ("episode 98.0", "task train/98", "Use the calculator.", "trained", "environment", "advantage", "info", "band (0.7, 6)"):
        assert word in text
    assert "episode 98.0" in shown(run_dir, (98, 0))


def test_each_sampled_token_has_everything_that_was_made_of_it(tmp_path: Path) -> None:
    run, trajectory = folder(tmp_path), episode(0)
    reasons = [REJECTED_LOW, NON_FINITE, REJECTED_HIGH, TRAINED, TRAINED]
    TrajectoryWriter(run).write(0, [trajectory], [record(trajectory, reasons)], 4)
    text = shown(run, (0, None))
    at = np.flatnonzero(trajectory.segments[0].versions >= 0)
    ratio = f"{np.exp(np.float32(-0.6) - np.float32(-0.5)):.4f}"
    numbers = ["0.2500", "1.0000", "0.7500"]
    token = [str(trajectory.segments[0].token_ids[at[0]]), "policy", "3", "-0.5000", "-0.6000", ratio]
    assert row(text, at[0]) == [str(at[0]), "a", *token, "out:", "ratio", "below", "the", "band", *numbers]
    assert row(text, at[1]) == [str(at[1]), "b", str(trajectory.segments[0].token_ids[at[1]]), "policy", "3", "out:", "no", "finite", "log-prob"]
    assert "above the band" in " ".join(row(text, at[2])) and row(text, at[3])[8:] == ["trained", *numbers]


def test_a_token_is_left_out_by_the_loss_of_the_run_not_by_a_band_it_does_not_have(tmp_path: Path) -> None:
    run, trajectory = folder(tmp_path), episode(0)
    (run / "config.yaml").write_text("algo:\n  loss: ppo_clip\n  loss_args:\n    eps_high: 0.3\n  eps_low: 0.3\n  eps_high: 5.0\n")
    TrajectoryWriter(run).write(0, [trajectory], [record(trajectory, [REJECTED_LOW, NON_FINITE, REJECTED_HIGH, TRAINED, TRAINED])], 4)
    text = shown(run, (0, None))
    assert "loss ppo_clip (eps_low=0.2, eps_high=0.3)" in text and "band" not in text
    assert "out: cut from below by ppo_clip" in text and "out: cut from above by ppo_clip" in text


def test_a_run_that_was_killed_has_its_tokenizer_in_its_checkpoints(tmp_path: Path) -> None:
    """From the run folder alone: the model it started from may be gone, as one made for a single run is."""
    run = folder(tmp_path)
    (run / "checkpoints" / "final").rename(run / "checkpoints" / "step-000004")
    (run / "checkpoints" / "step-000005" / "policy").mkdir(parents=True)
    TrajectoryWriter(run).write(0, [episode(0)], [], 4)
    text = shown(run, (0, None))
    assert "be brief" in text and "token ids are shown" not in text


def test_who_made_each_token(tmp_path: Path) -> None:
    trajectory = episode(0)
    segment = trajectory.segments[0]
    pieces = [*_pieces(OPENING), *"abc", *_pieces(ANSWER), *"de"]
    found = makers(segment, pieces, trajectory.info["messages"])
    text = {name: "".join(p for p, m in zip(pieces, found, strict=True) if m == name) for name in set(found)}
    assert text["prompt"] == "be briefgo" and text["environment"] == "42" and text["policy"] == "abcde"
    assert text["template"] == (OPENING + ANSWER).replace("be brief", "").replace("go", "", 1).replace("42", "")
    plain = makers(segment, pieces)
    assert [set(plain[: len(_pieces(OPENING))]), set(plain[-len(_pieces(ANSWER)) - 2 : -2])] == [{"prompt"}, {"environment"}]


def test_a_turn_that_a_later_segment_reads_again_is_called_earlier() -> None:
    again = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    pieces = [*_pieces(again), "x"]
    sampled = np.arange(len(pieces)) == len(pieces) - 1
    segment = Segment(np.arange(len(pieces)), sampled, np.where(sampled, -1.0, np.nan), np.where(sampled, 0, -1))
    found = makers(segment, pieces, MESSAGES)
    assert "".join(p for p, m in zip(pieces, found, strict=True) if m == "earlier") == "abc"


def _pieces(text: str) -> list[str]:
    from fake_run import VOCABULARY

    names = {i: token for token, i in VOCABULARY.items()}
    return [names[i] for i in encode(text)]


def test_a_failed_attempt_is_shown_with_its_tokens_and_the_one_after_it(tmp_path: Path) -> None:
    run = folder(tmp_path)
    broken = episode(4, finish=FinishReason.failed("environment"))
    lose(run, loss(4, "environment", "ToolEnv.step raised OSError", tokens=5, retried=True, handle=broken))
    trained = episode(4, attempt=1)
    TrajectoryWriter(run).write(6, [trained], [record(trained, [TRAINED, NON_FINITE, TRAINED, TRAINED, TRAINED])], 4)
    text = shown(run, (4, None))
    for said in ("episode 4.0 · not trained: environment · tried again as 4.1", "ToolEnv.step raised OSError", "no record", "episode 4.1 · step 6"):
        assert said in text
    only = shown(run, (4, 0))
    assert "episode 4.0" in only and "episode 4.1 · step 6" not in only
    with pytest.raises(UserError, match=r"episode 4\.7 does not exist in .*; of 4 there is 4\.0 and 4\.1"):
        shown(run, (4, 7))


def test_every_reason_is_listed_and_told(tmp_path: Path) -> None:
    run = folder(tmp_path)
    cut = episode(9, finish=FinishReason.truncated("tokens"))
    TrajectoryWriter(run).write(5, [cut], [record(cut, [DROPPED] * 5)], 4)
    lose(
        run,
        loss(1, "environment", "the door jammed", tokens=3),
        loss(2, "no_action_tokens", "2 tokens were sampled, none with a finite log-prob", tokens=2),
        loss(3, "overdue", "9 versions old where rollout.staleness=4 (rollout.overdue=drop)", tokens=5, handle=episode(3)),
        loss(9, "truncated", "cut off, which algo.truncation=drop keeps from training", tokens=5),
        loss(5, "reward_raised", "reward nan is not a finite number", retried=True),
    )
    listed = shown(run, dropped=True)
    assert "dropped: 1 environment, 1 no_action_tokens, 1 overdue, 1 truncated" in listed and "retried: 1 reward_raised" in listed
    assert "the door jammed" in listed and "reward nan" in listed
    for ordinal, reason in ((1, "environment"), (2, "no_action_tokens"), (3, "overdue")):
        assert f"episode {ordinal}.0 · not trained: {reason} · dropped" in shown(run, (ordinal, None))
    assert "its tokens are not in the run folder" in shown(run, (1, None))
    assert "no record" in shown(run, (3, None))
    left_out = shown(run, (9, None))
    assert "in step 5's batch but not trained" in left_out and "algo.truncation=drop" in left_out and "out: episode dropped" in left_out
    assert "nothing was dropped and no attempt failed at step 77" in shown(run, dropped=True, step=77)


def test_what_a_roll_back_undid_is_shown_as_trained_and_undone(tmp_path: Path) -> None:
    run = folder(tmp_path)
    undone = episode(7)
    TrajectoryWriter(run).write(5, [undone], [record(undone, [TRAINED] * 5)], 4)
    lose(run, loss(7, "rolled_back", "trained, then undone: version 6 was refused and version 5 came back", tokens=5))
    listed, told = shown(run, dropped=True), shown(run, (7, None))
    assert "dropped: 1 rolled_back" in listed and "resumed" not in listed
    assert "trained in step 5, then undone" in told and "version 6 was refused" in told and "not trained" not in told


def test_what_a_resumed_run_undid_is_not_called_lost(tmp_path: Path) -> None:
    run = folder(tmp_path)
    lose(run, loss(8, "environment"))
    trained = episode(8)
    TrajectoryWriter(run).write(2, [trained], [record(trained, [TRAINED] * 5)], 4)
    assert "dropped, but the resumed run trained it" in shown(run, dropped=True)
    assert "after a resume it was trained" in shown(run, (8, None))


def test_without_tokens_the_reasons_are_kept_all_the_same(tmp_path: Path) -> None:
    run = folder(tmp_path)
    lose(run, loss(3, "overdue", tokens=5, handle=episode(3)), keep_tokens=False)
    assert not (run / "dropped").exists()
    assert "logger.trajectories=none" in shown(run, (3, None))


def test_a_folder_without_the_training_record_says_so(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run / "trajectories").mkdir()
    write_file(run / "trajectories" / "step-000000.parquet", 0, [episode(0)])
    assert "the run folder has no per-token training record" in shown(run, (0, None))


def test_what_is_not_there_is_named(run_dir: Path, tmp_path: Path) -> None:
    for arguments, keywords, message in (
        ((tmp_path,), {}, "holds no stored trajectories; train with logger.trajectories=all"),
        ((tmp_path, (1, None)), {}, "holds no stored trajectories"),
        ((run_dir,), {"step": 99}, "--step 99 is not stored"),
        ((run_dir, (10**6, None)), {}, "episode 1000000 is neither among the trained nor among the dropped trajectories"),
        ((run_dir, (98, 7)), {}, r"episode 98\.7 does not exist"),
        ((run_dir, (98, None)), {"dropped": True}, "leave one of the two out"),
        ((run_dir, (300, None)), {"step": 0}, "of step 0; leave --step out"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            shown(*arguments, **keywords)
        assert "\n" not in str(caught.value)


def test_the_record_survives_a_kill_and_goes_on_in_the_next_sitting(tmp_path: Path) -> None:
    run = folder(tmp_path)
    writer = DroppedWriter(run, sitting=0, keep_tokens=True, fetch=lambda handle: handle)
    writer.add(loss(1, "environment", handle=replace(episode(1), finish=FinishReason.failed("environment"))))
    with open(run / "dropped.jsonl", "a") as file:  # killed here, half-way through a line, with tokens that no file has yet
        file.write('{"task_id": "ta')
    lose(run, loss(2, "time_limit", tokens=4), loss(1, "environment", handle=episode(1)), sitting=1)
    lines = [json.loads(line) for line in (run / "dropped.jsonl").read_text().splitlines()]
    assert [(line["episode"], line["sitting"]) for line in lines] == [([1, 0], 0), ([2, 0], 1), ([1, 0], 1)]
    assert shown(run, (1, None)).count("not trained: environment") == 2
    assert "dropped: 1 environment, 1 time_limit" in shown(run, dropped=True), "repeated after a resume, it counts once"
    assert [path.name for path in (run / "dropped").iterdir()] == ["001-000000.parquet"]


def test_both_parts_of_the_record_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path)
    monkeypatch.setattr("sao.report.dropped.AT_ONCE", 2)
    monkeypatch.setattr("sao.report.dropped.MOST_BYTES", 100_000)
    monkeypatch.setattr("sao.report.dropped.MOST_LINE_BYTES", 4_000)
    lose(run, *(loss(i, "overdue", "x" * 5000, tokens=5, handle=episode(i)) for i in range(60)))
    files = sorted((run / "dropped").iterdir())
    assert sum(path.stat().st_size for path in files) <= 100_000 and files[-1].name == "000-000029.parquet" and len(files) > 1
    assert (run / "dropped.jsonl").stat().st_size + (run / "dropped-earlier.jsonl").stat().st_size < 13_000
    assert "no record" in shown(run, (59, None)), "the newest are kept"


def test_a_trajectory_that_cannot_be_had_any_more_is_counted(tmp_path: Path) -> None:
    run = folder(tmp_path)
    writer = DroppedWriter(run, sitting=0, keep_tokens=True, fetch=lambda handle: None)
    writer.add(loss(1, "environment", handle="gone", tokens=4))
    writer.add(loss(2, "environment", handle="never had any"))
    writer.wait()
    writer.close()
    assert writer.tokens_missed == 1 and not (run / "dropped").exists()


def test_damaged_and_foreign_files_are_named_in_one_sentence(tmp_path: Path) -> None:
    run = folder(tmp_path)
    path = TrajectoryWriter(run).write(0, [episode(0)], [], 4)
    whole, table = path.read_bytes(), pq.read_table(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2 :] = (
        bytes(len(whole) - len(whole) // 2 - 8) + whole[-8:]
    )  # a footer that cannot be read, which the library tells in two lines

    def foreign(path: Path) -> None:
        pq.write_table(table.drop(["attempt"]), path)

    def loss_of(**line: object) -> str:
        return json.dumps(line) + "\n"

    for damage, arguments, message in (
        (lambda: path.write_bytes(whole[:-20]), ((0, None),), "cannot be read as Parquet .*; remove it"),
        (lambda: path.write_bytes(flipped), ((0, None),), "cannot be read as Parquet .*; remove it"),
        (lambda: foreign(path), ((0, None),), 'step-000000.parquet is not of this version of SAO .*"attempt"'),
        (lambda: (run / "dropped.jsonl").write_text(loss_of(episode=[1, 0])), (), "dropped.jsonl is not of this version of SAO .*task_id"),
        (lambda: (run / "dropped.jsonl").write_text(loss_of(ordinal=1)), (), "dropped.jsonl is not of this version of SAO .*episode"),
    ):
        damage()
        with pytest.raises(UserError, match=message) as caught:
            shown(run, *arguments, dropped=not arguments)
        assert "\n" not in str(caught.value)
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(UserError, match="is stored without a trajectory"):
        shown(run)
