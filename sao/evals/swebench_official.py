"""Official data sets: rows checked here, predictions validated as everywhere, and the official harness asked where Docker is.

Their repositories live in images, so nothing of this can be graded without Docker; it is refused at the door.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sao.errors import ConfigError, DataError, SystemFailure, UserError
from sao.swe.predictions import Predictions, read_predictions
from sao.tasks.target import one_line

# A row of swebench 5; the older ones of 12 columns raise KeyError in the harness.
COLUMNS = ("instance_id", "image", "repo", "version", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type", "eval_script")
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
ALIASES = {
    name: f"SWE-bench/SWE-bench{suffix}"
    for name, suffix in (("full", ""), ("verified", "_Verified"), ("lite", "_Lite"), ("multilingual", "_Multilingual"))
}
DOCKER_LIMIT_S = 20


def official_command(own: Mapping[str, str], overrides: Sequence[str]) -> int:
    """Validate, then `swebench eval`. Raises UserError for what cannot work, SystemFailure when the harness ends with an error."""
    if overrides or set(own) & {"repo", "model", "run", "checkpoint"}:
        raise ConfigError(
            "dataset= takes predictions=FILE alone: its repositories live in images, where our agent does not work; repo= is for task repositories"
        )
    if "predictions" not in own:
        raise ConfigError("dataset= needs predictions=FILE, a .jsonl with instance_id, model_name_or_path and model_patch")
    if trouble := docker_trouble():
        raise UserError(
            f"dataset={own['dataset']} is graded by the official harness, which needs Docker, and {trouble}; use repo= with a task repository"
        )
    rows = check_rows(load_rows(own["dataset"], own.get("split", "test")), own["dataset"])
    predictions = read_predictions(Path(own["predictions"]).expanduser(), {row["instance_id"] for row in rows})
    for line in predictions.bad:
        print(f"line {line.line} of the predictions is not evaluated ({line.kind}): {line.text}")
    folder = Path(own.get("out", f"runs/swebench-{Path(own['dataset']).stem}")).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return run_harness(own["dataset"], own.get("split", "test"), predictions, folder, int(own.get("parallel", "8")))


def docker_trouble(run: Callable[..., Any] = subprocess.run) -> str:
    """Why Docker cannot be used here; empty when it can."""
    if shutil.which("docker") is None:
        return "there is no docker command here"
    try:
        done = run(["docker", "info"], capture_output=True, timeout=DOCKER_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return "docker does not answer"
    return "" if done.returncode == 0 else "its daemon does not run or may not be used"


def load_rows(name: str, split: str) -> list[dict[str, Any]]:
    """The rows of a hub id, an alias, or a .json, .jsonl or .parquet. Raises UserError."""
    path = Path(name).expanduser()
    if path.suffix in (".json", ".jsonl"):
        try:
            text = path.read_text()
            rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"dataset={name} cannot be read ({one_line(error)})") from None
    else:
        try:
            import datasets
        except ImportError:
            raise UserError(f"dataset={name} is read by the package datasets, which is not installed; install sao-rl[data]") from None
        try:
            found = datasets.load_dataset("parquet", data_files=str(path), split="train") if path.suffix == ".parquet" else None
            rows = list(found if found is not None else datasets.load_dataset(ALIASES.get(name, name), split=split))
        except Exception as error:  # noqa: BLE001 - whatever a hub or a file answers with, it cannot be used
            raise UserError(f"dataset={name} cannot be loaded ({one_line(error)}); check the id, the split and the network") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"dataset={name} is no list of rows")
    return rows


def check_rows(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Refuse rows whose columns are missing or shifted. Raises DataError naming the row and the column."""
    for number, row in enumerate(rows):
        label = f"dataset={name}, row {number} ({row.get('instance_id', 'no id')})"
        if missing := [column for column in COLUMNS if column not in row]:
            raise DataError(f"{label} has no {', '.join(missing)}: it is a row of an older form; take the data set as swebench 5 publishes it")
        for column in LISTS:
            value = row[column]
            try:
                value = json.loads(value) if isinstance(value, str) else value
            except ValueError:
                value = None
            if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
                raise DataError(f"{label}: {column} is not a list of tests; are its columns shifted?")
        if row["patch"] and "diff --git" not in str(row["patch"]):
            raise DataError(f"{label}: patch is not a diff; are its columns shifted?")
    return list(rows)


def run_harness(dataset: str, split: str, predictions: Predictions, folder: Path, parallel: int, run: Callable[..., Any] = subprocess.run) -> int:
    """`swebench eval` over the good predictions, its reports in `folder`."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", dir=folder) as file:
        file.writelines(prediction.line() for prediction in predictions.good)
        file.flush()
        entry = "import sys; from swebench.cli.cli import main; sys.argv[0] = 'swebench'; main()"
        command = [sys.executable, "-c", entry, "eval", dataset, "-p", file.name, "--split", split, "-j", str(parallel), "--report-dir", str(folder)]
        done = run([*command, "--run-id", folder.name], cwd=folder)
    if done.returncode:
        raise SystemFailure(f"swebench eval ended with exit code {done.returncode}; its logs are in {folder}/logs")
    print(f"predictions  {predictions.lines} lines = {len(predictions.good)} evaluated + {len(predictions.bad)} bad; reports in {folder}")
    return 0
