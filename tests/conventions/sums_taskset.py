"""A taskset in verifiers' form: sums, one answer each, a strict and a lenient reward and a metric."""

import time

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    first: int = 1
    count: int = 4


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break":
            raise RuntimeError("the scorer is broken")
        if trace.last_reply == "block":
            time.sleep(60)  # noqa: ASYNC251 - the point of it
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def boxed(self, trace: vf.Trace) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, str(self.data.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        print("loading")  # must not reach the wire
        numbers = range(self.config.first, self.config.first + self.config.count)
        return [SumsTask(SumsData(prompt=f"{n} + {n} = ?", system_prompt="Say a number.", answer=2 * n), self.config.task) for n in numbers]
