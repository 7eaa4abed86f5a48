"""A run folder as a real run leaves it, made up in a moment: for tests of the report and for working on its looks.

python tests/unit/report/fake_run.py DIRECTORY [steps]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

from sao.learner.protocol import CONTEXT, REJECTED_HIGH, REJECTED_LOW, TRAINED, SegmentRecord
from sao.report.jsonl import append_record, open_for_append, write_record
from sao.report.store import TrajectoryWriter
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory, TurnTiming

CHARACTERS = [*"0123456789+-*/=.?!(){}[]<>|_:,\"' \n", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
BATCH, WARMUP, BOUND = 32, 5, 4


def skill(step: float, steps: int) -> float:
    return 0.26 + 0.68 / (1 + math.exp(-(step - 0.4 * steps) / (0.09 * steps)))


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        special = next((s for s in SPECIAL if text.startswith(s)), text[0])
        ids.append(VOCABULARY[special])
        text = text[len(special) :]
    return ids


def write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))


def conversation(rng: np.random.Generator, success: bool) -> list[tuple[bool, str]]:
    """(sampled by the policy, text) in order."""
    a, b, c = rng.integers(2, 99, 3)
    parts = [
        (False, f"<|im_start|>system\nUse the calculator.<|im_end|>\n<|im_start|>user\nWhat is ({a}+{b})*{c}?<|im_end|>\n<|im_start|>assistant\n"),
        (True, f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}+{b}"}}}}</tool_call><|im_end|>'),
        (False, f"\n<|im_start|>tool\n{a + b}<|im_end|>\n<|im_start|>assistant\n"),
        (True, f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a + b}*{c}"}}}}</tool_call><|im_end|>'),
        (False, f"\n<|im_start|>tool\n{(a + b) * c}<|im_end|>\n<|im_start|>assistant\n"),
        (True, f"The answer is {(a + b) * c}.<|im_end|>"),
    ]
    if success:
        return parts
    if rng.random() < 0.3:
        return [parts[0], (True, f"The answer is {rng.integers(9, 999)}.<|im_end|>")]
    return [*parts[:3], (True, f"The answer is {a + b}.<|im_end|>")]


def episode(rng: np.random.Generator, ordinal: int, version: int, progress: float) -> tuple[Trajectory, SegmentRecord]:
    success = bool(rng.random() < progress)
    parts = conversation(rng, success)
    ids = np.concatenate([encode(text) for _, text in parts])
    sampled = np.concatenate([np.full(len(encode(text)), acted) for acted, text in parts])
    staleness = min(version, int(rng.choice(BOUND + 1, p=[0.1, 0.3, 0.3, 0.2, 0.1])))
    turn = np.cumsum(np.append(False, sampled[1:] & ~sampled[:-1]))
    versions = np.where(sampled, np.minimum(version, version - staleness + turn // 2), -1)
    logprobs = -rng.exponential(0.35 * (1.1 - progress), len(ids)) - 1e-4
    gap = version - versions
    trainer = np.minimum(logprobs + rng.normal(0, 1, len(ids)) * np.where(gap == 0, 4e-6, 0.05 * gap), -1e-6)
    value = np.clip(progress + 0.15 * rng.normal(size=len(ids)).cumsum() / np.sqrt(len(ids)), 0, 1)
    ratio = np.exp(trainer - logprobs)
    off = np.full(len(ids), np.nan)
    reason = np.where(~sampled, CONTEXT, np.where(ratio < 0.7, REJECTED_LOW, np.where(ratio > 6, REJECTED_HIGH, TRAINED)))
    reward = float(success)
    generated = float(0.5 + rng.exponential(0.4))
    trajectory = Trajectory(
        EpisodeId(ordinal, int(rng.random() < 0.02)),
        task_id=f"train/{ordinal}",
        environment="calculator",
        segments=(Segment(ids, sampled, np.where(sampled, logprobs, off), versions, SamplingSpec(stop=(1,), max_tokens=96)),),
        reward=reward,
        finish=FinishReason.terminal() if rng.random() < 0.96 else FinishReason.truncated("turns"),
        admitted_version=version - staleness,
        timings=tuple(TurnTiming(0.01, generated, 0.001, 80, 64, 40) for acted, _ in parts if acted),
        metrics={"tool_calls": float(sum(acted for acted, _ in parts) - 1)},
        info={"question": parts[0][1][60:90]},
    )
    columns = [np.where(sampled, x, off).astype(np.float32) for x in (trainer, value, reward - value, np.full(len(ids), reward))]
    return trajectory, SegmentRecord(trajectory.episode_id, 0, *columns, reason.astype(np.uint8))


def make_run(run_dir: Path, steps: int = 60, *, tokenizer: bool = True) -> Path:
    """Write config, plan, metrics of all axes, evaluations, ledger, trajectories and a tokenizer."""
    rng = np.random.default_rng(0)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(
        f"seed: 0\nrun:\n  name: demo\ntrain:\n  steps: {steps}\n  batch_size: {BATCH}\nmodel:\n  path: ''\n  factory: sao.learner.tiny:make\n"
        f"env:\n  name: calculator\nrollout:\n  staleness: {BOUND}\ncritic:\n  critic_only_steps: {WARMUP}\nalgo:\n  name: sao\n  eps_low: 0.3\n  eps_high: 5.0\n"
    )
    (run_dir / "plan.txt").write_text("actor        count  cpus\nengine           1     1\nlearner          1     1\nworkers          1     0\n")
    (run_dir / "command.json").write_text(json.dumps({"verb": "train", "overrides": ["experiment=demo"], "model": ""}))
    if tokenizer:
        write_tokenizer(run_dir / "checkpoints" / "final" / "policy")
    store, trained_tokens, ordinal = TrajectoryWriter(run_dir), 0, 0
    with open_for_append(run_dir / "metrics.jsonl") as file:

        def log(t: float, axis: str, step: float, values: dict[str, float]) -> None:
            write_record(
                file,
                {"t": round(t, 2), "wall": f"2026-11-29T16:{int(t) // 60:02d}:{int(t) % 60:02d}.000+00:00", "axis": axis, "step": step, **values},
            )

        for step in range(steps + WARMUP):
            version = max(0, step - WARMUP)
            progress = skill(version, steps)
            batch = [episode(rng, ordinal + i, version, progress) for i in range(BATCH)]
            ordinal += BATCH
            store.write(step, [t for t, _ in batch], [r for _, r in batch], version)
            lengths = [t.action_tokens for t, _ in batch]
            trained_tokens += sum(t.sampled_tokens for t, _ in batch)
            staleness = [version - t.oldest_version for t, _ in batch]
            wait, learn, publish = 0.9 + 0.2 * rng.random(), 1.4 + 0.2 * rng.random(), 0.12 + 0.05 * rng.random()
            now = 40 + 2.6 * step
            values = {
                "reward/mean": float(np.mean([t.reward for t, _ in batch])),
                "response_length/mean": float(np.mean(lengths)),
                "response_length/max": float(max(lengths)),
                "rollout/turns_mean": float(np.mean([len(t.timings) for t, _ in batch])),
                "rollout/truncated_frac": float(np.mean([t.finish.kind == "truncated" for t, _ in batch])),
                "off_policy/staleness_mean": float(np.mean(staleness)),
                "off_policy/staleness_max": float(max(staleness)),
                "critic/vf_loss": 0.22 * math.exp(-step / 30) + 0.02 * rng.random(),
                "critic/vf_explained_var": 0.35 * (1 - math.exp(-step / 15)) + 0.05 * rng.normal(),
                "critic/grad_norm": 2 * math.exp(-step / 30) + 0.3 * rng.random(),
                "perf/learner_idle_share": wait / (wait + learn + publish),
                "perf/trained_tokens_per_s": sum(lengths) / (wait + learn + publish),
                "timing_s/wait_for_batch": wait,
                "timing_s/learn": learn,
                "timing_s/critic": 0.6 * learn,
                "timing_s/actor": 0.3 * learn,
                "timing_s/episode_generate_mean": 2.0,
                "timing_s/episode_environment_mean": 0.5,
                "timing_s/publish": publish,
                "timing_s/step": wait + learn + publish,
                "train/version": float(version + (step >= WARMUP)),
            }
            if step >= WARMUP:
                values |= {
                    "actor/entropy": 0.47 * math.exp(-version / (0.4 * steps)) + 0.05 + 0.01 * rng.random(),
                    "actor/pg_loss": 0.02 * rng.normal(),
                    "actor/grad_norm": 0.4 + 0.2 * rng.random(),
                    "actor/lr": 2e-4 * (1 - version / steps),
                    "sao/dis_masked_frac_low": 0.02 + 0.01 * rng.random(),
                    "sao/dis_masked_frac_high": 0.001 * rng.random(),
                    "sao/ess": 0.9 + 0.03 * rng.random(),
                    "off_policy/abs_log_ratio_mean": 0.05 + 0.01 * rng.random(),
                    "off_policy/abs_log_ratio_max": 0.8 + 0.4 * rng.random(),
                }
            log(now, "train", step, values)
            if step >= WARMUP:
                stall = {"publish/pause_s": 0.03 + 0.02 * rng.random(), "publish/transfer_s": 0.02 + 0.005 * rng.random(), "publish/resume_s": 0.01}
                extra = {"publish/stall_s": sum(stall.values()), "publish/canary_gap": 2e-6 + 4e-6 * rng.random(), "publish/in_flight": 40.0}
                first = {"perf/first_update_s": now} if step == WARMUP else {}
                log(now, "publish", version + 1, stall | extra | {"publish/seconds": publish} | first)
            for second in (now, now + 1.3):
                busy = 0.1 + 0.1 * rng.random()
                log(
                    second,
                    "engine",
                    round(second, 1),
                    {"engine/tokens_per_s": 900 + 80 * rng.normal(), "engine/idle_share": busy, "engine/running": 42.0},
                )
    for name, version, means in (("before", 0, (0.26, 0.03)), ("after", steps, (0.94, 0.99))):
        for temperature, mean in zip((1.0, 0.0), means, strict=True):
            low, high = max(0.0, mean - 0.05), min(1.0, mean + 0.03)
            record = {"eval": name, "version": version, "temperature": temperature, "mean": mean, "low": low, "high": high, "n": 256}
            append_record(run_dir / "eval.jsonl", record | {"truncated": 2, "failed": 0, "tokens": 8100, "seconds": 9.5, "env": "calculator"})
    dropped, dropped_tokens = {"environment": 3, "time": 2}, {"environment": 120, "time": 61}
    prompts = {"submitted": ordinal + 5, "trained": ordinal, "dropped": dropped, "running": 0, "buffered": 0, "training": 0}
    prompts |= {"attempts": ordinal + 11, "retried": {"environment": 6}}
    tokens = {"sampled": trained_tokens + 181, "trained": trained_tokens, "dropped": dropped_tokens, "in_flight": 0}
    ledger = {"closes": True, "prompts": prompts, "tokens": tokens, "workloads": {"default": {"submitted": ordinal + 5, "trained": ordinal}}}
    (run_dir / "ledger.json").write_text(json.dumps(ledger))
    return run_dir


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60)
