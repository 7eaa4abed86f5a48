"""Symbolic grading in real worker processes: verdicts, bombs, crashes, threads, and what is refused before a process sees it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import threading
import time

import pytest
from grader_pairs import pairs

from sao.errors import ConfigError, RewardFailure
from sao.evals import symbolic
from sao.evals.symbolic import SymbolicGrader, doubt, exact, grade, grade_blocking, read_answer, refusal

SLOW = r"\binom{999999999}{499999999}"


@pytest.fixture(scope="module")
def grader():
    grader = SymbolicGrader(processes=1, timeout_s=20)
    grader.judge("x+x", "2x")
    yield grader
    pids = grader.pids
    grader.close()
    assert pids and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture
def shared(grader, monkeypatch):
    monkeypatch.setattr(symbolic, "_shared", [grader])
    return grader


def test_the_table_of_answers_by_hand(shared):
    async def verdicts():
        return [(await grade(answer, gold)).kind for _, answer, gold, _ in pairs()]

    found = asyncio.run(verdicts())
    assert len(found) >= 120
    assert [(a, g, kind) for (_, a, g, expected), kind in zip(pairs(), found, strict=True) if kind != expected] == []


def test_an_overrun_is_killed_and_the_event_loop_never_waits(grader, monkeypatch):
    monkeypatch.setattr(grader, "timeout_s", 0.5)
    before = grader.pids

    async def beside():
        late = 0.0
        judging = asyncio.create_task(grader.judge_async(SLOW, r"\sqrt{2}"))
        while not judging.done():
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            late = max(late, time.monotonic() - due)
        return judging.result(), late

    verdict, late = asyncio.run(beside())
    assert verdict.kind == "timeout" and not verdict
    assert late < 0.2  # far below the time-out, though the cores are shared
    assert grader.pids != before
    monkeypatch.setattr(grader, "timeout_s", 20)
    assert grader.judge("x+x+x", "3x")


def test_a_worker_killed_by_chance_is_replaced_and_the_answer_judged_again(grader):
    assert grader.judge("y+y", "2y")
    judged = []
    asking = threading.Thread(target=lambda: judged.append(grader.judge(r"\sum_{k=1}^{50} k+x", "1275+x")))
    asking.start()
    os.kill(grader.pids[0], signal.SIGKILL)
    asking.join()
    assert judged[0].kind == "correct"


def test_an_answer_whose_grading_dies_twice_is_unparseable(grader, monkeypatch):
    def dies(*_):
        raise RewardFailure("died", "crashed")

    monkeypatch.setattr(grader._processes[0], "call", dies)
    assert grader.judge("y+1", "y") == symbolic.Verdict("unparseable", "the process that was to grade it died twice")


def test_workers_outlive_the_thread_that_asked_first():
    grader = SymbolicGrader(processes=1)
    first = threading.Thread(target=grader.judge, args=("x+1", "1+x"))
    first.start()
    first.join()
    pids = grader.pids
    assert grader.judge("x+2", "2+x") and grader.pids == pids
    grader.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x" * 3000, "characters"),
        ("(" * 50 + ")" * 50, "nested"),
        ("9" * 300, "digits"),
        ("2^{2^{2^{2}}}", "tower"),
        ("2^2^2^2", "tower"),
        ("((a^b)^c)^d", "tower"),
        ("2^{99999}", "exponent"),
        ("9999!", "factorial"),
        ("(5!)!", "factorial"),
    ],
)
def test_what_sympy_is_spared(text, reason):
    assert reason in refusal(text)


@pytest.mark.parametrize("text", ["e^{x^2}", "x^2+y^3+z^4", r"\frac{x^{2}}{y^{3^{2}}}", "100!", "2^{9999}", "x^{-2}"])
def test_what_it_is_not_spared(text):
    assert refusal(text) == ""


def test_long_refused_texts_cost_the_event_loop_nothing():
    started = time.process_time()
    for text in ("1 " + "a" * 1900 + "1" * 90, "{" * 39 + "1" * 100 + "}" * 39, "\\frac" * 300, "1," * 900, "^" * 1500, r"\sqrt(" * 39, "x=" * 900):
        exact(rf"\boxed{{{text}", r"\sqrt{2}")
        doubt(text)
    assert time.process_time() - started < 0.7


def test_a_gold_that_does_not_verify_says_why(grader, shared):
    assert grader.fault(r"\frac{1}{2}+x") == ""
    assert "brackets" in grader.fault("(1,2")
    assert "word" in doubt("many")
    assert doubt(r"\text{Evelyn}") == "" and doubt("42") == ""
    with pytest.raises(RewardFailure, match="cannot be graded against"):
        grade_blocking("5", "(1,2")


def test_without_math_verify_numbers_are_graded_and_formulas_refused(monkeypatch):
    monkeypatch.setattr(symbolic, "_shared", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert grade_blocking(r"\boxed{\frac12}".replace("12", "{1}{2}"), "0.5")
    assert grade_blocking(r"\boxed{\sqrt{4}}", "2").kind == "unparseable"
    assert "sao-rl[math]" in doubt(r"\sqrt{2}")
    with pytest.raises(ConfigError, match=r"sao-rl\[math\]"):
        grade_blocking(r"\sqrt{2}", r"\sqrt{2}")


@pytest.mark.parametrize(
    ("text", "answer", "fault"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", ""),
        (r"<think>\boxed{1}</think>\boxed{2}", "2", ""),
        (r"\boxed{1", None, "not closed"),
        ("word " * 40, None, "no box"),
        ("42", "42", ""),
    ],
)
def test_the_answer_that_votes(text, answer, fault):
    found, why = read_answer(text)
    assert found == answer and fault in why
