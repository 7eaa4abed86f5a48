"""The Anthropic messages API to and from our messages: pure functions of JSON values.

Form: https://docs.anthropic.com/en/api/messages. Its tool results stand in user messages; here each is a message of its own, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sao.environment import Message
from sao.gateway.messages import Answer, ChatRequest, Refusal
from sao.gateway.reading import count, items, mapping, stop_strings, text, texts

SETTINGS = ("temperature", "top_p", "top_k")
FINISH = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def read_messages(body: Mapping[str, Any]) -> ChatRequest:
    """The body of POST /v1/messages. Raises Refusal naming the parameter."""
    limit = count(body.get("max_tokens"), "max_tokens")
    if limit is None:
        raise Refusal(400, "max_tokens: Field required", param="max_tokens")
    asked = {name: body[name] for name in SETTINGS if body.get(name) is not None}
    if mapping(body.get("thinking") or {}, "thinking").get("type", "disabled") != "disabled":
        asked["thinking"] = body["thinking"]
    choice = mapping(body.get("tool_choice") or {}, "tool_choice")
    if choice.get("type", "auto") not in ("auto", "none") or choice.get("disable_parallel_tool_use"):
        asked["tool_choice"] = dict(choice)
    messages: list[Message] = []
    system = texts(body.get("system"), "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(items(body.get("messages"), "messages")):
        messages += _read(mapping(message, f"messages.{index}"), f"messages.{index}")
    if len(messages) == bool(system):
        raise Refusal(400, "messages is empty", param="messages")
    if messages[-1]["role"] == "assistant":
        raise Refusal(400, "the last message is the assistant's: a turn begun by somebody else is not the policy's", param="messages")
    named = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in named:
            message["name"] = named[message["tool_call_id"]]
    return ChatRequest(
        messages=messages,
        tools=[_tool(tool, f"tools.{index}") for index, tool in enumerate(items(body.get("tools") or [], "tools"))],
        max_tokens=limit,
        stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
        asked=asked,
        speaks_only=choice.get("type") == "none",
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
    )


def message(answer: Answer, model: str) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answer),
        "stop_reason": FINISH[answer.finish],
        "stop_sequence": answer.stop_string or None,
        "usage": _usage(answer),
    }


def events(answer: Answer, model: str) -> Iterator[dict[str, Any]]:
    """The answer as the events of a stream; each is named by its `type`."""
    whole = message(answer, model)
    start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.output_tokens}}
    yield {"type": "message_stop"}


def error(status: int, text: str) -> dict[str, Any]:
    """The body of a refused request."""
    return {"type": "error", "error": {"type": ERRORS.get(status, "invalid_request_error"), "message": text}}


def _read(message: Mapping[str, Any], where: str) -> list[Message]:
    """One message as ours: an assistant's with its calls, or a user's with what its tools said before what it says itself."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise Refusal(400, f"{where}.role is {str(role)[:40]!r}: use user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    said: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for index, block in enumerate(items(content, f"{where}.content")):
        at = f"{where}.content.{index}"
        kind = mapping(block, at).get("type")
        if role == "assistant" and kind == "tool_use":
            arguments = json.dumps(mapping(block.get("input") or {}, f"{at}.input"), ensure_ascii=False)
            function = {"name": text(block.get("name"), f"{at}.name"), "arguments": arguments}
            calls.append({"id": text(block.get("id"), f"{at}.id"), "type": "function", "function": function})
        elif role == "user" and kind == "tool_result":
            result = texts(block.get("content"), f"{at}.content")
            results.append({"role": "tool", "content": result, "tool_call_id": text(block.get("tool_use_id"), f"{at}.tool_use_id")})
        elif not (role == "assistant" and kind in ("thinking", "redacted_thinking")):
            said.append(block)
    spoken = texts(said, f"{where}.content")
    if role == "assistant":
        return [{"role": role, "content": spoken, **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": spoken}] if said or not results else [])]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if mapping(tool, where).get("type", "custom") != "custom" or "input_schema" not in tool:
        raise Refusal(400, f"{where} is not a tool of the client's: this model calls such tools alone", param=where)
    function: dict[str, Any] = {"name": text(tool.get("name"), f"{where}.name")}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": mapping(tool["input_schema"], f"{where}.input_schema")}}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    spoken = [{"type": "text", "text": answer.text}] if answer.text or not answer.tool_calls else []
    return [*spoken, *({"type": "tool_use", "id": call.call_id, "name": call.name, "input": dict(call.arguments)} for call in answer.tool_calls)]


def _usage(answer: Answer) -> dict[str, int]:
    uncached = answer.prompt_tokens - answer.cached_tokens
    return {"input_tokens": uncached, "cache_read_input_tokens": answer.cached_tokens, "output_tokens": answer.output_tokens}
