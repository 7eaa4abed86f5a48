import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.environment import Action, ToolCall
from sao.envs.swe.actions import SENTINEL, Edit, read_command, read_edit, shown, submission
from sao.envs.swe.edits import difference, listing, right_edit, wrong_edit
from sao.sandbox.protocol import ExecResult


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("I look.\n```bash\nls -a\n```", "ls -a"),
        ("```mswea_bash_command\ncat <<'X'\n``\nX\n```\n", "cat <<'X'\n``\nX"),
        ("```sh\na &&\nb\n```\ntext", "a &&\nb"),
        ("no block", None),
        ("```python\nx\n```", None),
        ("```bash\na\n```\n```bash\nb\n```", None),
        ("```bash\nunclosed", None),
    ],
)
def test_one_fenced_command_a_turn(text: str, command: str | None) -> None:
    assert read_command(Action(text)) == command


def test_one_tool_call_a_turn() -> None:
    call = ToolCall("bash", {"command": "ls"})
    assert read_command(Action("", [call])) == "ls"
    assert read_command(Action("", [call, call])) is None
    assert read_command(Action("", [ToolCall("bash", {"command": 3})])) is None


def test_the_sentinel_hands_in_what_follows_it_byte_for_byte() -> None:
    assert submission(ExecResult(0, f"{SENTINEL}\n".encode())) == b""
    assert submission(ExecResult(0, f"\n {SENTINEL} \ndiff\r\n \n\n".encode())) == b"diff\r\n \n\n"
    assert submission(ExecResult(1, f"{SENTINEL}\n".encode())) is None
    assert submission(ExecResult(0, f"done\n{SENTINEL}\n".encode())) is None


def test_a_long_output_loses_its_middle_and_says_so() -> None:
    text = shown(ExecResult(137, b"a" * 20_000 + b"end", timed_out=True, killed_by="timeout"), 5.0)
    assert "10003 characters left out" in text and text.endswith("end\n</output>") and "killed: timeout, limit 5 s" in text


FILE = b"def f(a):\r\n    if a >= 3:\r\n        return a\r\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("replace line 2: if a < 3:", b"    if a < 3:\r\n"),
        ("I would say: replace line 2:     if a < 3:", b"    if a < 3:\r\n"),
        ("in line 2: >= => <", b"    if a < 3:\r\n"),
        ("in line 2: a => b\nin line 3: x => y", b"    if b >= 3:\r\n"),
        ("in line 2: == => !=", None),
        ("replace line 9: x", None),
        ("replace line 0: x", None),
    ],
)
def test_an_edit_changes_one_line_and_keeps_its_ending(text: str, line: bytes | None) -> None:
    edit = read_edit(text)
    assert edit is not None
    after = edit.apply(FILE)
    assert after == (None if line is None else FILE.replace(b"    if a >= 3:\r\n", line))


def test_what_is_no_edit_is_none() -> None:
    assert read_edit("line 2: x") is None and read_edit("") is None


WORD = st.sampled_from(["if", "a", "==", "!=", "not", "(b", "in", "c):", "<", ">=", "and", "or", "x", "1"])


@given(st.lists(WORD, min_size=1, max_size=8), st.lists(WORD, min_size=1, max_size=8), st.integers(1, 5))
def test_the_right_edit_undoes_any_difference(wrong: list[str], right: list[str], line: int) -> None:
    was, now = " ".join(right), " ".join(wrong)
    edit = read_edit(right_edit(line, now, was))
    assert edit is not None
    after = edit.apply(b"\n" * (line - 1) + f"    {now}\n".encode())
    assert after is not None and after.splitlines()[line - 1].strip() == was.encode()


def test_the_shortest_swap_is_taken() -> None:
    assert difference("if a >= 3:", "if a < 3:") == (">=", "<")
    assert right_edit(7, "return a and b", "return a or b") == "in line 7: and => or"
    assert right_edit(7, "  x = f[1]", "  x = f[0]") == "in line 7: f[1] => f[0]"
    assert right_edit(7, "    return", "    total += 1") == "in line 7: return => total += 1"


@given(st.integers(0, 10_000))
def test_a_wrong_edit_is_well_formed(seed: int) -> None:
    assert isinstance(read_edit(wrong_edit(3, "if a >= 3 and b:", random.Random(seed))), Edit)


def test_the_listing_shows_the_line_somewhere_among_its_neighbours() -> None:
    data = b"".join(b"    line %d\n" % number for number in range(1, 10))
    assert listing(data, 5, 0, 3) == "5: line 5"
    for place in range(3):
        rows = listing(data, 5, 1, place).splitlines()
        assert len(rows) == 3 and rows[place] == "5:     line 5"
    assert listing(data, 1, 1, 2).splitlines()[0] == "1:     line 1" and len(listing(data, 9, 1, 0).splitlines()) == 1
