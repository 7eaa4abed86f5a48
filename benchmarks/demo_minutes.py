"""A stranger's first command: fresh clone, empty caches, `make demo`, install included."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from common import ROOT, counters, read_jsonl, write_result

IDS = ["demo_minutes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="copy the run folder here")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sao-fresh-"))
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "UV_CACHE_DIR": str(home / ".cache/uv"),
        "PIP_CACHE_DIR": str(home / ".cache/pip"),
    }
    try:
        started = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "install"], cwd=clone, env=environment, check=True)
        installed = time.monotonic()
        subprocess.run(["make", "demo"], cwd=clone, env=environment, check=True)
        seconds = time.monotonic() - started
        run = next(path.parent for path in (clone / "runs").glob("*/ledger.json"))
        evals = read_jsonl(run / "eval.jsonl")
        if args.keep:
            shutil.copytree(run, args.keep)
        detail = {
            "install_s": installed - started,
            "demo_s": seconds - (installed - started),
            "evaluations": [{k: e[k] for k in ("eval", "temperature", "mean", "n")} for e in evals],
            "counters": counters(run),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_result(
        "demo_minutes", "fresh clone, empty caches: minutes until `make demo` has ended, install included", seconds / 60, 12,
        higher_is_better=False, values=[seconds / 60], detail=detail,
    )  # fmt: skip


if __name__ == "__main__":
    main()
