import json
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest

from sao.config import LoggerConfig
from sao.errors import DataError, UserError
from sao.report.metrics import MetricsWriter, read_metrics, surviving
from sao.report.wandb_mirror import WandbMirror

OFF = LoggerConfig(wandb="disabled")


def test_records_carry_axis_step_and_time(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, OFF, {}) as writer:
        writer.log("train", 1, {"reward/mean": 0.5, "critic/vf_explained_var": None})
        writer.log("engine", 2.5, {"engine/running": 3})
    first, second = read_metrics(tmp_path)
    assert first["axis"] == "train" and first["step"] == 1 and first["reward/mean"] == 0.5
    assert "critic/vf_explained_var" not in first
    assert second["axis"] == "engine" and second["step"] == 2.5
    assert 0 <= first["t"] <= second["t"] and first["wall"].startswith("20")


def test_every_record_is_flushed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, OFF, {})
    writer.log("train", 1, {"a/b": 1.0})
    assert len(read_metrics(tmp_path)) == 1
    writer.close()
    writer.close()


def test_non_finite_values_are_refused_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsWriter(tmp_path, OFF, {}) as writer:
        for step in range(3):
            writer.log("train", step, {"a/x": math.nan, "a/y": math.inf, "a/z": 1.0})
        assert writer.non_finite == {"a/x": 3, "a/y": 3}
    last = read_metrics(tmp_path)[-1]
    assert "a/x" not in last and "a/y" not in last and last["a/z"] == 1.0 and last["metrics/non_finite"] == 6.0
    assert len(caplog.records) == 2


def test_unknown_axis_and_reserved_names_are_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, OFF, {}) as writer:
        with pytest.raises(ValueError, match="axis 'nope'"):
            writer.log("nope", 1, {})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'step' is a field"):
            writer.log("train", 1, {"step": 2.0})


def test_torn_last_line_is_cut_and_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"t":100.0,"axis":"train","step":1}\n{"t":101.0,"ax')
    assert len(read_metrics(tmp_path)) == 1
    with MetricsWriter(tmp_path, OFF, {}) as writer:
        writer.log("train", 2, {})
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records] == [1, 2] and records[1]["t"] >= 100.0


def test_broken_line_inside_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\noops\n{"step":2}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path)


def test_rollback_leaves_one_lineage() -> None:
    steps = [1, 2, 3, 4, 3, 4, 5]
    records = [{"axis": "train", "step": s, "n": n} for n, s in enumerate(steps)]
    kept = surviving(records, "train")
    assert [r["step"] for r in kept] == [1, 2, 3, 4, 5] and [r["n"] for r in kept] == [0, 1, 4, 5, 6]


def test_online_without_a_key_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"logger\.wandb=online needs an API key: set WANDB_API_KEY"):
        MetricsWriter(tmp_path, LoggerConfig(wandb="online"), {})
    with pytest.raises(UserError, match=r"logger\.wandb=maybe"):
        MetricsWriter(tmp_path, LoggerConfig(wandb="maybe"), {})


class FakeRun:
    def __init__(self, broken: bool = False) -> None:
        self.defined: dict[str, str | None] = {}
        self.logged: list[dict[str, float]] = []
        self.broken = broken
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
        self.defined[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        if self.broken:
            raise RuntimeError("disk full")
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def fake_wandb(monkeypatch: pytest.MonkeyPatch, run: FakeRun, arguments: dict[str, object]) -> None:
    def init(**kwargs: object) -> FakeRun:
        arguments.update(kwargs)
        return run

    module = types.ModuleType("wandb")
    module.__dict__.update(Settings=lambda **kwargs: kwargs, setup=lambda settings: None, init=init)
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_wandb_gets_a_step_axis_per_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, arguments = FakeRun(), {}
    fake_wandb(monkeypatch, run, arguments)
    with MetricsWriter(tmp_path, LoggerConfig(), {"seed": 3}) as writer:
        writer.log("train", 7, {"reward/mean": 1.0})
        writer.log("publish", 2, {"publish/stall_s": 0.1})
    assert arguments["mode"] == "offline" and arguments["dir"] == str(tmp_path) and arguments["config"] == {"seed": 3}
    assert run.defined == {"train/step": None, "reward/mean": "train/step", "publish/version": None, "publish/stall_s": "publish/version"}
    assert run.logged == [{"reward/mean": 1.0, "train/step": 7}, {"publish/stall_s": 0.1, "publish/version": 2}]
    assert run.finished and writer.wandb_failures == 0


def test_failing_wandb_is_said_once_counted_and_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_wandb(monkeypatch, FakeRun(broken=True), {})
    with MetricsWriter(tmp_path, LoggerConfig(), {}) as writer:
        for step in range(5):
            writer.log("train", step, {"a/b": 1.0})
    assert writer.wandb_failures == 5
    assert [r.getMessage() for r in caplog.records if "W&B" in r.getMessage()] == [
        "W&B failed (RuntimeError: disk full); the run goes on, metrics.jsonl is complete"
    ]
    assert len(read_metrics(tmp_path)) == 5


def test_missing_wandb_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    mirror = WandbMirror(tmp_path, LoggerConfig(), {})
    mirror.log("train/step", 1, {"a/b": 1.0})
    mirror.close()
    assert mirror.failures == 2


SPEAKING_UP = """
import sys, types
from pathlib import Path
from sao.config import LoggerConfig
from sao.report.wandb_mirror import WandbMirror
sys.modules["openai"] = types.ModuleType("openai")  # what makes wandb advise its sister product
mirror = WandbMirror(Path(sys.argv[1]), LoggerConfig(), {})
mirror.log("train/step", 1, {"a/b": 1.0})
mirror.close()
assert mirror.failures == 0
"""


def test_wandb_says_nothing_of_its_own_on_the_terminal(tmp_path: Path) -> None:
    spoken = subprocess.run([sys.executable, "-c", SPEAKING_UP, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (spoken.returncode, spoken.stdout, spoken.stderr) == (0, "", "")


def test_file_is_json_lines_without_nan(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, OFF, {}) as writer:
        writer.log("train", 1, {"a/b": float("nan")})
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in the file"))
