"""The HTTP server of an episode worker: which request is whose, what it asks, and in which form it hears of it.

    POST /v1/chat/completions     OpenAI              Authorization: Bearer KEY
    POST /v1/messages             Anthropic           x-api-key: KEY (or a bearer)
    GET  /v1/models               what there is to ask, with max_model_len
    POST /inference/v1/generate   token ids in, token ids out, with log-probs

The key is the session's secret: it says which episode a request belongs to, and nothing else does. Errors come in the form of the API that was asked, so
that its official client raises what it would raise elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from aiohttp import web

from sao.agents.renderer import Renderer
from sao.agents.sampling import Generate
from sao.config import GatewayConfig
from sao.errors import ConfigError
from sao.gateway import anthropic_form, openai_form
from sao.gateway.messages import Refusal
from sao.gateway.reading import count, items, mapping
from sao.gateway.session import Session, Terms
from sao.trajectory import Purpose

log = logging.getLogger(__name__)

MODEL = "policy"  # what it is called; a request may call it anything
RETRY_AFTER_S = 5
REMEMBERED = 10_000  # ended sessions that are told from unknown ones
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SESSION: web.RequestKey[Session] = web.RequestKey("session", Session)


class Gateway:
    """Starts at the first `open`. generate: see `EnginePool.generate`; outage_s: seconds in which there was no engine, by purpose."""

    def __init__(
        self, config: GatewayConfig, renderer: Renderer, generate: Generate, outage_s: Callable[[Purpose], float] = lambda purpose: 0.0
    ) -> None:
        self.config, self.renderer, self.generate, self.outage_s = config, renderer, generate, outage_s
        self.sessions: dict[bytes, Session] = {}
        self.port = 0
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def open(self, terms: Terms) -> tuple[Session, str]:
        """A session and its secret."""
        await self.start()
        secret = f"sao-{secrets.token_urlsafe(24)}"
        session = Session(terms, self.renderer, self.generate, lambda: self.outage_s(terms.purpose))
        self.sessions[_digest(secret)] = session
        return session, secret

    async def end(self, secret: str) -> None:
        """Answer no more requests with this secret, and wait until those that run are done."""
        digest = _digest(secret)
        session = self.sessions.get(digest)
        if session is None:
            return
        try:
            await session.end()
        finally:
            self.sessions.pop(digest, None)
            self._ended[digest] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def variables(self, secret: str) -> dict[str, str]:
        """What an agent program reads from its environment: where the model is and with which key."""
        host = "127.0.0.1" if self.config.host == "0.0.0.0" else self.config.host
        root = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        return {
            "OPENAI_BASE_URL": f"{root}/v1",
            "OPENAI_API_BASE": f"{root}/v1",
            "OPENAI_API_KEY": secret,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": secret,
            "ANTHROPIC_MODEL": MODEL,
            "NO_PROXY": f"{host},127.0.0.1,localhost",
            "no_proxy": f"{host},127.0.0.1,localhost",
        }

    async def start(self) -> None:
        """Listen on a free port of `gateway.host`. Does nothing where it listens already."""
        async with self._starting:
            if self._runner is not None:
                return
            application = web.Application(client_max_size=int(self.config.max_body_mb * 2**20), middlewares=[self._answered])
            application.router.add_post("/v1/chat/completions", self._chat)
            application.router.add_post("/v1/messages", self._messages)
            application.router.add_get("/v1/models", self._models)
            application.router.add_get("/v1/models/{name:.+}", self._model)
            application.router.add_post("/inference/v1/generate", self._generate)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            try:
                await web.TCPSite(runner, self.config.host, 0).start()
            except OSError as problem:
                await runner.cleanup()
                mend = "name an address of this machine"
                raise ConfigError(f"gateway.host={self.config.host} cannot be listened on ({problem.strerror or problem}); {mend}") from None
            self._runner, self.port = runner, runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- every request ----------------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or whatever went wrong in the form of the API that was asked."""
        try:
            request[_SESSION] = self._session(request)
            return await handler(request)
        except Refusal as refusal:
            return self._refused(request, refusal)
        except web.HTTPRequestEntityTooLarge:
            return self._refused(request, Refusal(413, f"the request has more than {self.config.max_body_mb:g} MB (gateway.max_body_mb)"))
        except web.HTTPException as problem:
            return self._refused(request, Refusal(problem.status, f"{request.method} {request.path}: {problem.reason}"))
        except web.RequestPayloadError:
            return self._refused(request, Refusal(400, "the body is not what its Content-Encoding and Transfer-Encoding say"))
        except RecursionError:
            return self._refused(request, Refusal(400, "the body is nested too deeply"))
        except ConnectionError:
            raise
        except Exception as problem:
            log.exception("%s %s broke", request.method, request.path)
            if _SESSION in request:
                request[_SESSION].broke(problem)
            return self._refused(request, Refusal(500, "the gateway broke on this request; the worker's log has the traceback"))

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "")
        secret = bearer[7:] if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        digest = _digest(secret.strip())
        session = self.sessions.get(digest)
        if session is not None:
            return session
        if digest in self._ended:
            raise Refusal(410, "this session has ended; its key is no longer good for anything", code="session_ended")
        raise Refusal(401, "this key belongs to no session: use the one the program was started with", code="invalid_api_key")

    def _refused(self, request: web.Request, refusal: Refusal) -> web.Response:
        text = str(refusal)
        anthropic = request.path.startswith("/v1/messages")
        body = anthropic_form.error(refusal.status, text) if anthropic else openai_form.error(refusal.status, text, refusal.code, refusal.param)
        response = web.json_response(body, status=refusal.status)
        if refusal.status == 503:
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            response.headers["x-should-retry"] = "false"  # to the official clients: the episode is lost, another try would only take time
        return response

    async def _body(self, request: web.Request) -> Mapping[str, Any]:
        raw = await request.read()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as problem:
            raise Refusal(400, f"the body is not JSON ({type(problem).__name__}: {str(problem)[:120]})") from None
        return mapping(body, "body")

    # -- what can be asked ------------------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = openai_form.read_chat(await self._body(request))
        answer = await request[_SESSION].chat(asked)
        created, model = int(time.time()), asked.model or MODEL
        if not asked.stream:
            return self._reply(request, openai_form.completion(answer, model, created))
        parts = (f"data: {json.dumps(part)}\n\n" for part in openai_form.chunks(answer, model, created, asked.stream_usage))
        return await self._stream(request, [*parts, "data: [DONE]\n\n"])

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        asked = anthropic_form.read_messages(await self._body(request))
        answer = await request[_SESSION].chat(asked)
        model = asked.model or MODEL
        if not asked.stream:
            return self._reply(request, anthropic_form.message(answer, model))
        return await self._stream(
            request, [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in anthropic_form.events(answer, model)]
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        ids = items(body.get("token_ids"), "token_ids")
        if not all(isinstance(token, int) and 0 <= token < 2**31 for token in ids):
            raise Refusal(400, "token_ids must be token ids", param="token_ids")
        params = mapping(body.get("sampling_params") or {}, "sampling_params")
        if params.get("n") not in (None, 1):
            raise Refusal(400, "n must be 1: ask once for each answer", param="n")
        neutral = openai_form.SETTINGS
        asked = {name: params[name] for name in neutral if params.get(name) is not None and params[name] not in neutral[name]}
        turn, generation = await request[_SESSION].continue_tokens(ids, count(params.get("max_tokens"), "max_tokens"), asked)
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": float(logprob), "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.ids.tolist(), turn.logprobs, strict=True)
        ]
        finish = "stop" if generation.finish == "stop" else "length"
        choice = {"index": 0, "token_ids": turn.ids.tolist(), "finish_reason": finish, "logprobs": {"content": content}}
        name = str(body.get("request_id") or request.headers.get("X-Session-ID") or f"generate-{secrets.token_hex(8)}")
        return self._reply(request, {"request_id": name, "choices": [choice], "prompt_logprobs": None})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card(request)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._card(request))

    def _card(self, request: web.Request) -> dict[str, Any]:
        limits = request[_SESSION].terms.limits
        length = limits.max_model_len or limits.max_tokens
        name = request.match_info.get("name", MODEL)
        return {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "sao", "max_model_len": length}

    # -- answers ----------------------------------------------------------------------------------------------------------------------

    def _reply(self, request: web.Request, body: Mapping[str, Any]) -> web.Response:
        if request.transport is None or request.transport.is_closing():
            request[_SESSION].gone()
        return web.json_response(body)

    async def _stream(self, request: web.Request, parts: Iterable[str]) -> web.StreamResponse:
        """The turn is complete before its first byte goes out, so nothing can fail in the middle but the client."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            for part in parts:
                await response.write(part.encode())
            await response.write_eof()
        except ConnectionError:
            request[_SESSION].gone()
        return response


def _digest(secret: str) -> bytes:
    """Secrets are looked up by their hash, so that the time it takes says nothing about them."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
