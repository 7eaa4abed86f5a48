"""A process is told from another under its pid by ticks since the machine started, which no change of the clock moves."""

import os
import subprocess
import sys
import time
from pathlib import Path

from sao.runtime.processes import identity, is_alive, kernel_oom_kills, started_ticks

ROOT = Path(__file__).resolve().parents[3]


def test_a_process_is_known_while_it_lives_and_not_after():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = {"pid": child.pid, "started": started_ticks(child.pid)}
    assert is_alive(known) and not is_alive(known | {"started": known["started"] - 1})
    child.communicate(b"\n")
    assert started_ticks(child.pid) is None and not is_alive(known)


def test_what_names_no_process_is_not_alive():
    assert is_alive(identity()) and identity()["pid"] == os.getpid()
    assert not is_alive({}) and not is_alive({"pid": os.getpid()}) and not is_alive({"pid": 2**22 + 1, "started": None})


def test_a_name_with_parentheses_and_spaces_does_not_confuse(tmp_path):
    program = tmp_path / "a ) b ("
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "30"])
    try:
        assert started_ticks(child.pid) >= started_ticks(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_the_kernels_count_is_a_number():
    assert kernel_oom_kills() >= 0


def never_made(told: str) -> str:
    Path(told).write_text(str(os.getpid()))
    time.sleep(60)
    return told


def test_the_process_that_makes_a_model_dies_with_a_killed_command(tmp_path):
    told = tmp_path / "pid"
    script = "import sys; from tests.unit.runtime.test_processes import never_made; from sao.runtime.models import _in_child; _in_child(never_made, sys.argv[1])"
    parent = subprocess.Popen([sys.executable, "-c", script, str(told)], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(told.read_text())
    known = {"pid": child, "started": started_ticks(child)}
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 3
    while is_alive(known) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(known)
