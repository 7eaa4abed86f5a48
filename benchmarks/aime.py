"""`sao eval aime` on the synthetic set with SmolLM2, four samples a problem: interrupted and resumed once, against the same job left alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, sao, write_result

from sao.evals.samples import FILE

IDS = ["aime_resume_differing"]
N, PROBLEMS = 4, 30
JOB = [
    "eval", "aime", "model=smollm2", f"n={N}", f"tasks={PROBLEMS}", "engine.max_model_len=320", "engine.kv_cache_mb=512",
    "engine.max_num_seqs=32", "engine.threads=2",
]  # fmt: skip
CUT_AFTER = N * PROBLEMS // 3  # samples


def interrupted(folder: Path) -> int:
    """Start the job, end it as Ctrl-C does once a third of its samples is written; samples it left."""
    process = subprocess.Popen([sys.executable, "-m", "sao.cli", *JOB, f"out={folder}"], cwd=ROOT)
    while len(samples(folder)) < CUT_AFTER:
        if process.poll() is not None:
            raise SystemExit("the job ended before it could be interrupted")
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=120)
    if code != 130:
        raise SystemExit(f"the interrupted job ended with {code}, not 130")
    return len(samples(folder))


def samples(folder: Path) -> list[dict[str, Any]]:
    """Those written so far; the job may be at its next line."""
    path = folder / FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [sample for sample in map(json.loads, lines) if "task" in sample]


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="sao-aime-"))
    whole_s = sao(*JOB, f"out={root / 'whole'}", timeout_s=900)
    kept = interrupted(root / "cut")
    sao(*JOB, f"out={root / 'cut'}", timeout_s=900)
    records = [json.loads((root / f"{name}.json").read_text()) for name in ("whole", "cut")]
    drawn = [{(s["task"], s["sample"]): s for s in samples(root / name)} for name in ("whole", "cut")]
    doubled = sum(len(samples(root / name)) - len(drawn[index]) for index, name in enumerate(("whole", "cut")))
    lost = 2 * N * PROBLEMS - len(drawn[0]) - len(drawn[1])
    differing = sum(drawn[0].get(key) != drawn[1].get(key) for key in drawn[0].keys() | drawn[1].keys())
    figures = ("mean", "low", "high", "pass_at", "maj_at", "truncated_share", "unread_share", "tokens", "episodes", "failed", "problems")
    unequal = [name for name in figures if records[0][name] != records[1][name]]
    write_result(
        "aime_resume_differing",
        f"samples lost, doubled or different, token for token, when `sao eval aime` is interrupted after a third and resumed "
        f"(SmolLM2, {PROBLEMS} synthetic problems x {N})",
        lost + doubled + differing,
        0,
        higher_is_better=False,
        values=[float(lost + doubled + differing)],
        detail={
            "samples": N * PROBLEMS,
            "kept_by_the_interruption": kept,
            "lost": lost,
            "doubled": doubled,
            "differing": differing,
            "figures_that_differ": unequal,
            "seconds_uninterrupted": round(whole_s),
            **{
                name: records[0][name]
                for name in ("mean", "low", "high", "pass_at", "maj_at", "truncated_share", "unread_share", "tokens", "preset", "max_tokens")
            },
        },
    )
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
