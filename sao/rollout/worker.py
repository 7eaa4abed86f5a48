"""An episode worker: builds the environment of a task, runs the turn loop against the engine pool (or an agent program against the gateway), returns a
trajectory or a typed failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sao.agents.limits import Limits
from sao.agents.renderer import generation_stop_ids, load_renderer
from sao.agents.tokenizer import load_tokenizer
from sao.agents.turns import run_episode
from sao.config import Config, EnvConfig
from sao.environment import AgentProgram
from sao.errors import EnvironmentFailure, SystemFailure, UserError
from sao.inference.pool import EngineHandle, EnginePool
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao.rollout.last_words import named
from sao.rollout.staleness import Finished
from sao.sandbox.episode import sandbox_for
from sao.tasks.source import environment_args, load_environment
from sao.tasks.target import is_program
from sao.trajectory import SamplingSpec, Trajectory

if TYPE_CHECKING:
    from sao.gateway.server import Gateway

log = logging.getLogger(__name__)


class EpisodeWorker:
    """Stateless between episodes but for caches; safe for many concurrent `run` calls on one event loop."""

    def __init__(
        self,
        config: Config,
        env_configs: Sequence[EnvConfig],
        model_path: str,
        engines: Sequence[EngineHandle],
        record: Callable[..., None] = lambda name, method="": None,
    ) -> None:
        """record: hears which episode's code runs, and which method of its environment (`sao.rollout.last_words`)."""
        self.config = config
        self.record = record
        self.environments = {env.name: (load_environment(env.target), environment_args(env, config.reward)) for env in env_configs}
        self.sandboxes = {env.name: env.sandbox for env in env_configs}
        tokenizer = load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
        model, stops = config.model, generation_stop_ids(model_path)
        self.renderer = load_renderer(model.renderer, tokenizer, reasoning=model.reasoning, thinking=model.thinking, extra_stop_ids=stops)
        self.pool = EnginePool(engines, wait_s=config.engine.start_timeout_s)
        self.gateway: Gateway | None = None  # made for the first agent program
        self.limits = Limits.of(config)

    async def run(self, request: EpisodeRequest) -> tuple[Finished[None] | EpisodeFailure, Trajectory | None]:
        """Never raises for a failed episode; an exception from here is a bug of ours. The trajectory of a failed one goes as far as it had got."""
        try:
            trajectory = await named(self._episode(request), request.name, self.record)
        except SystemFailure as failure:
            log.warning("episode %s failed: %s", request.episode_id, failure)
            return EpisodeFailure(request.episode_id, failure.reason, str(failure), failure.sampled_tokens), failure.trajectory
        except UserError:
            raise
        except Exception as error:
            log.exception("episode %s broke", request.episode_id)
            return EpisodeFailure(request.episode_id, "internal", f"{type(error).__name__}: {error}"), None
        if trajectory.finish.kind == "failed":
            why = str(trajectory.info.get("failure", trajectory.finish))
            tokens = trajectory.sampled_tokens + trajectory.meta().tokens_after_stop
            return EpisodeFailure(request.episode_id, trajectory.finish.detail, why, tokens), trajectory
        labelled = replace(trajectory, info={**trajectory.info, "incarnation": request.incarnation})
        return Finished(labelled.meta(), None), labelled

    async def _episode(self, request: EpisodeRequest) -> Trajectory:
        environment_class, args = self.environments[request.task.environment]
        self.record(request.name, f"{environment_class.__name__}.__init__")
        try:
            environment = environment_class(request.task, **args)
        except Exception as error:
            raise EnvironmentFailure(
                f"{environment_class.__name__} could not be built for task {request.task.task_id}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self.record(request.name)
        if is_program(environment_class):
            return await self._program(request, environment)
        async with sandbox_for(environment_class, self.sandboxes[request.task.environment]) as sandbox:
            return await run_episode(
                request.task,
                environment,
                self.renderer,
                self.pool.generate,
                episode_id=request.episode_id,
                admitted_version=request.version,
                sampling=self._sampling(request),
                limits=self.limits,
                purpose=request.purpose,
                pinned_version=request.version if request.pinned else None,
                sandbox=sandbox,
                outage_s=partial(self.pool.outage_s, request.purpose),
                record=partial(self.record, request.name),
            )

    async def _program(self, request: EpisodeRequest, program: AgentProgram) -> Trajectory:
        from sao.gateway.episode import run_program
        from sao.gateway.server import Gateway
        from sao.gateway.session import Terms

        if self.gateway is None:
            self.gateway = Gateway(self.config.gateway, self.renderer, self.pool.generate, self.pool.outage_s)
        terms = Terms(
            name=request.name,
            task=request.task,
            limits=self.limits,
            sampling=self._sampling(request),
            settings=self.config.gateway.sampling,
            purpose=request.purpose,
            pinned_version=request.version if request.pinned else None,
        )
        return await run_program(terms, program, self.gateway, episode_id=request.episode_id, admitted_version=request.version, record=self.record)

    def _sampling(self, request: EpisodeRequest) -> SamplingSpec:
        sampling = self.config.rollout.sampling
        return SamplingSpec(
            temperature=sampling.temperature if request.temperature is None else request.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=self.renderer.stop_ids,
            seed=request.seed,  # None in training: per-request generators slow batched sampling, and an asynchronous run is not reproducible by them
            max_tokens=self.config.rollout.max_turn_tokens,
        )

    async def close(self) -> None:
        if self.gateway is not None:
            await self.gateway.close()
        for environment_class, _ in self.environments.values():
            shutdown = getattr(environment_class, "shutdown", None)
            if shutdown is not None:
                await shutdown()
