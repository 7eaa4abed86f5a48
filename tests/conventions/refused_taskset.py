"""Tasks that need a runtime."""

from typing import Any

import verifiers.v1 as vf

__all__ = ["RefusedTaskset"]


class RefusedTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def by_running(self, trace: vf.Trace, runtime: Any) -> float:
        return 1.0


class RefusedTaskset(vf.Taskset[RefusedTask, vf.TasksetConfig]):
    def load(self) -> list[RefusedTask]:
        return [RefusedTask(vf.TaskData(prompt="x"), self.config.task)]
