"""What a model hands in as a patch: kept byte for byte, and judged before anything touches a file.

`git apply` and `patch` together accept a good deal (prose and fences around the diff, wrong offsets), and `patch` will also write where git refuses to, for
instance .git/hooks. So every name a patch mentions is looked at here first, in all the places where either program reads one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMES = re.compile(
    rb"^(?:diff --git (?P<both>.+)|(?:---|\+\+\+|\*\*\*) (?P<file>[^\t\r\n]+)|(?:rename|copy) (?:from|to) (?P<moved>.+)|Index: (?P<index>.+))\r?$",
    re.MULTILINE,
)
HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
STUB = re.compile(rb"^Binary files .+ differ\r?$", re.MULTILINE)
LINK = re.compile(rb"^(?:new file mode|new mode|old mode|deleted file mode|index [0-9a-f.]+) 120000\r?$", re.MULTILINE)
GIT_LINK = re.compile(rb"^(?:new file mode|new mode|index [0-9a-f.]+) 160000\r?$", re.MULTILINE)
LINK_TARGET = re.compile(rb"^\+(?!\+\+ )(.*)$", re.MULTILINE)
ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Refusal:
    """Why a patch is not applied. verdict: empty, error (it cannot mean anything) or tampered (it means harm). kind: one word; text: one sentence."""

    verdict: str
    kind: str
    text: str


def normal(patch: str | bytes) -> bytes:
    """The bytes to apply: all of them as they came, and one newline at the end. Stripping a diff loses its last context lines, and with them the score."""
    data = patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch
    return data if not data or data.endswith(b"\n") else data + b"\n"


def judge(patch: bytes) -> Refusal | None:
    """Whether a patch may be given to `git apply` and `patch` in a fresh checkout; None: it may."""
    if not patch.strip():
        return Refusal("empty", "empty", "the patch is empty")
    if len(patch) > MOST_BYTES:
        return Refusal("error", "too_large", f"the patch has {len(patch):,} bytes, more than {MOST_BYTES:,}")
    if b"\0" in patch:
        return Refusal("error", "not_text", "the patch holds a NUL byte; binary files go into a patch as `git diff --binary` writes them")
    names = paths(patch)
    if not names:
        return Refusal("error", "no_diff", "the patch names no file; it is not a diff")
    for name in names:
        if refusal := _bad_path(name):
            return refusal
    if GIT_LINK.search(patch):
        return Refusal("tampered", "submodule", "the patch adds a submodule")
    for section in sections(patch):
        if LINK.search(section):
            where = next(iter(paths(section)), b"")
            targets = [target.rstrip(b"\r") for target in LINK_TARGET.findall(section)]
            if not targets or any(_leaves(where, target) for target in targets):
                return Refusal("tampered", "symlink", f"the patch makes {_show(where)} a symbolic link out of the repository")
    if STUB.search(patch) and b"GIT binary patch" not in patch:
        return Refusal("error", "binary_stub", "the patch says that binary files differ but not how; make it with git diff --binary")
    return None


def why_not_applied(patch: bytes) -> str:
    """The kind of a patch that neither program could apply: counts (a hunk's length is not what its header says), prefix (no a/ and b/), or context."""
    if any(counted != said for said, counted in hunk_lengths(patch)):
        return "counts"
    heads = re.findall(rb"^(?:---|\+\+\+) ([^\t\r\n]+)", patch, re.MULTILINE)
    if heads and not any(head.startswith((b"a/", b"b/", b'"a/', b'"b/')) for head in heads if head != b"/dev/null"):
        return "prefix"
    return "context"


def hunk_lengths(patch: bytes) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Of each hunk (old lines, new lines): as its header says, and as counted up to the next header or the end of the diff."""
    lines = patch.split(b"\n")
    found = []
    for at, line in enumerate(lines):
        match = HUNK.match(line)
        if not match:
            continue
        old = new = 0
        for number in range(at + 1, len(lines)):
            body = lines[number]
            next_file = body.startswith(b"--- ") and lines[number + 1 : number + 2] and lines[number + 1].startswith(b"+++ ")
            if next_file or body[:1] not in (b" ", b"+", b"-", b"\\"):
                break
            old += body[:1] in (b" ", b"-")
            new += body[:1] in (b" ", b"+")
        found.append(((int(match[2] or 1), int(match[4] or 1)), (old, new)))
    return found


def sections(patch: bytes) -> list[bytes]:
    """The parts of a patch, one a file."""
    starts = [match.start() for match in re.finditer(rb"^diff --git ", patch, re.MULTILINE)] or [0]
    return [patch[start:end] for start, end in zip(starts, [*starts[1:], len(patch)], strict=True)]


def paths(patch: bytes) -> list[bytes]:
    """Every path a patch mentions, as it would be opened: quoting undone, a/ and b/ taken off, /dev/null left out."""
    found: list[bytes] = []
    for match in NAMES.finditer(patch):
        if both := match["both"]:
            candidates = re.findall(rb'"(?:[^"\\]|\\.)*"|\S+', both) if b'"' in both else _halves(both)
        else:
            candidates = [match["file"] or match["moved"] or match["index"]]
        for candidate in candidates:
            name = _unquoted(candidate.rstrip(b"\r "))
            if name == b"/dev/null":
                continue
            if match["moved"] is None and match["index"] is None and name[:2] in (b"a/", b"b/"):
                name = name[2:]
            if name and name not in found:
                found.append(name)
    return found


def _halves(both: bytes) -> list[bytes]:
    """`a/x y b/x y` cannot be split at spaces alone; git itself takes the two halves."""
    both = both.rstrip(b"\r")
    middle = len(both) // 2
    if len(both) % 2 and both[middle : middle + 1] == b" ":
        return [both[:middle], both[middle + 1 :]]
    return both.split()


def _unquoted(name: bytes) -> bytes:
    if not (name.startswith(b'"') and name.endswith(b'"') and len(name) > 1):
        return name
    return re.sub(
        rb"\\([0-7]{3}|.)", lambda match: bytes([int(match[1], 8) & 255]) if len(match[1]) == 3 else ESCAPES.get(match[1], match[1]), name[1:-1]
    )


def _bad_path(name: bytes) -> Refusal | None:
    parts = [part for part in name.replace(b"\\", b"/").split(b"/") if part != b"."]
    if name.startswith((b"/", b"~")):
        return Refusal("tampered", "absolute_path", f"the patch writes to the absolute path {_show(name)}")
    if b".." in parts:
        return Refusal("tampered", "parent_path", f"the patch leaves the repository with {_show(name)}")
    if any(part.rstrip(b" .").lower() in (b".git", b"git~1") for part in parts):
        return Refusal("tampered", "git_directory", f"the patch writes {_show(name)}, inside the repository's own .git")
    return None


def _leaves(where: bytes, target: bytes) -> bool:
    """Whether a link at `where` to `target` points out of the repository, or into its .git."""
    if target.startswith(b"/"):
        return True
    depth = 0
    parts = where.split(b"/")[:-1] + target.split(b"/")
    for part in parts:
        depth += {b"..": -1, b".": 0, b"": 0}.get(part, 1)
        if depth < 0 or part.lower() == b".git":
            return True
    return False


def _show(name: bytes) -> str:
    return repr(name.decode("utf-8", "replace")[:120])


def new_file(path: str, data: bytes) -> bytes:
    """A diff that adds a file of text."""
    name = path.encode()
    lines = data.splitlines(keepends=True)
    head = b"diff --git a/%s b/%s\nnew file mode 100644\n" % (name, name)
    return head + (b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n" % (name, len(lines)) + _body(b"+", lines) if lines else b"")


def changed_line(path: str, before: bytes, after: bytes, line: int) -> bytes:
    """A diff between two versions of a file that differ in line `line` alone."""
    name = path.encode()
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    first, end = max(0, line - 4), min(len(old), line + 3)
    size = end - first
    head = b"diff --git a/%s b/%s\n--- a/%s\n+++ b/%s\n@@ -%d,%d +%d,%d @@\n" % (name, name, name, name, first + 1, size, first + 1, size)
    body = [_body(sign, lines) for sign, lines in ((b" ", old[first : line - 1]), (b"-", old[line - 1 : line]), (b"+", new[line - 1 : line]))]
    return head + b"".join(body) + _body(b" ", old[line:end])


def _body(sign: bytes, lines: list[bytes]) -> bytes:
    return b"".join(sign + line + (b"" if line.endswith(b"\n") else b"\n\\ No newline at end of file\n") for line in lines)
