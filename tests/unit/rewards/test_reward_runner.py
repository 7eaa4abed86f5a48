"""Whatever a reward function does, the answer is a number or a typed failure, the event loop goes on, and no process stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sao.config import RewardConfig
from sao.errors import ConfigError, RewardFailure
from sao.rewards.runner import RewardRunner, check, check_config, close_shared, shared_metrics, shared_runner

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture(scope="module")
def quick() -> Iterator[RewardRunner]:
    """One process with a short limit, shared by the tests of misbehaviour: each must leave it usable for the next."""
    sys.path.insert(0, str(HERE))
    runner = RewardRunner(RewardConfig("sample_rewards:behave", timeout_s=0.4))
    yield runner
    runner.close()
    sys.path.remove(str(HERE))


def failure_of(runner: RewardRunner, completion: str, value: Any = None) -> RewardFailure:
    with pytest.raises(RewardFailure) as caught:
        asyncio.run(runner.score(completion, {"value": value}))
    return caught.value


def gone(pid: int) -> bool:
    """Dead; a zombie counts, since some containers have no init that reaps orphans."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("function", ["length", "length_async"])
def test_a_thousand_scores(function: str) -> None:
    runner = RewardRunner(RewardConfig(f"sample_rewards:{function}", processes=2))

    async def scores() -> list[float]:
        return await asyncio.gather(*(runner.score("x" * n, {}) for n in range(1000)))

    assert asyncio.run(scores()) == [float(n) for n in range(1000)]
    assert runner.metrics() == {
        "reward/scored": 1000.0,
        "reward/failed_raised": 0.0,
        "reward/failed_timeout": 0.0,
        "reward/failed_not_a_number": 0.0,
        "reward/failed_crashed": 0.0,
    }
    assert len(runner.pids) == (2 if function == "length" else 0)
    runner.close()


@pytest.mark.parametrize("completion", ["hang", "hang in c", "sleep"])
def test_a_hanging_function_is_killed_and_the_next_score_works(quick: RewardRunner, completion: str) -> None:
    asyncio.run(quick.score("", {"value": 1}))
    (pid,) = quick.pids
    before = quick.counters["timeout"]
    started = time.monotonic()
    failure = failure_of(quick, completion)
    assert time.monotonic() - started < 2.0
    assert failure.reason == "reward_timeout" and "reward.timeout_s=0.4" in str(failure)
    assert quick.counters["timeout"] == before + 1
    assert gone(pid)
    assert asyncio.run(quick.score("", {"value": 0.5})) == 0.5


def test_programs_that_the_function_started_are_killed_too(quick: RewardRunner) -> None:
    assert failure_of(quick, "child").reason == "reward_timeout"
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "sleep 61" not in listing


@pytest.mark.parametrize(("completion", "text"), [("raise", "raised ValueError: no such thing"), ("exit", "raised SystemExit: 3")])
def test_raising_is_typed_with_its_place(quick: RewardRunner, completion: str, text: str) -> None:
    failure = failure_of(quick, completion)
    assert failure.reason == "reward_raised"
    assert text in str(failure) and "at sample_rewards.py:" in str(failure)
    assert "\n" not in str(failure) and len(str(failure)) < 500


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None, "1", [1.0], 1j, 10**400, {"score": 1.0}])
def test_what_is_not_a_finite_number_is_never_one(quick: RewardRunner, value: Any) -> None:
    failure = failure_of(quick, "", value)
    assert failure.reason == "reward_not_a_number" and "sample_rewards:behave returned" in str(failure)
    asynchronous = RewardRunner(RewardConfig("sample_rewards:behave_async"))
    assert failure_of(asynchronous, "", value).reason == "reward_not_a_number"


def test_a_crash_is_typed_and_the_next_score_works(quick: RewardRunner) -> None:
    failure = failure_of(quick, "os._exit")
    assert failure.reason == "reward_crashed" and "exit code 7" in str(failure)
    assert asyncio.run(quick.score("", {"value": 3})) == 3.0


def test_a_process_killed_from_outside_in_the_middle(quick: RewardRunner) -> None:
    async def kill() -> None:
        await quick.score("", {"value": 1})
        task = asyncio.ensure_future(quick.score("sleep", {}))
        await asyncio.sleep(0.1)
        os.kill(quick.pids[0], signal.SIGKILL)
        with pytest.raises(RewardFailure, match="SIGKILL") as caught:
            await task
        assert caught.value.reason == "reward_crashed"

    asyncio.run(kill())
    assert asyncio.run(quick.score("", {"value": 3})) == 3.0


def test_a_fork_left_behind_does_not_answer_for_the_next_request(quick: RewardRunner) -> None:
    assert asyncio.run(quick.score("fork", {})) == 1.0
    assert [asyncio.run(quick.score("", {"value": n})) for n in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_numbers_of_other_kinds_are_numbers() -> None:
    runner = RewardRunner(RewardConfig("sample_rewards:values"))
    scores = [asyncio.run(runner.score(kind, {})) for kind in ("int", "bool", "float32", "array", "bool_")]
    assert scores == [2.0, 1.0, 0.5, 0.25, 1.0]
    runner.close()


@pytest.mark.parametrize(
    ("completion", "reason"),
    [("hang", "timeout"), ("stubborn", "timeout"), ("raise", "raised"), ("exit", "raised"), ("cancel", "raised")],
)
def test_coroutine_functions_fail_by_type(completion: str, reason: str) -> None:
    runner = RewardRunner(RewardConfig("sample_rewards:behave_async", timeout_s=0.2))

    async def score() -> float:
        with pytest.raises(RewardFailure) as caught:
            await runner.score(completion, {})
        assert caught.value.reason == f"reward_{reason}"
        return await runner.score("", {"value": 1.5})

    assert asyncio.run(score()) == 1.5
    assert runner.counters == {"scored": 1, "raised": 0, "timeout": 0, "not_a_number": 0, "crashed": 0, **{reason: 1}}


def test_a_coroutine_function_can_run_in_a_process() -> None:
    runner = RewardRunner(RewardConfig("sample_rewards:length_async", mode="process"))
    assert asyncio.run(runner.score("abc", {})) == 3.0
    assert len(runner.pids) == 1
    runner.close()


def test_cancelling_a_score_cancels_the_coroutine() -> None:
    runner = RewardRunner(RewardConfig("sample_rewards:behave_async"))

    async def cancel() -> int:
        task = asyncio.ensure_future(runner.score("hang", {}))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(cancel()) == 1


def test_the_event_loop_is_not_blocked() -> None:
    runner = RewardRunner(RewardConfig("sample_rewards:behave", timeout_s=0.4, processes=2))

    async def worst_lag() -> float:
        scores = asyncio.gather(*(runner.score(word, {"value": 1}) for word in ("hang", "", "os._exit", "sleep", "")), return_exceptions=True)
        lag = 0.0
        while not scores.done():
            started = time.monotonic()
            await asyncio.sleep(0.01)
            lag = max(lag, time.monotonic() - started - 0.01)
        return lag

    # One of three: another process of this machine may take the core for longer than we allow.
    assert any(asyncio.run(worst_lag()) < 0.05 for _ in range(3))
    runner.close()


def test_close_leaves_no_process_and_fails_what_runs() -> None:
    runner = RewardRunner(RewardConfig("sample_rewards:behave", processes=2))

    async def close() -> tuple[list[int], list[Any]]:
        await asyncio.gather(*(runner.score("pid", {}) for _ in range(2)))
        tasks = [asyncio.ensure_future(runner.score("sleep", {})) for _ in range(5)]
        await asyncio.sleep(0.3)
        pids = runner.pids
        await asyncio.to_thread(runner.close)
        return pids, await asyncio.gather(*tasks, return_exceptions=True)

    pids, results = asyncio.run(close())
    assert len(pids) == 2 and all(gone(pid) for pid in pids)
    assert [type(result) for result in results] == [RewardFailure] * 5
    assert {result.reason for result in results} == {"reward_crashed"}
    assert failure_of(runner, "").reason == "reward_crashed"
    runner.close()


def test_processes_die_with_a_killed_parent() -> None:
    script = (
        "import asyncio, os, signal\n"
        "from sao.config import RewardConfig\n"
        "from sao.rewards.runner import RewardRunner\n"
        "async def main():\n"
        "    runner = RewardRunner(RewardConfig('sample_rewards:behave'))\n"
        "    pid = await runner.score('pid', {})\n"
        "    asyncio.ensure_future(runner.score('hang', {}))\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(int(pid), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=30)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while not gone(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(int(done.stdout))


def test_messages_and_verl_signatures() -> None:
    messages = [{"role": "user", "content": "hi"}] * 3
    verl_row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {"bonus": 0.5}}
    cases: list[tuple[str, dict[str, Any], float]] = [
        ("with_messages", {}, 3.0),
        ("compute_score", verl_row, 1.5),
        ("compute_score_short", {"answer": "4"}, 1.0),
        ("scorer", {}, 1.0),
        ("async_scorer", {}, 2.0),
    ]
    for function, row, expected in cases:
        runner = RewardRunner(RewardConfig(f"sample_rewards:{function}"))
        assert asyncio.run(runner.score("4", row, messages=messages)) == expected
        if function == "compute_score":
            assert "no column answer, ground_truth or reward_model.ground_truth" in str(failure_of(runner, "4"))
        runner.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(), "reward.function is empty; set it to package.module:function"),
        (RewardConfig("sample_rewards"), "is not of the form package.module:name"),
        (RewardConfig("sample_reward:length"), "there is no module 'sample_reward'"),
        (RewardConfig("sample_rewards:lenght"), "did you mean 'length'?"),
        (RewardConfig("sample_rewards:number"), "is of type int, not a function"),
        (RewardConfig("sample_rewards:Scorer"), "is a class, not a function"),
        (
            RewardConfig("sample_rewards:one_argument"),
            "takes (completion: 'str') -> 'float', which we cannot call; write `def reward(completion, row)`",
        ),
        (RewardConfig("sample_rewards:lists"), "takes a list of completions; it must score one"),
        (RewardConfig("sample_rewards:length", mode="thread"), "reward.mode='thread' is not auto, async or process"),
        (RewardConfig("sample_rewards:length", mode="async"), "reward.mode=async but sample_rewards:length is not a coroutine function"),
        (RewardConfig("sample_rewards:length", timeout_s=0), "reward.timeout_s=0 must be a number of seconds above 0"),
        (RewardConfig("sample_rewards:length", processes=0), "reward.processes=0 must be at least 1"),
    ],
)
def test_configurations_are_refused_in_one_sentence(config: RewardConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert message in str(caught.value) and str(caught.value).startswith("reward.") and "\n" not in str(caught.value)


def test_the_preflight_returns_how_the_function_is_called() -> None:
    assert check("sample_rewards:compute_score").style == "verl"
    assert check("sample_rewards:length_async").is_async


def test_equal_configurations_share_one_runner() -> None:
    config = RewardConfig("sample_rewards:length")
    runner = shared_runner(config)
    assert shared_runner(RewardConfig("sample_rewards:length")) is runner
    assert shared_runner(RewardConfig("sample_rewards:length", timeout_s=1.0)) is not runner
    asyncio.run(runner.score("a", {}))
    assert shared_metrics()["reward/scored"] == 1.0
    pids = runner.pids
    close_shared()
    assert all(gone(pid) for pid in pids)
    assert shared_metrics() == {}
