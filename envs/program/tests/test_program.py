"""Agent programs as processes and as functions: what they are given, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from sao.agents.turns import Limits
from sao.config import GatewayConfig
from sao.environment import Task
from sao.envs.program.environment import ROW_BYTES, ProgramEnvironment
from sao.envs.program.process import END_S, run_command
from sao.errors import ConfigError, EngineFailure, EnvironmentFailure, RewardFailure
from sao.gateway.episode import run_program
from sao.gateway.server import Gateway
from sao.gateway.session import Terms
from sao.inference.protocol import Generation
from sao.trajectory import EpisodeId, SamplingSpec

ASK = """
import json, os, sys, urllib.request
def ask(text="hello"):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    key = os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


class Words:
    """A renderer of one token a character, for tests without a tokenizer."""

    stop_ids = (0,)

    def open(self, messages: Any, tools: Any) -> Any:
        return [ord(c) for message in messages for c in message["content"] + "\n"]

    def delta(self, turn_ids: Any, messages: Any) -> Any:
        return self.open(messages, ())

    def text(self, turn_ids: Any) -> Any:
        return "".join(chr(token) for token in turn_ids if token)

    def count_markers(self, messages: Any) -> Any:
        return 0


async def forty_two(request: Any) -> Any:
    ids = np.asarray([ord("4"), ord("2"), 0], np.int32)
    return Generation(ids, np.full(3, -0.5, np.float32), np.zeros(3, np.int32), "stop")


async def is_42(completion: Any, row: Any) -> Any:
    return float(completion.strip() == "42" and row["question"] == "?")


async def no_number(completion: Any, row: Any) -> Any:
    return "many"


def play(program: Any, generate: Any = forty_two, **limits: Any) -> Any:
    async def episode() -> Any:
        words: Any = Words()
        gateway = Gateway(GatewayConfig(), words, generate)
        terms = Terms("train-3.0", program.task, Limits(**{"time_limit_s": 20.0, **limits}), SamplingSpec(stop=(0,)))
        try:
            return await run_program(terms, program, gateway, episode_id=EpisodeId(3), admitted_version=0)
        finally:
            assert not gateway.sessions, "a session outlived its episode"
            await gateway.close()

    return asyncio.run(episode())


def program(script: Any = "", *, reward: Any = "is_42", **args: Any) -> Any:
    command = {} if "function" in args else {"command": [sys.executable, "-c", ASK + script]}
    return ProgramEnvironment(Task("t-1", "program", {"question": "?"}), reward={"function": f"{__name__}:{reward}"}, **command, **args)


def gone(pid: Any) -> Any:
    """Whether a process has ended, or will not run again."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_program_that_knows_the_base_url_makes_a_trajectory_and_is_scored() -> None:
    trajectory = play(program("ask()"))
    assert (trajectory.reward, str(trajectory.finish), trajectory.action_tokens) == (1.0, "terminal", 3)
    assert trajectory.metrics["gateway/requests"] == trajectory.metrics["turns"] == 1
    assert [message["content"] for message in trajectory.info["messages"]] == ["hello", "42"]


def test_its_output_is_scored_where_that_is_asked_for() -> None:
    assert play(program("ask(); print(42)", scored="output")).reward == 1.0
    assert play(program("ask(); print(43)", scored="output")).reward == 0.0


def test_it_is_given_the_task_and_a_directory_of_its_own_and_none_of_the_trainers_secrets(monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    script = """
ask()
assert json.loads(os.environ["SAO_TASK"]) == {"question": "?"}
assert "WANDB_API_KEY" not in os.environ and os.environ["HOME"] == os.getcwd() and not os.listdir()
assert os.environ["GIVEN"] == "5" and "127.0.0.1" in os.environ["NO_PROXY"] and os.environ["ANTHROPIC_API_KEY"]
open("x", "w").write("y"); print(os.getcwd())
"""
    one = program(script, variables={"GIVEN": 5})
    assert play(one).reward == 1.0
    assert one._directory is not None and not one._directory.exists()


def test_an_exit_code_is_a_failure_with_the_end_of_standard_error_and_what_was_sampled() -> None:
    with pytest.raises(EnvironmentFailure, match=r"ended with exit code 3: .*it broke") as failed:
        play(program("ask(); sys.stderr.write('x' * 100_000 + 'it broke'); sys.exit(3)"))
    assert failed.value.sampled_tokens == 3 and failed.value.trajectory.finish.kind == "failed" and len(str(failed.value)) < 3000
    with pytest.raises(EnvironmentFailure, match="cannot be started"):
        play(ProgramEnvironment(Task("t", "program", {}), command="no-such-program --x", reward={"function": f"{__name__}:is_42"}))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program --x", "no-such-program is no program on PATH"),
        (["python", "nowhere.py"], "there is no file nowhere.py in"),
        ("python -m nowhere", ""),
        ([sys.executable, __file__], ""),
        ("", ""),
    ],
)
def test_a_command_that_cannot_start_is_refused_at_the_door(command: str | list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        ProgramEnvironment.check_args(command=command, at_once=2)


def test_one_that_never_asks_or_whose_reward_is_no_number_has_failed_and_is_not_worth_0() -> None:
    trajectory = play(program("pass"))
    assert str(trajectory.finish) == "failed: no_action_tokens" and "without a request" in trajectory.info["failure"]
    with pytest.raises(RewardFailure, match="not a number"):
        play(program("ask()", reward="no_number"))


def test_a_program_over_time_is_killed_whatever_it_ignores_and_however_much_it_says() -> None:
    script = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
ask()
while True:
    print("x" * 100_000, flush=True)
    print("y" * 100_000, file=sys.stderr, flush=True)
"""
    began = time.monotonic()
    trajectory = play(program(script), time_limit_s=5.0)
    assert str(trajectory.finish) == "truncated: time" and trajectory.reward == 0.0 and time.monotonic() - began < 14


def test_a_limit_that_ends_a_program_is_the_policys_doing_not_a_failure() -> None:
    trajectory = play(program("ask(); ask()"), max_turns=1)
    assert str(trajectory.finish) == "truncated: turns" and trajectory.reward == 0.0
    handled = play(program("ask()\ntry: ask()\nexcept Exception: pass"), max_turns=1)
    assert str(handled.finish) == "truncated: turns" and handled.reward == 1.0
    long = play(program("ask('x' * 5000)"))
    assert str(long.finish) == "failed: prompt_too_long" and "5001" in long.info["failure"]


def test_an_engine_that_fails_ends_the_program_at_once_and_the_failure_is_the_engines() -> None:
    async def lost(request: Any) -> Any:
        raise EngineFailure("engine e0 is gone")

    began = time.monotonic()
    with pytest.raises(EngineFailure, match="e0 is gone"):
        play(program("\ntry: ask()\nexcept Exception: pass\nimport time; time.sleep(60)"), lost)
    assert time.monotonic() - began < 8


LEFT: list[Any] = []


async def until_it_left() -> None:
    while not LEFT:  # noqa: ASYNC110 - the loop of an event would be another one
        await asyncio.sleep(0.01)
    LEFT.clear()
    await asyncio.sleep(0.02)


async def leaves_early(row: Any, variables: Any) -> Any:
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    address = variables["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1")
    _, writer = await asyncio.open_connection(*address.split(":"))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {variables['OPENAI_API_KEY']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    LEFT.append(row)


def test_what_a_program_left_to_be_sampled_still_counts_and_still_fails() -> None:
    async def slow(request: Any) -> Any:
        await until_it_left()
        return await forty_two(request)

    async def late(request: Any) -> Any:
        await until_it_left()
        raise EngineFailure("engine e0 is gone")

    trajectory = play(program(function=f"{__name__}:leaves_early"), slow)
    assert trajectory.sampled_tokens == 3 and trajectory.metrics["gateway/disconnects"] == 1
    with pytest.raises(EngineFailure, match="e0 is gone"):
        play(program(function=f"{__name__}:leaves_early"), late)


DAEMON = """
ask()
pid = os.fork()
if pid == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 3)
    import time; time.sleep(60); os._exit(0)
os.waitpid(pid, 0)
os.popen("sleep 60 >/dev/null 2>&1 & echo $!").read()

def ours(pid):
    try:
        return os.environ["OPENAI_API_KEY"].encode() in open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        return False

print(*[pid for pid in os.listdir("/proc") if pid.isdigit() and ours(pid)])
"""


def test_daemons_of_a_program_end_with_it() -> None:
    seen: list[int] = []

    class Watching(ProgramEnvironment):
        async def score(self, messages: Any, output: Any) -> Any:
            seen.extend(int(pid) for pid in output.split())
            return await super().score(messages, output)

    task = Task("t-1", "program", {"question": "?"})
    play(Watching(task, command=[sys.executable, "-c", ASK + DAEMON], reward={"function": f"{__name__}:is_42"}))
    assert len(seen) >= 4, "the program, its daemon, its shell's child, and their keeper"
    assert all(map(gone, seen))


def test_a_cancelled_program_ends_with_its_daemons_and_so_does_one_whose_worker_dies(tmp_path: Any) -> None:
    script = "import os, time; print(os.getpid()) if os.fork() else os.setsid(); open(f'pid{os.getpid()}', 'w'); time.sleep(60)"

    async def cancelled() -> None:
        running = asyncio.ensure_future(run_command([sys.executable, "-c", script], tmp_path, {}))
        while len(list(tmp_path.glob("pid*"))) < 2:  # noqa: ASYNC110 - another process says so, by a file
            await asyncio.sleep(0.01)
        running.cancel()
        began = time.monotonic()
        await asyncio.wait([running])
        assert time.monotonic() - began < END_S, "the keeper was not told, and killed in its turn"

    asyncio.run(cancelled())
    pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2 and all(map(gone, pids))

    for path in tmp_path.glob("pid*"):
        path.unlink()
    worker = f"""
import asyncio, pathlib
from sao.envs.program.process import run_command
asyncio.run(run_command([{sys.executable!r}, "-c", {script!r}], pathlib.Path({str(tmp_path)!r}), {{}}))
"""
    parent = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", worker])
    while len(list(tmp_path.glob("pid*"))) < 2:
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert all(gone(int(path.name[3:])) for path in tmp_path.glob("pid*"))


def test_only_so_many_programs_run_at_once_and_waiting_for_a_place_is_not_their_time() -> None:
    async def both() -> None:
        one, other = (program("pass", at_once=1) for _ in range(2))
        await one.prepare()
        waiting = asyncio.ensure_future(other.prepare())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await one.close()
        await waiting
        await other.close()

    asyncio.run(both())


def test_a_directory_that_takes_too_long_to_remove_holds_no_place(monkeypatch: Any) -> None:
    async def both() -> None:
        one, other = (program("pass", at_once=1) for _ in range(2))
        await one.prepare()
        directory, removed = one._directory, threading.Event()
        with monkeypatch.context() as slow:
            slow.setattr("shutil.rmtree", lambda path, ignore: removed.wait(20))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.close(), 0.05)
        await asyncio.wait_for(other.prepare(), 5)
        removed.set()
        await other.close()
        os.rmdir(directory)

    asyncio.run(both())


async def asks_twice(row: Any, variables: Any) -> Any:
    import urllib.request

    def ask() -> Any:
        body = json.dumps({"messages": [{"role": "user", "content": row["question"]}]}).encode()
        request = urllib.request.Request(
            f"{variables['OPENAI_BASE_URL']}/chat/completions", body, {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
        )
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

    await asyncio.to_thread(ask)
    return await asyncio.to_thread(ask)


async def raises(row: Any, variables: Any) -> Any:
    raise ValueError("no such thing")


def test_a_function_of_this_process_is_an_agent_too() -> None:
    trajectory = play(program(function=f"{__name__}:asks_twice"))
    assert trajectory.reward == 1.0 and len(trajectory.segments) == 2
    with pytest.raises(EnvironmentFailure, match="ValueError: no such thing"):
        play(program(function=f"{__name__}:raises"))


def test_a_row_that_no_variable_holds_is_named_and_a_function_takes_it() -> None:
    args = {"reward": {"function": f"{__name__}:is_42"}}
    row = {"question": "?", "text": "x" * 140_000}
    with pytest.raises(EnvironmentFailure, match=r"the row has 1400\d\d bytes .*SAO_TASK"):
        play(ProgramEnvironment(Task("t", "program", row), command=[sys.executable, "-c", "pass"], **args))
    row["text"] = "x" * (ROW_BYTES - len(json.dumps({"question": "?", "text": ""})))
    assert str(play(ProgramEnvironment(Task("t", "program", row), command=[sys.executable, "-c", "pass"], **args)).finish).startswith("failed: no_")
    row["text"] = "x" * 140_000
    assert play(ProgramEnvironment(Task("t", "program", row), function=f"{__name__}:asks_twice", **args)).reward == 1.0


def test_settings_that_make_no_sense_are_named() -> None:
    for args, said in (
        ({}, "env.args.command or env.args.function"),
        ({"command": "a", "function": "b:c"}, "one of them"),
        ({"command": "a", "scored": "all"}, "env.args.scored"),
        ({"command": "a", "at_once": 0}, "env.args.at_once"),
        ({"function": f"{__name__}:play"}, "async def"),
    ):
        with pytest.raises(ConfigError, match=said):
            ProgramEnvironment(Task("t", "program", {}), reward={}, **args)
    with pytest.raises(ConfigError, match=r"data\.path"):
        ProgramEnvironment.generate_payload(None, "train")
