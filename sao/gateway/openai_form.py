"""The OpenAI chat completions API to and from our messages: pure functions of JSON values.

Form: https://platform.openai.com/docs/api-reference/chat. A turn is answered whole, so a stream is a few chunks that come together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sao.environment import Message
from sao.gateway.messages import Answer, ChatRequest, Refusal
from sao.gateway.reading import count, items, mapping, stop_strings, text, texts

# Settings that change the distribution, with the values that change nothing; no value changes nothing where there is none.
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (-1,),
    "min_p": (),
    "seed": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "parallel_tool_calls": (True,),
}
FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises Refusal naming the parameter."""
    if body.get("n") not in (None, 1):
        raise Refusal(400, "n must be 1: ask once for each answer", param="n")
    for name in ("functions", "function_call"):
        if body.get(name):
            raise Refusal(400, f"{name} is an old form: use tools", param=name)
    form = body.get("response_format")
    if form is not None and mapping(form, "response_format").get("type") != "text":
        raise Refusal(400, "response_format other than text would change what the policy is sampled from", param="response_format")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise Refusal(400, "logprobs are not given here: use POST /inference/v1/generate", param="logprobs")
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(items(body.get("tools") or [], "tools"))]
    asked = {name: body[name] for name, neutral in SETTINGS.items() if body.get(name) is not None and body[name] not in neutral}
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        asked["tool_choice"] = choice
    limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := count(body.get(name), name)) is not None]
    options = mapping(body.get("stream_options") or {}, "stream_options")
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=tools,
        max_tokens=min(limits, default=None),
        stop=stop_strings(body.get("stop"), "stop"),
        asked=asked,
        speaks_only=choice == "none",
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        stream_usage=bool(options.get("include_usage")),
    )


def completion(answer: Answer, model: str, created: int) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    choice = {"index": 0, "message": {**answer.message(), "refusal": None}, "finish_reason": FINISH[answer.finish], "logprobs": None}
    return {**_head(answer, model, created, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, model: str, created: int, usage: bool) -> Iterator[dict[str, Any]]:
    """The answer as the chunks of a stream; usage: an additional last one without choices."""
    head = _head(answer, model, created, "chat.completion.chunk")
    message = answer.message()

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    yield chunk({"role": "assistant", "content": ""})
    if message["content"]:
        yield chunk({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, FINISH[answer.finish])
    if usage:
        yield {**head, "choices": [], "usage": _usage(answer)}


def error(status: int, message: str, code: str, param: str) -> dict[str, Any]:
    """The body of a refused request."""
    kind = {401: "authentication_error", 403: "permission_error", 503: "service_unavailable", 500: "server_error"}.get(
        status, "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}


def _messages(value: Any) -> list[Message]:
    found = [_message(mapping(message, f"messages.{index}"), f"messages.{index}") for index, message in enumerate(items(value, "messages"))]
    if not found:
        raise Refusal(400, "messages is empty", param="messages")
    if found[-1]["role"] == "assistant":
        raise Refusal(400, "the last message is the assistant's: a turn begun by somebody else is not the policy's", param="messages")
    named = {call["id"]: call["function"]["name"] for message in found for call in message.get("tool_calls", ())}
    for message in found:
        name = named.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name:
            message.setdefault("name", name)
    return found


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refusal(400, f"{where}.role is {str(role)[:40]!r}: use system, developer, user, assistant or tool", param=f"{where}.role")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    read: Message = {"role": role, "content": texts(message.get("content"), f"{where}.content", kinds)}
    if role == "tool":
        read |= {name: text(message[name], f"{where}.{name}") for name in ("tool_call_id", "name") if message.get(name)}
    if role == "assistant" and message.get("tool_calls"):
        calls = items(message["tool_calls"], f"{where}.tool_calls")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls.{index}") for index, call in enumerate(calls)]
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    function = mapping(mapping(call, where).get("function"), f"{where}.function")
    arguments = text(function.get("arguments") or "{}", f"{where}.function.arguments")
    try:
        readable = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        readable = False
    if not readable:
        raise Refusal(400, f"{where}.function.arguments is not a JSON object", param=f"{where}.function.arguments")
    name = text(function.get("name"), f"{where}.function.name")
    return {"id": str(call.get("id") or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = mapping(tool, where).get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise Refusal(400, f"{where} is not a function: this model calls functions alone", param=where)
    text(function.get("name"), f"{where}.function.name")
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "strict"}}


def _head(answer: Answer, model: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.answer_id}", "object": kind, "created": created, "model": model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
