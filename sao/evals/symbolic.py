"""Symbolic answers (expressions, sets, intervals, points) judged in worker processes that are killed when they take too long.

sympy can be made to compute for ever, and math-verify's own time-outs are alarms: they raise in threads and, switched off, hang. So nothing symbolic is
ever computed in the process that asks. What can be refused by looking at the text is refused before (`refusal`), what is written the same way is equal.
The processes are those of user reward functions (`sao.rewards.process`): executed, bounded in memory, ended after two seconds of processor time, started again.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import queue
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sao.errors import ConfigError, RewardFailure
from sao.evals.graders import BOX, Unparseable, Verdict, extract, number
from sao.evals.symbolic_text import Unreadable, Words, read
from sao.rewards.process import RewardProcess

TIMEOUT_S = 10.0  # wall clock; the worker itself is ended after two seconds of processor time
PROCESSES = 2
WORKER = "sao.evals.symbolic_worker:grade"
LONGEST, DEEPEST, MOST_DIGITS, HIGHEST_TOWER, LARGEST_EXPONENT, LARGEST_FACTORIAL = 2000, 40, 200, 2, 9999, 2000
LONGEST_UNBOXED = 100  # characters of a text that may be an answer without a box
# What the worker's codes mean (sao.evals.symbolic_worker).
VERDICTS: tuple[tuple[Any, str], ...] = (
    ("wrong", ""),
    ("correct", ""),
    ("unparseable", "it cannot be read"),
    ("gold", "it cannot be read"),
    ("unparseable", "it needs more memory or depth than an answer may"),
)
EXTRA = "symbolic answers are graded by math-verify, which is not installed; run `pip install 'sao-rl[math]'`"
# One thread looks at texts: several would take turns at holding the interpreter, and the event loop would come last.
_reader = ThreadPoolExecutor(1, thread_name_prefix="symbolic-reader")


def exact(completion: str, gold: str) -> Verdict | None:
    """The verdict where both answers are numbers, or the completion has none. None where it takes more."""
    try:
        answer = _said(completion)
    except Unparseable as error:
        return Verdict("unparseable", str(error))
    try:
        return Verdict("correct" if number(answer) == number(extract(gold)) else "wrong")
    except Unparseable:
        return None


def at_sight(completion: str, gold: str) -> Verdict | None:
    """The verdict where the two texts tell it: refused, unreadable, written alike. None where a formula has to be computed.

    Raises RewardFailure when the gold cannot be graded against, ConfigError where it takes math-verify and that is not installed.
    """
    answer = _said(completion)
    try:
        number(extract(gold))
        is_number = True
    except Unparseable:
        is_number = False
        check_available()
        if reason := refusal(gold) or _unreadable(gold):
            raise RewardFailure(f"the reference answer {gold[:80]!r} cannot be graded against: {reason}") from None
    if reason := refusal(answer) or _unreadable(answer):
        return Verdict("unparseable", reason)
    if is_number and (isinstance(read(answer), Words) or not available()):
        return Verdict("unparseable", "it is not a number")
    return Verdict("correct") if read(answer) == read(gold) else None


async def grade(completion: str, gold: str) -> Verdict:
    """Whether a completion gives the gold answer, a number or a formula. Only numbers are looked at in the event loop. Raises as `at_sight` does."""
    found = exact(completion, gold)
    if found is None:
        found = await asyncio.get_running_loop().run_in_executor(_reader, at_sight, completion, gold)
    return found if found is not None else await shared_grader().judge_async(extract(completion), gold)


def grade_blocking(completion: str, gold: str) -> Verdict:
    """The same for callers without an event loop."""
    found = exact(completion, gold)
    if found is None:
        found = at_sight(completion, gold)
    return found if found is not None else shared_grader().judge(extract(completion), gold)


def read_answer(completion: str) -> tuple[str | None, str]:
    """What a completion gives as its answer; without one, None and why."""
    try:
        return _said(completion), ""
    except Unparseable as error:
        return None, str(error)


def _said(completion: str) -> str:
    """The answer, from its box, or a text so short that it may be one. Raises Unparseable."""
    answer = extract(completion)
    if len(answer) > LONGEST_UNBOXED and not BOX.search(completion.rpartition("</think>")[2]):
        raise Unparseable("there is no box")
    return answer


def doubt(gold: str) -> str:
    """Why a gold cannot be graded against, as far as its text says; empty when it can be. Whether a formula equals itself is `SymbolicGrader.fault`'s to say."""
    try:
        number(extract(gold))
        return ""
    except Unparseable as error:
        if not available():
            return f"{error}, and {EXTRA}"
    fault = refusal(gold) or _unreadable(gold)
    if not fault and isinstance(read(gold), Words) and not re.search(r"\\(?:text|mathrm|mbox)|^[A-Z]+$", gold):
        return "it is no number and no formula, and a word must be written as \\text{}"
    return fault


def available() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def check_available() -> None:
    """Raise ConfigError naming the extra where math-verify is not installed."""
    if not available():
        raise ConfigError(EXTRA)


def refusal(text: str) -> str:
    """Why an answer is not handed to sympy; empty when it may be. Linear in the text."""
    if len(text) > LONGEST:
        return f"it has {len(text)} characters, more than {LONGEST}"
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return f"its brackets are nested {deepest} deep, more than {DEEPEST}"
    if any(len(digits) > MOST_DIGITS for digits in re.findall(r"\d+", text)):
        return f"it has a number of more than {MOST_DIGITS} digits"
    plain = text.replace("**", "^").replace(" ", "")
    if _tower(plain) > HIGHEST_TOWER:
        return f"it has a tower of more than {HIGHEST_TOWER} powers"
    if any(int(digits) > LARGEST_EXPONENT for digits in re.findall(r"\^[{(]*[-+]?(\d+)", plain)):
        return f"it has an exponent above {LARGEST_EXPONENT}"
    if re.search(r"!\s*[)}]*\s*!", text) or any(int(digits) > LARGEST_FACTORIAL for digits in re.findall(r"(\d+)[)}]*!", plain)):
        return f"it has a factorial of a factorial, or of more than {LARGEST_FACTORIAL}"
    return ""


def _tower(text: str) -> int:
    """How many powers stand on each other: 1 in x^2 + y^3, 2 in e^{x^2}, 2^3^4 and (a^b)^c, 3 in 2^{2^{2^x}}. Linear: no recursion for the text to exhaust."""
    highest = last = 0  # of the group being read: its highest tower, and the height of its last operand
    raised = False  # a ^ waits for its exponent
    outer: list[tuple[int, int, bool]] = []
    for sign in text:
        if sign in "({[":
            outer.append((highest, last, raised))
            highest, last, raised = 0, 0, False
            continue
        if sign in ")}]" and outer:
            operand = max(highest, last)
            highest, last, raised = outer.pop()
        elif sign == "^":
            raised = True
            continue
        elif raised and sign in "+-\\":
            continue
        else:
            operand = 0
        if raised:
            last, raised = max(last, operand) + 1, False
        else:
            highest, last = max(highest, last), operand
    return max(highest, last, *(max(pair[:2]) for pair in outer), 0)


class SymbolicGrader:
    """A pool of worker processes. `judge` blocks and may be called from any thread; `judge_async` never holds the event loop.

    Every process is started and used by a thread of the pool: it dies with the thread that started it, so that must not be the caller's.
    """

    def __init__(self, processes: int = PROCESSES, timeout_s: float = TIMEOUT_S) -> None:
        check_available()
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="symbolic")
        self._free: queue.LifoQueue[RewardProcess] = queue.LifoQueue()  # the one used last is warm
        self._processes = [RewardProcess(WORKER) for _ in range(processes)]
        for process in reversed(self._processes):
            self._free.put(process)

    @property
    def pids(self) -> list[int]:
        return [pid for process in self._processes if (pid := process.pid) is not None]

    def judge(self, answer: str, gold: str) -> Verdict:
        """Whether two answers, taken out of their boxes, are equal. Raises RewardFailure when the gold cannot be read or the workers cannot be started."""
        return self._threads.submit(self._judge, answer, gold).result()

    async def judge_async(self, answer: str, gold: str) -> Verdict:
        return await asyncio.wrap_future(self._threads.submit(self._judge, answer, gold))

    def fault(self, gold: str) -> str:
        """Why `gold` cannot be graded against: it must be found equal to itself by computing, not by its letters. Empty when it can be."""
        try:
            reason = doubt(gold)
            if reason:
                return f"its answer {gold[:60]!r} is refused: {reason}"
            found = self._threads.submit(self._judge, gold, gold).result()
        except RewardFailure as failure:
            return str(failure)
        return "" if found.kind == "correct" else f"its answer {gold[:60]!r} does not verify against itself ({found.reason or found.kind})"

    def close(self) -> None:
        """Kill the processes; judgements that run or wait fail."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _judge(self, answer: str, gold: str) -> Verdict:
        try:
            return self._ask(answer, gold)
        except RewardFailure as failure:
            if failure.args[1] != "crashed":
                raise
        try:  # a worker may be killed by chance, but not twice over the same answer
            return self._ask(answer, gold)
        except RewardFailure as failure:
            if failure.args[1] != "crashed":
                raise
            return Verdict("unparseable", "the process that was to grade it died twice")

    def _ask(self, answer: str, gold: str) -> Verdict:
        process = self._free.get()
        try:
            code = int(process.call(answer, {"answer": gold}, None, self.timeout_s))
        except RewardFailure as failure:
            if failure.args[1] == "timeout" or "SIGXCPU" in str(failure):
                return Verdict("timeout", "it takes too long to grade")
            raise
        finally:
            self._free.put(process)
        kind, reason = VERDICTS[code]
        if kind == "gold":
            raise RewardFailure(f"the reference answer {gold[:80]!r} cannot be graded against: {reason}")
        return Verdict(kind, reason)


def _unreadable(text: str) -> str:
    try:
        read(text)
    except Unreadable as error:
        return str(error)
    return ""


_shared: list[SymbolicGrader] = []
_shared_lock = threading.Lock()


def shared_grader() -> SymbolicGrader:
    """The grader of this process: made at its first use, its workers killed at exit or by `close_shared`. Raises ConfigError without math-verify."""
    with _shared_lock:
        if not _shared:
            _shared.append(SymbolicGrader())
        return _shared[0]


def close_shared() -> None:
    with _shared_lock:
        found = list(_shared)
        _shared.clear()
    for grader in found:
        grader.close()


atexit.register(close_shared)
