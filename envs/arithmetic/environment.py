"""The arithmetic environment: one question of several operations, one short answer, no tool.

Made for a pretrained model that can do such sums now and then: the question is nothing but the expression, so that prompt and answer stay
a few tokens long, and what there is to learn is to answer with the number and to get it right more often.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.arithmetic.expressions import OPERATORS, draw, goes_below_zero, operations, split_of, value, worked_result
from sao.errors import ConfigError
from sao.rewards.builtin import last_number

MOST_DRAWS = 10_000
EXAMPLES = ("5+3-2", "2+3*2", "5-2-4", "4*2-1", "2+6+1", "9-5+1", "3+1+4", "7-3-2")


class ArithmeticEnvironment:
    """`task.payload` is {"expression": "2+3*4"}.

    question: the user message, with `{expression}` where the expression goes. examples: how many solved questions of the same kind go before it, as
    turns of the conversation; they show the form of an answer. worked: answers go through each operation, and end with the last
    one's result. operands, operand_min, operand_max, operators: the expressions generated; negative=False leaves out those with a result below 0 on the way.
    """

    def __init__(
        self,
        task: Task,
        *,
        question: str = "{expression}=",
        examples: int = 0,
        worked: bool = False,
        operands: int = 3,
        operand_min: int = 1,
        operand_max: int = 9,
        operators: str = OPERATORS,
        negative: bool = True,
    ) -> None:
        self.expression = str(task.payload["expression"])
        self.answer = value(self.expression)
        self.question = question
        self.examples = _examples(operators, negative)[:examples]
        self.worked = worked

    async def reset(self, context: Context) -> Sequence[Message]:
        messages: list[Message] = []
        for expression in self.examples:
            answer = ", ".join(operations(expression)) if self.worked else str(value(expression))
            messages += [self._asked(expression), {"role": "assistant", "content": answer}]
        return [*messages, self._asked(self.expression)]

    def _asked(self, expression: str) -> Message:
        return {"role": "user", "content": self.question.replace("{expression}", expression)}

    async def step(self, action: Action) -> StepResult:
        """1 exactly when the last number said, or in a worked answer the result of its last operation, is the answer."""
        said = worked_result(action.text, len(operations(self.expression))) if self.worked else action.text
        return StepResult(reward=last_number(said, {"answer": str(self.answer)}), terminated=True)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def close(self) -> None:
        return None

    @classmethod
    def generate_payload(
        cls,
        rng: random.Random,
        split: str,
        *,
        question: str = "",
        examples: int = 0,
        worked: bool = False,
        operands: int = 3,
        operand_min: int = 1,
        operand_max: int = 9,
        operators: str = OPERATORS,
        negative: bool = True,
    ) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out). Raises ConfigError when the arguments leave none."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split {split!r} is not train or held_out")
        if operands < 2 or not 0 <= operand_min <= operand_max or not operators or set(operators) - set(OPERATORS):
            raise ConfigError(f"env.args: at least 2 operands, 0 <= operand_min <= operand_max, and operators out of {OPERATORS}")
        there = _examples(operators, negative)
        if not 0 <= examples <= len(there):
            raise ConfigError(f"env.args.examples={examples} must lie between 0 and {len(there)}, the solved questions with operators {operators}")
        for _ in range(MOST_DRAWS):
            expression = draw(rng, operands, operand_min, operand_max, operators)
            if split_of(expression) == split and expression not in EXAMPLES and (negative or not goes_below_zero(expression)):
                return {"expression": expression}
        raise ConfigError(f"env.args.operand_min={operand_min} and operand_max={operand_max} leave no {split} expression; widen the range")


def _examples(operators: str, negative: bool) -> tuple[str, ...]:
    """The solved questions that the generator might have drawn itself."""
    return tuple(e for e in EXAMPLES if set(e) & set(OPERATORS) <= set(operators) and (negative or not goes_below_zero(e)))
