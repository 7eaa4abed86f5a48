import io
import re
import time

import pytest
from rich.console import Console

from sao.errors import UserError
from sao.report.curve import braille_curve, smooth, value_range
from sao.report.live import DONE, PlainProgress, Track, clock_text, dropped_text, make_progress
from sao.report.screen import RichProgress

FULL = {
    "version": 3,
    "reward": 0.5,
    "staleness_mean": 1.25,
    "staleness_max": 4,
    "staleness_bound": 4,
    "tokens_per_s": 2310.0,
    "learner_idle": 0.42,
    "engine_idle": 0.08,
    "in_flight": 40,
    "buffered": 7,
    "publications": 3,
    "canary_gap": 3e-6,
    "dropped": {"time": 2, "environment": 5},
}


def screen(width: int = 120, height: int = 40) -> tuple[RichProgress, Console]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    return RichProgress(10, run="demo", model="tiny", environment="calculator", folder="runs/demo-1", console=console), console


def drawn(progress: RichProgress, console: Console) -> str:
    still = Console(width=console.width, file=io.StringIO(), color_system=None)
    with still.capture() as capture:
        still.print(progress.frame())
    return capture.get()


def test_plain_progress_prints_a_line_per_step_without_control_codes() -> None:
    out = io.StringIO()
    progress = PlainProgress(3, "run demo", out, min_interval_s=0)
    progress.phase("training")
    progress.log("engine ready")
    for step in (1, 2, 3):
        progress.update(step=step, **FULL)
        progress.update(in_flight=9)
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "run demo" and lines[1].endswith("training") and lines[2] == "  engine ready"
    assert len(lines) == 6 and "\x1b" not in out.getvalue() and "\r" not in out.getvalue()
    for word in (
        "step 1/3",
        "reward 0.500",
        "staleness 1.2 (max 4)",
        "2,310 tok/s",
        "idle: learner 42%, engine 8%",
        "v3",
        "dropped 7 (environment 5, time 2)",
    ):
        assert word in lines[3]


def test_plain_progress_is_rate_limited_but_shows_the_last_step() -> None:
    out = io.StringIO()
    progress = PlainProgress(100, out=out, min_interval_s=60)
    for step in range(1, 51):
        progress.update(step=step)
    progress.close()
    lines = out.getvalue().splitlines()
    assert [re.split(r"\s*/", line)[0] for line in lines] == ["step   1", "step  50"]


def test_unknown_state_and_mode_are_refused() -> None:
    with pytest.raises(TypeError):
        PlainProgress(3, out=io.StringIO()).update(rewards=1.0)
    with pytest.raises(UserError, match=r"run\.progress=fancy"):
        make_progress("fancy", 3)


def test_auto_is_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress("auto", 3, run="r", model="m", environment="e")
    assert isinstance(progress, PlainProgress) and capsys.readouterr().out == "run r · m · e\n"
    make_progress("auto", 3, run="r", folder="runs/r")
    assert capsys.readouterr().out == "run runs/r\n"


def test_time_left_follows_the_pace() -> None:
    now = [0.0]
    track = Track(10, clock=lambda: now[0])
    assert track.left_s() is None
    for step in (1, 2, 3):
        now[0] += 2.0
        track.update({"step": step, "reward": 0.1 * step})
    assert track.left_s() == pytest.approx(14.0)
    now[0] += 1.0
    assert track.left_s() == pytest.approx(13.0)
    assert [step for step, _ in track.rewards] == [1, 2, 3]


def test_screen_shows_everything_and_fits() -> None:
    for width, height in ((120, 40), (80, 24), (200, 60)):
        progress, console = screen(width, height)
        progress.phase("training")
        progress.log("one\ntwo")
        for step in range(1, 8):
            progress.update(step=step, **FULL)
        text = drawn(progress, console)
        progress.close()
        progress.close()
        lines = text.splitlines()
        assert len(lines) <= height and max(len(line) for line in lines) <= width
        for word in (
            "demo",
            "tiny on calculator",
            "0.500",
            "4 of 4",
            "2,310",
            "42%",
            "8%",
            "40 episodes",
            "3.0e-06",
            "step 7/10",
            "training",
            "two",
            "runs/demo-1",
        ):
            assert word in text, word


def test_screen_before_the_first_step() -> None:
    progress, console = screen()
    progress.phase("engines starting")
    text = drawn(progress, console)
    progress.close()
    assert "engines starting" in text and "the curve begins with the first training step" in text


def test_the_last_frame_says_whether_the_run_is_done() -> None:
    for phase, says in ((DONE, "● done"), ("training", "■ ended while: training")):
        progress, console = screen()
        progress.phase(phase)
        progress.close()
        assert says in drawn(progress, console) and says in console.file.getvalue()  # type: ignore[attr-defined]


def test_updates_do_not_wait_for_the_terminal() -> None:
    progress, _ = screen()
    started = time.perf_counter()
    for step in range(300):
        progress.update(step=step, reward=0.5)
    assert time.perf_counter() - started < 1.0
    progress.close()


def test_curve_rises_with_the_values() -> None:
    rows = braille_curve([(0, 0.0), (10, 1.0)], 10, 4, (0, 10), (0, 1))
    assert rows[-1].plain[0] != " " and rows[0].plain[0] == " "
    assert [len(row.plain) for row in rows] == [10] * 4
    assert smooth([1.0, 1.0]) == pytest.approx([1.0, 1.0])
    assert value_range([0.2, 0.9]) == (0.0, 1.0) and value_range([-3.0, 5.0])[0] < -3


def test_small_texts() -> None:
    assert clock_text(245) == "4:05" and clock_text(3723) == "1:02:03"
    assert dropped_text({}) == "none" and dropped_text({"a": 0}) == "none" and dropped_text({"a": 1, "b": 3}) == "4 (b 3, a 1)"
