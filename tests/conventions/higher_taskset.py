"""A game in verifiers' form: the environment is the user, and answers each guess."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["HigherEnv", "HigherTaskset"]


class HigherData(vf.TaskData):
    secret: int


class HigherTask(vf.Task[HigherData]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class HigherTaskset(vf.Taskset[HigherTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[HigherTask]:
        for n in itertools.count(3):
            yield HigherTask(HigherData(secret=n, prompt=None), self.config.task)


class HigherConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HigherEnv(vf.Env[HigherConfig]):
    async def run(self, task: HigherTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            said = await talk.turn("Guess.")
            guesses = 1
            while said.last_reply != str(task.data.secret) and guesses < 3:
                said = await talk.turn("higher" if int(said.last_reply) < task.data.secret else "lower")
                guesses += 1
        talk.trace.record_reward("found", float(said.last_reply == str(task.data.secret)))

    async def finalize(self, task: HigherTask, episode: vf.Episode) -> None:
        (trace,) = episode.traces
        trace.record_metric("guesses", float(trace.num_turns))
