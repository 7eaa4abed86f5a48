"""A process is told from another under its pid by ticks since the machine started, which no change of the clock moves."""

import os
import subprocess
import sys

from sao.runtime.processes import identity, is_alive, kernel_oom_kills, started_ticks


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
