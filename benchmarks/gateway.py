"""What the gateway adds to a call, what open sessions take of memory, and whether every sampled token is in exactly one training row.

The engine is a stub that answers after a set time, so that what is left of a call's time is the gateway's: reading the request, finding where it belongs,
rendering, the answer, and waiting for one another. 16 clients of another process keep one call each in flight. A call's added time is what its client saw
(connection, parsing and all) minus what the stub was to take, 100 to 300 ms, and minus what the same clients see at the median of a bare HTTP server that
answers after such times and does nothing else; a stub that wakes late because the gateway is busy counts as the gateway. Both servers run on the event loop
that a worker has under Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

IDS = ["gateway_overhead_ms_median", "gateway_overhead_ms_p99", "gateway_rss_mb_1000_sessions"]
CLIENTS, SESSIONS_EACH, TURNS = 16, 25, 4
ENGINE_S = 0.2  # a short turn of a small model, from half to one and a half of it: were all the same, the clients would fall into step
OPEN_SESSIONS, OPEN_TURNS = 1000, 3
SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards box quietly and then read their long list of files again"
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CALL = '<tool_call>{"name": "bash", "arguments": {"command": "ls -la && cat README.md"}}</tool_call>'


def text(seed: int, words: int) -> str:
    known = SENTENCE.split()
    return " ".join(known[(seed * 7 + 3 * i * i + i) % len(known)] for i in range(words))


# -- the client process ---------------------------------------------------------------------------------------------------------------


async def play(http: aiohttp.ClientSession, url: str, key: str, turns: int, number: int) -> list[float]:
    """One episode of an agent with a tool: seconds of each call beyond the stub's. Every fourth asks a sub-question beside its main line."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(1, 300)}, {"role": "user", "content": text(number, 100)}]
    took = []

    async def ask(history: list[dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        body = {"model": "policy", "messages": history, "tools": [TOOL]}
        async with http.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            answer = await response.json()
            response.raise_for_status()
        seconds = time.perf_counter() - began
        took.append(seconds - answer["usage"]["prompt_tokens_details"]["cached_tokens"] / 1e6)  # where the stub says what it was to take
        return answer["choices"][0]["message"]  # type: ignore[no-any-return]

    for turn in range(turns):
        said = await ask(messages)
        messages.append(said)
        for call in said.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text(number + turn, 100)})
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": text(number + turn, 60)})
        if number % 4 == 0 and turn == 1:
            await ask([*messages[:-1], {**messages[-1], "content": "another way?"}])
    return took


async def clients(plan: dict[str, Any]) -> list[float]:
    keys, took = iter(list(enumerate(plan["keys"]))), []
    connector = aiohttp.TCPConnector(limit=plan["clients"])
    async with aiohttp.ClientSession(connector=connector) as http:

        async def one() -> None:
            for number, key in keys:
                took.extend(await play(http, plan["url"], key, plan["turns"], number))

        await asyncio.gather(*(one() for _ in range(plan["clients"])))
    return took


# -- the serving process --------------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
        show_progress=False,
    )
    backend.train_from_iterator([text(seed, 200) for seed in range(20)] + [json.dumps(TOOL), CALL] * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


class Stub:
    """Says a call or some words after `seconds`. Each sampled token has a log-prob of its own, so that it can be told from every other."""

    def __init__(self, renderer: Any, seconds: float) -> None:
        from sao.inference.protocol import Generation

        self.generation, self.seconds = Generation, seconds
        spoken = [CALL, text(5, 20), f"{text(6, 8)} {CALL}"]
        self.replies = itertools.cycle([np.asarray(renderer.encode_turn({"role": "assistant", "content": said}), np.int32) for said in spoken])
        self.sampled = 0
        self.draw = random.Random(0)

    async def __call__(self, request: Any) -> Any:
        ids = next(self.replies)
        marks = np.arange(self.sampled, self.sampled + len(ids))
        self.sampled += len(ids)
        seconds = self.seconds * self.draw.uniform(0.5, 1.5)
        if seconds:
            await asyncio.sleep(seconds)
        versions = np.full(len(ids), 3, np.int32)
        return self.generation(ids, (-marks * 2.0**-24).astype(np.float32), versions, "stop", "stub", len(request.token_ids), round(seconds * 1e6))


async def serve(seconds: float, sessions: int, turns: int, count: int) -> dict[str, Any]:
    """Serve `sessions` open sessions to a client process with `count` clients; nothing is closed before everything is measured."""
    from sao.agents.renderer import load_renderer
    from sao.agents.turns import Limits
    from sao.config import GatewayConfig
    from sao.environment import Task
    from sao.gateway.server import Gateway
    from sao.gateway.session import Terms
    from sao.trajectory import SamplingSpec

    renderer = load_renderer("chatml", tokenizer())
    stub = Stub(renderer, seconds)
    gateway = Gateway(GatewayConfig(), renderer, stub)
    gc.freeze()  # as a worker does
    before = rss_mb()
    limits = Limits(max_turns=64, max_turn_tokens=256, max_tokens=100_000, time_limit_s=3600.0)
    opened = [
        await gateway.open(Terms(f"train-{i}.0", Task(f"t{i}", "program", {}), limits, SamplingSpec(stop=renderer.stop_ids))) for i in range(sessions)
    ]
    took = await measured(gateway.variables("")["OPENAI_BASE_URL"], [secret for _, secret in opened], turns, count)
    held = rss_mb()
    rows = [row for session, _ in opened for row in session.tree.segments(session.terms.sampling)]
    seen = Counter(round(-float(logprob) * 2**24) for row in rows for logprob in row.logprobs[row.action_mask])
    prompts = [len(turn.tokens()) for session, _ in opened for turn in session.tree.turns]
    await gateway.close()
    return {
        "took": took,
        "rss_mb": held,
        "growth_mb": held - before,
        "rows": len(rows),
        "tokens_sampled": stub.sampled,
        "tokens_in_one_row": sum(n == 1 for n in seen.values()),
        "tokens_in_several": sum(n > 1 for n in seen.values()),
        "tokens_in_none": stub.sampled - len(seen),
        "prompt_tokens_median": statistics.median(prompts),
        "prompt_tokens_max": max(prompts),
        "turns": len(prompts),
    }


async def measured(url: str, keys: list[str], turns: int, count: int) -> list[float]:
    """What the clients, in a process of their own, saw."""
    plan = {"url": url, "keys": keys, "turns": turns, "clients": count}
    client = await asyncio.create_subprocess_exec(sys.executable, __file__, "--client", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    printed, _ = await client.communicate(json.dumps(plan).encode())
    if client.returncode:
        raise SystemExit("the client process failed")
    return json.loads(printed)  # type: ignore[no-any-return]


async def bare(seconds: float, sessions: int, turns: int, count: int) -> dict[str, Any]:
    """The same clients at a server that reads a request, waits as long as the stub does, and says something of the same form."""
    draw = random.Random(0)
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -la && cat README.md"}'}}
    said = itertools.cycle([{"content": None, "tool_calls": [call]}, {"content": text(5, 20)}, {"content": text(6, 8), "tool_calls": [call]}])

    async def chat(request: web.Request) -> web.Response:
        await request.json()
        wait = seconds * draw.uniform(0.5, 1.5)
        await asyncio.sleep(wait)
        usage = {"prompt_tokens_details": {"cached_tokens": round(wait * 1e6)}}
        return web.json_response({"choices": [{"message": {"role": "assistant", **next(said)}}], "usage": usage})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    took = await measured(f"http://127.0.0.1:{port}/v1", ["none"] * sessions, turns, count)
    await runner.cleanup()
    return {"took": took}


def rss_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=4, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--bare", nargs=4, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(uvloop.run(clients(json.load(sys.stdin)))))
        return
    if args.serve or args.bare:
        seconds, sessions, turns, count = args.serve or args.bare
        print(json.dumps(uvloop.run((serve if args.serve else bare)(seconds, int(sessions), int(turns), int(count)))))
        return

    def measure(*numbers: float, server: str = "--serve") -> dict[str, Any]:
        """In a process of its own, which imports what an episode worker does."""
        command = [sys.executable, __file__, server, *map(str, numbers)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # type: ignore[no-any-return]

    calls = measure(ENGINE_S, CLIENTS * SESSIONS_EACH, TURNS, CLIENTS)
    floor = measure(ENGINE_S, CLIENTS * SESSIONS_EACH, TURNS, CLIENTS, server="--bare")
    open_ = measure(0.0, OPEN_SESSIONS, OPEN_TURNS, CLIENTS)
    report(calls, floor["took"], open_)


def quantiles(values: Any) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (5, 50, 90, 95, 99)} | {"max": float(values.max())}


def report(calls: dict[str, Any], floor: list[float], open_: dict[str, Any]) -> None:
    from common import write_result

    for run in (calls, open_):
        if run["tokens_in_several"] or run["tokens_in_none"]:
            raise SystemExit(f"not every sampled token is in exactly one row: {run}")
    seen, without = np.asarray(calls.pop("took")) * 1000, np.asarray(floor) * 1000
    added = seen - np.median(without)
    open_.pop("took")
    detail = {
        "clients": CLIENTS,
        "calls": len(added),
        "engine_ms": ENGINE_S * 1000,
        "added_ms": quantiles(added),
        "whole_ms": quantiles(seen),
        "bare_server_ms": quantiles(without),
        "measured": "in the client: its whole call less the engine's nominal time (whole_ms), less the median of the same at a bare server (bare_server_ms)",
        **calls,
    }
    quarters = np.array_split(added, 4)
    for name, claim, quantile, bar in (
        (IDS[0], "what the gateway adds to a call over a bare HTTP server, stub engine and 16 concurrent clients, ms, median", 50, 3.0),
        (IDS[1], "the same, 99th percentile", 99, 10.0),
    ):
        values = [float(np.percentile(part, quantile)) for part in quarters]
        write_result(name, claim, float(np.percentile(added, quantile)), bar, higher_is_better=False, values=values, detail=detail)
    write_result(
        IDS[2], "resident memory of the whole serving process with 1,000 open sessions of 3 turns or more each, MB", open_["rss_mb"], 300.0,
        higher_is_better=False, values=[open_["rss_mb"]], detail=open_,
    )  # fmt: skip


if __name__ == "__main__":
    main()
