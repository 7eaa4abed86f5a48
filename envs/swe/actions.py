"""What a policy may write: one bash command a turn, or an edit of one line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sao.environment import Action
from sao.sandbox.protocol import ExecResult

SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent's: the command that prints it as its first line hands the work in
BLOCK = re.compile(r"^```(?:bash|sh|shell|mswea_bash_command)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
MOST_CHARS = 10_000  # of an observation; mini-swe-agent shows as much
REPLACE = re.compile(r"replace line (\d{1,6}): ?(.*)")
SWAP = re.compile(r"in line (\d{1,6}): (.+?) => (.*)")
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in the repository",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True)
class Edit:
    """Line `line` becomes `new`, or, with `old`, the first `old` in it does."""

    line: int
    new: str
    old: str | None = None

    def apply(self, data: bytes) -> bytes | None:
        """The file with the edit, or None where there is no such line or text. A new line without indentation keeps the old one's; endings stay."""
        lines = data.splitlines(keepends=True)
        if not 1 <= self.line <= len(lines):
            return None
        now = lines[self.line - 1]
        body = now.rstrip(b"\r\n")
        ending = now[len(body) :]
        if self.old is not None:
            if self.old.encode() not in body:
                return None
            text = body.replace(self.old.encode(), self.new.encode(), 1)
        else:
            text = self.new.rstrip().encode()
            if text == text.lstrip():
                text = body[: len(body) - len(body.lstrip())] + text
        lines[self.line - 1] = text + ending
        return b"".join(lines)


def read_edit(text: str) -> Edit | None:
    """The first edit that a turn asks for."""
    for line in text.splitlines():
        if match := SWAP.search(line):
            return Edit(int(match[1]), match[3].strip(), match[2].strip())
        if match := REPLACE.search(line):
            return Edit(int(match[1]), match[2])
    return None


def read_command(action: Action) -> str | None:
    """The one command of a turn, as a tool call or as a fenced block; None where there is none, or more than one."""
    if action.tool_calls:
        command = action.tool_calls[0].arguments.get("command")
        return command if len(action.tool_calls) == 1 and isinstance(command, str) else None
    blocks = BLOCK.findall(action.text if action.text.endswith("\n") else action.text + "\n")
    return blocks[0].strip("\n") if len(blocks) == 1 else None


def submission(result: ExecResult) -> bytes | None:
    """What a command handed in: the bytes after the line of the sentinel (there may be none); None where it is not the first thing printed."""
    first, _, rest = result.out.lstrip().partition(b"\n")
    return rest if result.rc == 0 and first.strip() == SENTINEL.encode() else None


def shown(result: ExecResult, timeout_s: float) -> str:
    """A command's result as the policy sees it."""
    text = result.text
    if len(text) > MOST_CHARS:
        half = MOST_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - MOST_CHARS} characters left out]\n{text[-half:]}"
    ended = f" (killed: {result.killed_by or 'timeout'}, limit {timeout_s:g} s)" if result.killed_by or result.timed_out else ""
    return f"<returncode>{result.rc}{ended}</returncode>\n<output>\n{text.rstrip()}\n</output>"
