"""An episode worker: builds the environment of a task, runs the turn loop against the engine pool, returns a trajectory or a typed failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sao.agents.renderer import generation_stop_ids, load_renderer
from sao.agents.tokenizer import load_tokenizer
from sao.agents.turns import Limits, run_episode
from sao.config import Config, EnvConfig
from sao.environment import Environment
from sao.errors import EnvironmentFailure, SystemFailure, UserError
from sao.inference.pool import EngineHandle, EnginePool
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao.rollout.last_words import named
from sao.rollout.staleness import Finished
from sao.sandbox.episode import sandbox_for
from sao.tasks.source import environment_args, load_environment
from sao.trajectory import SamplingSpec, Trajectory

log = logging.getLogger(__name__)


class EpisodeWorker:
    """Stateless between episodes but for caches; safe for many concurrent `run` calls on one event loop."""

    def __init__(
        self,
        config: Config,
        env_configs: Sequence[EnvConfig],
        model_path: str,
        engines: Sequence[EngineHandle],
        record: Callable[[str], None] = lambda name: None,
    ) -> None:
        """record: hears which episode's code runs (`sao.rollout.last_words`)."""
        self.config = config
        self.record = record
        self.environments = {env.name: (load_environment(env.target), environment_args(env, config.reward)) for env in env_configs}
        self.sandboxes = {env.name: env.sandbox for env in env_configs}
        tokenizer = load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
        stops = generation_stop_ids(model_path)
        self.renderer = load_renderer(config.model.renderer, tokenizer, reasoning=config.model.reasoning, extra_stop_ids=stops)
        self.pool = EnginePool(engines, wait_s=config.engine.start_timeout_s)
        rollout = config.rollout
        self.limits = Limits(
            max_turns=rollout.max_turns,
            max_turn_tokens=rollout.max_turn_tokens,
            max_tokens=rollout.max_tokens,
            max_model_len=config.engine.max_model_len or rollout.max_tokens,
            time_limit_s=rollout.time_limit_s,
            observation_limit=rollout.observation_limit,
        )

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
            return EpisodeFailure(request.episode_id, trajectory.finish.detail, why, trajectory.sampled_tokens), trajectory
        labelled = replace(trajectory, info={**trajectory.info, "incarnation": request.incarnation})
        return Finished(labelled.meta(), None), labelled

    async def _episode(self, request: EpisodeRequest) -> Trajectory:
        environment_class, args = self.environments[request.task.environment]
        try:
            environment: Environment = environment_class(request.task, **args)
        except Exception as error:
            raise EnvironmentFailure(
                f"{environment_class.__name__} could not be built for task {request.task.task_id}: {type(error).__name__}: {error}"
            ) from error
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
            )

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
        for environment_class, _ in self.environments.values():
            shutdown = getattr(environment_class, "shutdown", None)
            if shutdown is not None:
                await shutdown()
