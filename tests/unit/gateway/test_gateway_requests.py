"""What a client may do wrong, what it may ask otherwise, and what may break under it: one typed outcome each."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import anthropic
import openai
import pytest
from agents_kit import CALCULATOR, ScriptedGenerate
from gateway_kit import CALL, RENDERER, rows, says, served, terms
from openai import AsyncOpenAI

from sao.config import GatewayConfig
from sao.errors import ConfigError, EngineFailure
from sao.gateway.messages import ChatRequest, Refusal
from sao.gateway.session import Session

HELLO = [{"role": "user", "content": "hello"}]


def openai_client(variables, **more):
    return AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0, **more)


def anthropic_client(variables):
    return anthropic.AsyncAnthropic(base_url=variables["ANTHROPIC_BASE_URL"], api_key=variables["ANTHROPIC_API_KEY"], max_retries=0)


def with_openai(replies, play, **options):
    """The session after `play(client, session)` with the official client."""

    async def run():
        async with served(replies, **options) as (session, variables):
            async with openai_client(variables) as client:
                await play(client, session)
            return session

    return asyncio.run(run())


def post(replies, bodies, path="/chat/completions", key=None, **options):
    """Raw requests: what each is answered with, (status, JSON)."""

    async def run():
        answers = []
        async with served(replies, **options) as (_, variables), aiohttp.ClientSession() as client:
            for body in bodies:
                data = body if isinstance(body, bytes | str) else json.dumps(body)
                headers = {"Authorization": f"Bearer {key or variables['OPENAI_API_KEY']}"}
                base = variables["OPENAI_BASE_URL"].removesuffix("/v1") if path.startswith("/inference") else variables["OPENAI_BASE_URL"]
                async with client.post(base + path, data=data, headers=headers) as response:
                    answers.append((response.status, await response.json()))
        return answers

    return asyncio.run(run())


def test_a_stream_says_the_same_as_an_answer_with_usage_at_its_end():
    async def play(client, session):
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}] * 2 and [call.index for call in calls] == [0, 1]
        assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage.total_tokens == session.tree.total

    with_openai([says(CALL + CALL)], play)


def test_the_anthropic_client_calls_a_tool_in_a_stream_and_goes_on_in_the_same_row():
    tool = {"name": "calculator", "description": "adds", "input_schema": CALCULATOR["function"]["parameters"]}

    async def run():
        async with served([says("hm " + CALL), says("3")]) as (session, variables), anthropic_client(variables) as client:
            async with client.messages.stream(model="m", max_tokens=50, system="add", messages=HELLO, tools=[tool]) as stream:
                first = await stream.get_final_message()
            assert first.stop_reason == "tool_use" and [block.type for block in first.content] == ["text", "tool_use"]
            result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "3"}]}
            messages = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await client.messages.create(model="m", max_tokens=50, system="add", messages=messages, tools=[tool])
            assert second.stop_reason == "end_turn" and second.content[0].text == "3"
            return session

    (row,) = rows(asyncio.run(run()))
    assert "hm <tool_call>" in RENDERER.encoder.decode(row.token_ids.tolist())


def test_the_token_endpoint_answers_ids_with_log_probs_and_extends_its_own_rows():
    prompt = RENDERER.open(HELLO, ())
    replies = [says("a"), says("b")]

    async def run():
        async with served(replies) as (session, variables), aiohttp.ClientSession() as client:
            answers, ids = [], prompt
            for _ in range(2):
                body = {"model": "m", "token_ids": ids, "sampling_params": {"max_tokens": 9, "temperature": 1.0, "logprobs": 1}}
                headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}", "X-Session-ID": "rollout-1"}
                url = variables["OPENAI_BASE_URL"].removesuffix("/v1") + "/inference/v1/generate"
                async with client.post(url, json=body, headers=headers) as response:
                    answers.append(await response.json())
                choice = answers[-1]["choices"][0]
                ids = [*ids, *choice["token_ids"], *RENDERER.delta(choice["token_ids"], HELLO)]
            return session, answers

    session, answers = asyncio.run(run())
    (row,) = rows(session)
    choice = answers[1]["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in says("b")]
    assert choice["finish_reason"] == "stop" and answers[0]["request_id"] == "rollout-1"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == row.logprobs[-len(says("b")) :].tolist()


def test_a_call_that_cannot_be_executed_reaches_the_client_as_the_text_it_is():
    bad = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'

    async def play(client, session):
        message = (await client.chat.completions.create(model="m", messages=HELLO, tools=[CALCULATOR])).choices[0].message
        assert message.content == bad and not message.tool_calls
        assert session.counts["parse_errors/unknown_tool"] == 1

    with_openai([says(bad)], play)


def test_a_turn_cut_off_calls_nothing_and_the_smaller_limit_of_client_and_run_holds():
    async def play(client, session):
        choice = (await client.chat.completions.create(model="m", messages=HELLO, tools=[CALCULATOR], max_tokens=len(says(CALL)) - 1)).choices[0]
        assert choice.finish_reason == "length" and not choice.message.tool_calls and choice.message.content.startswith("<tool_call>")
        assert (await client.chat.completions.create(model="m", messages=HELLO, max_tokens=10_000)).choices[0].finish_reason == "length"
        assert session.generate.requests[1].sampling.max_tokens == 64

    with_openai([says(CALL), says("a" * 200)], play)


def test_tool_choice_none_makes_a_turn_text_whatever_it_spells():
    async def play(client, session):
        answer = await client.chat.completions.create(model="m", messages=HELLO, tools=[CALCULATOR], tool_choice="none")
        assert answer.choices[0].message.content == CALL

    with_openai([says(CALL)], play)


def test_settings_of_the_client_are_overridden_and_counted():
    async def play(client, session):
        await client.chat.completions.create(model="m", messages=HELLO, temperature=0.2, top_p=1.0, seed=3, logit_bias={"5": 1}, presence_penalty=0)
        assert session.generate.requests[0].sampling.temperature == 1.0 and session.generate.requests[0].sampling.seed is None

    session = with_openai([says("a")], play)
    assert {key: n for key, n in session.counts.items() if "overridden" in key and n} == {
        f"gateway/overridden/{name}": 1 for name in ("temperature", "seed", "logit_bias")
    }


def test_settings_of_the_client_are_refused_by_name_where_the_run_wants_that():
    async def play(client, session):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=HELLO, temperature=0.2)
        assert refused.value.param == "temperature" and "gateway.sampling=reject" in str(refused.value)
        await client.chat.completions.create(model="m", messages=HELLO, temperature=1.0, max_tokens=5)

    with_openai([says("a")], play, settings="reject")


REFUSED = {
    "not JSON": b"{",
    "nested": b'{"messages": ' + b"[" * 100_000,
    "no object": [1],
    "n": {"messages": HELLO, "n": 2},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    "no messages": {"model": "m"},
    "empty": {"messages": []},
    "role": {"messages": [{"role": "robot", "content": "x"}]},
    "content": {"messages": [{"role": "user", "content": 5}]},
    "prefill": {"messages": [*HELLO, {"role": "assistant", "content": "I"}]},
    "arguments": {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}, *HELLO]},
    "tool": {"messages": HELLO, "tools": [{"type": "web_search"}]},
    "max_tokens": {"messages": HELLO, "max_tokens": 0},
    "response_format": {"messages": HELLO, "response_format": {"type": "json_object"}},
    "stop": {"messages": HELLO, "stop": 5},
}


def test_what_cannot_be_served_is_refused_in_the_form_of_the_api():
    for (status, body), name in zip(post([], REFUSED.values()), REFUSED, strict=True):
        assert status == 400 and set(body["error"]) == {"message", "type", "param", "code"}, name
    for status, body in post(
        [], [b"{", {"messages": HELLO}, {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}], "/messages"
    ):
        assert status == 400 and body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    (status, _), (negative, _) = post([], [{"token_ids": []}, {"token_ids": [-1]}], "/inference/v1/generate")
    assert status == negative == 400


def test_a_body_that_cannot_be_unpacked_or_walked_costs_the_session_nothing():
    def nested(depth):
        function = b'{"name": "f", "parameters": {"a": ' + b"[" * depth + b"]" * depth + b"}}"
        return b'{"messages": [{"role": "user", "content": "b"}], "tools": [{"type": "function", "function": ' + function + b"}]}"

    answers = post([says("a")] * 40, [*(nested(depth) for depth in range(960, 1000)), {"messages": HELLO}])
    assert {status for status, _ in answers[:-1]} <= {200, 400} and answers[-1][0] == 200

    async def run():
        async with served([says("a")]) as (session, variables), aiohttp.ClientSession() as client:
            headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}", "Content-Encoding": "gzip"}
            async with client.post(variables["OPENAI_BASE_URL"] + "/chat/completions", data=b"not gzip", headers=headers) as response:
                assert response.status == 400 and "Content-Encoding" in (await response.json())["error"]["message"]
            assert session.failure is None

    asyncio.run(run())


def test_ten_megabytes_are_refused_as_too_large():
    ((status, body),) = post([], [{"messages": [{"role": "user", "content": "x" * 10_000_000}]}])
    assert status == 413 and "gateway.max_body_mb" in body["error"]["message"]
    assert post([says("a")], [{"messages": HELLO}], config=GatewayConfig(max_body_mb=0.5))[0][0] == 200


def test_a_secret_of_nobody_and_one_of_an_ended_session_are_told_apart():
    async def run():
        async with served([says("a")]) as (session, variables), openai_client(variables) as client:
            async with openai_client({**variables, "OPENAI_API_KEY": "sao-stolen"}) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            assert (await client.models.list()).data[0].max_model_len == 100_000
            await session.gateway.end(session.secret)
            with pytest.raises(openai.APIStatusError) as gone:
                await client.chat.completions.create(model="m", messages=HELLO)
            assert gone.value.status_code == 410 and "ended" in str(gone.value)
            with pytest.raises(anthropic.APIStatusError) as also:
                await anthropic_client(variables).messages.create(model="m", max_tokens=5, messages=HELLO)
            assert also.value.status_code == 410

    asyncio.run(run())


def test_an_address_that_is_not_ours_is_named():
    async def run(host):
        async with served([], GatewayConfig(host=host)) as (_, variables):
            return variables["OPENAI_BASE_URL"]

    with pytest.raises(ConfigError, match=r"gateway\.host=203\.0\.113\.7"):
        asyncio.run(run("203.0.113.7"))
    assert asyncio.run(run("0.0.0.0")).startswith("http://127.0.0.1:")


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers():
    async def play(client, session):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 500}])
        assert refused.value.code == "context_length_exceeded" and "maximum context length is 100 tokens" in str(refused.value)
        assert session.cut == "tokens"
        await client.chat.completions.create(model="m", messages=HELLO)
        assert session.cut == "" and session.generate.requests[0].sampling.max_tokens == min(64, 100 - len(RENDERER.open(HELLO, ())))

    with_openai([says("a")], play, max_model_len=100)


def test_requests_beyond_the_turn_limit_are_refused():
    async def play(client, session):
        await client.chat.completions.create(model="m", messages=HELLO)
        with pytest.raises(openai.PermissionDeniedError, match=r"rollout\.max_turns"):
            await client.chat.completions.create(model="m", messages=HELLO)
        assert session.cut == "turns"

    with_openai([says("a")], play, max_turns=1)


def test_an_engine_that_fails_is_a_503_and_the_session_is_lost_for_good():
    async def play(client, session):
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="m", messages=HELLO)
        assert failed.value.status_code == 503 and failed.value.response.headers["retry-after"]
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=HELLO)
        assert isinstance(session.failure, EngineFailure) and session.broken.is_set()

    assert len(with_openai([EngineFailure("gone"), says("never asked")], play).generate.requests) == 1


def test_a_client_that_leaves_in_the_middle_is_counted_and_its_turn_kept():
    async def run():
        async with served([0.2, says("a"), says("b")]) as (session, variables):
            async with openai_client(variables, timeout=0.05) as hasty:
                with pytest.raises(openai.APITimeoutError):
                    await hasty.chat.completions.create(model="m", messages=HELLO, stream=True)
            async with openai_client(variables) as client:
                await client.chat.completions.create(model="m", messages=HELLO)
            await session.gateway.end(session.secret)
            return session

    session = asyncio.run(run())
    assert session.counts["gateway/disconnects"] == 1 and sum(row.sampled_tokens for row in rows(session)) == len(says("a")) + len(says("b"))


def test_the_end_of_a_session_waits_for_what_is_being_sampled():
    async def run():
        session = Session(terms(), RENDERER, ScriptedGenerate([0.05, says("a")]))
        asking = asyncio.ensure_future(session.chat(ChatRequest(HELLO)))
        await asyncio.sleep(0.01)
        await session.end()
        assert asking.done() or len(session.tree.turns) == 1
        with pytest.raises(Refusal, match="ended"):
            await session.chat(ChatRequest(HELLO))
        return session

    assert len(asyncio.run(run()).tree.turns) == 1


def test_requests_at_once_share_the_episodes_tokens_and_none_exceeds_them():
    limit = len(RENDERER.open(HELLO, ())) + 12

    async def run():
        session = Session(terms(max_tokens=limit, max_turn_tokens=10), RENDERER, ScriptedGenerate([0.01, says("a" * 50), says("b")]))
        return session, await asyncio.gather(*(session.chat(ChatRequest(HELLO)) for _ in range(4)), return_exceptions=True)

    session, outcomes = asyncio.run(run())
    assert session.tree.total == limit and [type(outcome) for outcome in outcomes[2:]] == [Refusal] * 2
    rows(session)


def test_one_that_finds_too_few_tokens_waits_for_what_the_others_leave_over():
    limit = len(RENDERER.open(HELLO, ())) + 12

    async def run():
        session = Session(terms(max_tokens=limit, max_turn_tokens=10), RENDERER, ScriptedGenerate([0.01, says("b"), says("a" * 50)]))
        return session, await asyncio.gather(*(session.chat(ChatRequest(HELLO)) for _ in range(2)))

    session, answers = asyncio.run(run())
    assert [answer.output_tokens for answer in answers] == [len(says("b")), 10] and session.tree.total == limit


def test_a_context_that_the_engine_bounds_is_learnt_from_what_it_sampled_not_from_what_a_stop_string_left():
    short = says("stop here and more", closed=False)

    async def play(client, session):
        await client.chat.completions.create(model="m", messages=HELLO, stop="stop")
        assert session.context_limit == len(RENDERER.open(HELLO, ())) + len(short)
        await client.chat.completions.create(model="m", messages=HELLO)

    with_openai([(short, "length"), says("a")], play)
