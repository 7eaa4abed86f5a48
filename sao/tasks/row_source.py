"""Tasks from the rows of a file, in epochs; the cursor is one position, so resuming seeks and reads nothing twice."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any

from sao.environment import Task
from sao.errors import DataError
from sao.tasks.fixed_order import FixedOrder
from sao.tasks.procedural import HELD_OUT, TRAIN, task_seed
from sao.tasks.rows import Rows, messages_of

# The payload is the row plus this key: the opening messages, whatever the prompt column is called and whichever form it has.
MESSAGES_KEY = "_messages"
# Rows whose prompts are measured to find the longest; of a longer file, so many evenly spaced ones, or the look would take minutes.
MOST_MEASURED = 10_000


def row_task(rows: Rows, index: int, *, name: str, split: str, seed: int, prompt_column: str, workload: str, place: Any = None) -> Task:
    """The task of one row: its id stays the same in every epoch."""
    row = rows[index]
    payload = {**row, MESSAGES_KEY: messages_of(row[prompt_column])}
    return Task(f"{name}/{split}/{index}", name, payload, seed, workload, place)


class RowSource(FixedOrder):
    """Every row once per epoch, in file order or in an order drawn from (seed, epoch).

    `held_out` takes its tasks from other rows, evenly spaced over that file and the same for every seed; without such a file there are none.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        name: str,
        seed: int,
        held_out_rows: Rows | None = None,
        shuffle: bool = True,
        prompt_column: str = "prompt",
        workload: str = "default",
    ) -> None:
        self.name = name
        self.workload = workload
        self._rows = rows
        self._held_out_rows = held_out_rows
        self._seed = seed
        self._shuffle = shuffle
        self._prompt_column = prompt_column
        self._position = 0
        self._order: array[int] = array("q")
        self._order_epoch = -1

    @property
    def length(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def next(self) -> Task:
        task = self.task(self._index(*divmod(self._position, len(self._rows))), self._position)
        self._position += 1
        return task

    def task(self, index: int, position: int) -> Task:
        """Row `index` as draw `position` gives it: the draw decides the episode's seed."""
        return row_task(
            self._rows,
            index,
            name=self.name,
            split=TRAIN,
            seed=task_seed(self._seed, TRAIN, position),
            prompt_column=self._prompt_column,
            workload=self.workload,
            place=[index, position],
        )

    def again(self, place: Any) -> Task:
        return self.task(*place)

    def column(self, name: str) -> list[Any]:
        """A column's value in every row. Raises DataError naming the first row that lacks it."""
        values = []
        for index in range(len(self._rows)):
            value = self._rows[index].get(name)
            if value is None:
                raise DataError(f"the task file of env={self.name} has no {name!r} in {self._rows.label(index)}, which data.curriculum_column names")
            values.append(value)
        return values

    def held_out(self, n: int) -> list[Task]:
        rows = self._held_out_rows
        if rows is None:
            return []
        return held_out_of_rows(rows, n, name=self.name, seed=self._seed, prompt_column=self._prompt_column, workload=self.workload)

    def probes(self, n: int) -> list[Task]:
        """The rows with the longest prompts and, last, the one with the shortest: if that one does not fit, none does."""
        count = min(len(self._rows), MOST_MEASURED)
        rows = [step * len(self._rows) // count for step in range(count)]
        by_length = sorted(rows, key=self._prompt_chars, reverse=True)
        picked = [*by_length[: n - 1], *by_length[n - 1 :][-1:]]
        return [self.task(row, 0) for row in picked]

    def _prompt_chars(self, index: int) -> int:
        return sum(len(message.get("content") or "") for message in messages_of(self._rows[index][self._prompt_column]))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "rows": len(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Seek to a saved position. Raises DataError when the file has another number of rows than the one the position belongs to."""
        if int(state["rows"]) != len(self._rows):
            raise DataError(
                f"the task file of env={self.name} has {len(self._rows)} rows but the checkpoint was made with {state['rows']}; "
                "give the same file, or start a new run from the checkpoint's model"
            )
        self._position = int(state["position"])

    def metrics(self) -> dict[str, float]:
        return {f"rollout/tasks/{self.name}": float(self._position), f"rollout/epoch/{self.name}": self._position / len(self._rows)}

    def _index(self, epoch: int, offset: int) -> int:
        if not self._shuffle:
            return offset
        if epoch != self._order_epoch:
            self._order = array("q", range(len(self._rows)))
            random.Random(f"{self._seed}/{TRAIN}/epoch-{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        return self._order[offset]


def held_out_of_rows(rows: Rows, n: int, *, name: str, seed: int, prompt_column: str, workload: str) -> list[Task]:
    """min(n, rows) tasks, evenly spaced over the file: no choice that depends on a seed, and a sorted file is covered to its end."""
    count = min(max(n, 0), len(rows))
    picked = [step * len(rows) // count for step in range(count)]
    return [
        row_task(rows, index, name=name, split=HELD_OUT, seed=task_seed(seed, HELD_OUT, index), prompt_column=prompt_column, workload=workload)
        for index in picked
    ]
