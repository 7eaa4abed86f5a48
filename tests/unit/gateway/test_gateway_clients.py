"""The official clients against a session whose policy is scripted."""

from __future__ import annotations

import asyncio
import json

from agents_kit import CALCULATOR
from gateway_kit import CALL, RENDERER, rows, says, served
from openai import AsyncOpenAI


def openai_client(variables):
    return AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0)


def test_an_openai_agent_with_a_tool_makes_one_row_that_extends_turn_by_turn():
    async def play():
        async with served([says(CALL), says("3")]) as (session, variables):
            client = openai_client(variables)
            messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2?"}]
            first = await client.chat.completions.create(model="m", messages=messages, tools=[CALCULATOR])
            call = first.choices[0].message.tool_calls[0]
            assert first.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
            messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await client.chat.completions.create(model="m", messages=messages, tools=[CALCULATOR])
            assert second.choices[0].message.content == "3" and second.usage.completion_tokens == len(says("3"))
            return session

    session = asyncio.run(play())
    (row,) = rows(session)
    text = RENDERER.encoder.decode(row.token_ids.tolist())
    assert text.endswith(f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n3<|im_end|>")
    assert session.generate.requests[1].token_ids.tolist() == row.token_ids[: -len(says("3"))].tolist()
