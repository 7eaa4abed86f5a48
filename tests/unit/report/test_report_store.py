import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.errors import DataError
from sao.learner.protocol import CONTEXT, REJECTED_LOW, TRAINED, SegmentRecord
from sao.report.store import SCHEMA, TrajectoryWriter, read_columns, read_trajectories, step_path, stored_steps
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory, TurnTiming

FLOATS = ("trainer_logprobs", "values", "advantages", "returns")


@st.composite
def segments(draw: st.DrawFn, index: int) -> Segment:
    length = draw(st.integers(0, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sampled = rng.random(length) < 0.6
    sampled[:1] = False
    finite = sampled & (rng.random(length) < 0.9)
    return Segment(
        token_ids=rng.integers(0, 2**31 - 1, length),
        action_mask=finite,
        logprobs=np.where(finite, -rng.random(length), np.nan),
        versions=np.where(sampled, rng.integers(0, 2**30, length), -1),
        sampling=draw(
            st.builds(
                SamplingSpec,
                temperature=st.floats(0, 2),
                top_p=st.floats(0.1, 1),
                top_k=st.integers(0, 99),
                stop=st.lists(st.integers(0, 99), max_size=3).map(tuple),
                seed=st.none() | st.integers(0, 2**62),
                max_tokens=st.integers(1, 4096),
            )
        ),
        side={"experts": rng.integers(0, 8, (length, 2)).astype(np.uint8)} if draw(st.booleans()) else {},
        parent=(draw(st.integers(0, index - 1)), draw(st.integers(0, 5))) if index and draw(st.booleans()) else None,
    )


def record_of(episode_id: EpisodeId, index: int, segment: Segment) -> SegmentRecord:
    rng = np.random.default_rng(index)
    floats = {name: np.where(segment.action_mask, rng.normal(size=len(segment)), np.nan).astype(np.float32) for name in FLOATS}
    return SegmentRecord(episode_id, index, **floats, mask_reason=np.where(segment.action_mask, TRAINED, CONTEXT).astype(np.uint8))


Batch = tuple[list[Trajectory], list[SegmentRecord]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    trajectories, records = [], []
    for ordinal in draw(st.lists(st.integers(0, 2**40), unique=True, max_size=4)):
        parts = tuple(draw(segments(i)) for i in range(draw(st.integers(0, 3))))
        acted = sum(s.action_tokens for s in parts) > 0
        finish = draw(st.sampled_from([FinishReason.terminal(), FinishReason.truncated("turns")])) if acted else FinishReason.failed("engine")
        turn_rewards = None
        reward = draw(st.floats(-5, 5))
        if len(parts) == 1 and acted and draw(st.booleans()):
            turn_rewards = np.arange(len(parts[0].turn_ends()), dtype=np.float32)
            reward = float(turn_rewards.sum())
        episode_id = EpisodeId(ordinal, draw(st.integers(0, 1)))
        trajectories.append(
            Trajectory(
                episode_id,
                task_id=draw(st.text(max_size=5)),
                environment=draw(st.text(max_size=5)),
                segments=parts,
                reward=reward,
                finish=finish,
                admitted_version=draw(st.integers(0, 99)),
                workload=draw(st.text(max_size=5)),
                turn_rewards=turn_rewards,
                timings=tuple(draw(st.lists(st.builds(TurnTiming, generate_s=st.floats(0, 9), prompt_tokens=st.integers(0, 9)), max_size=2))),
                metrics=draw(st.dictionaries(st.text(max_size=4), st.floats(-9, 9), max_size=2)),
                info={"answer": draw(st.none() | st.text(max_size=4))},
            )
        )
        records += [record_of(episode_id, i, s) for i, s in enumerate(parts) if draw(st.booleans())]
    return trajectories, records


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for name in ("episode_id", "task_id", "environment", "reward", "finish", "admitted_version", "workload", "timings", "metrics", "info"):
        assert getattr(a, name) == getattr(b, name), name
    np.testing.assert_array_equal(a.turn_rewards, b.turn_rewards)
    assert len(a.segments) == len(b.segments)
    for left, right in zip(a.segments, b.segments, strict=True):
        assert left.sampling == right.sampling and left.parent == right.parent and left.side.keys() == right.side.keys()
        for name in ("token_ids", "action_mask", "logprobs", "versions"):
            assert getattr(left, name).dtype == getattr(right, name).dtype
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        for name, array in left.side.items():
            assert right.side[name].dtype == array.dtype
            np.testing.assert_array_equal(right.side[name], array)


@settings(max_examples=25)
@given(batch=batches(), version=st.integers(0, 2**30))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, batch: tuple[list[Trajectory], list[SegmentRecord]], version: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    trajectories, records = batch
    path = TrajectoryWriter(run_dir).write(3, trajectories, records, version)
    assert pq.read_schema(path).equals(SCHEMA) and [p.name for p in path.parent.iterdir()] == ["step-000003.parquet"]
    stored = read_trajectories(run_dir)
    assert len(stored) == len(trajectories)
    by_key = {(r.episode_id, r.segment): r for r in records}
    for episode, trajectory in zip(stored, trajectories, strict=True):
        assert_same(trajectory, episode.trajectory)
        assert episode.step == 3 and episode.trained_at_version == version
        assert episode.staleness == version - trajectory.oldest_version
        for index, record in enumerate(episode.records):
            expected = by_key.get((trajectory.episode_id, index))
            assert (record is None) == (expected is None)
            if record is not None and expected is not None:
                for name in (*FLOATS, "mask_reason"):
                    assert getattr(record, name).dtype == getattr(expected, name).dtype
                    np.testing.assert_array_equal(getattr(record, name), getattr(expected, name))


def simple(ordinal: int, length: int = 120) -> tuple[Trajectory, SegmentRecord]:
    mask = np.arange(length) % 3 != 0
    segment = Segment(np.arange(length), mask, np.where(mask, -0.5, np.nan), np.where(mask, 5, -1))
    trajectory = Trajectory(EpisodeId(ordinal), f"t{ordinal}", "calculator", (segment,), 1.0, FinishReason.terminal(), 4)
    return trajectory, record_of(trajectory.episode_id, 0, segment)


def test_one_step_of_64_is_written_quickly(tmp_path: Path) -> None:
    batch = [simple(i) for i in range(64)]
    writer = TrajectoryWriter(tmp_path)
    best = min(_seconds(lambda: writer.write(1, [t for t, _ in batch], [r for _, r in batch], 5)) for _ in range(5))
    assert best < 0.1  # about 10 ms on an idle core; the margin is for a loaded one


def _seconds(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start


def test_columns_are_read_without_the_tokens(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step in (2, 1):
        trajectory, record = simple(step)
        writer.write(step, [trajectory], [record], 7)
    table = read_columns(tmp_path, columns=["step", "staleness", "reward"])
    assert {name: table[name].to_pylist() for name in table.column_names} == {"step": [1, 2], "staleness": [2, 2], "reward": [1.0, 1.0]}
    assert stored_steps(tmp_path) == [1, 2] and read_columns(tmp_path / "none").num_rows == 0


def test_one_episode_can_be_picked(tmp_path: Path) -> None:
    batch = [simple(i) for i in range(4)]
    TrajectoryWriter(tmp_path).write(1, [t for t, _ in batch], [r for _, r in batch], 5)
    (found,) = read_trajectories(tmp_path, [1], episode=2)
    assert found.trajectory.episode_id == EpisodeId(2, 0)


def test_a_record_without_its_episode_is_refused(tmp_path: Path) -> None:
    trajectory, record = simple(1)
    _, stray = simple(2)
    with pytest.raises(ValueError, match=r"episode 2\.0, which is not in the batch of step 1"):
        TrajectoryWriter(tmp_path).write(1, [trajectory], [record, stray], 5)
    short = SegmentRecord(trajectory.episode_id, 0, *(np.zeros(3, np.float32),) * 4, np.full(3, REJECTED_LOW, np.uint8))
    with pytest.raises(ValueError, match=r"has 3 tokens, its segment 120"):
        TrajectoryWriter(tmp_path).write(1, [trajectory], [short], 5)
    assert stored_steps(tmp_path) == []


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"step-000009\.parquet does not exist"):
        read_trajectories(tmp_path, [9])
    TrajectoryWriter(tmp_path)
    step_path(tmp_path, 1).write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"step-000001\.parquet cannot be read"):
        read_trajectories(tmp_path)
