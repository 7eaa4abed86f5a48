import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.swe.patches import changed_line, judge, new_file, normal, paths, why_not_applied

GOOD = b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n"


def head(name: str) -> bytes:
    return GOOD.replace(b"m.py", name.encode())


@pytest.mark.parametrize(
    ("patch", "verdict", "kind"),
    [
        (b"", "empty", "empty"),
        (b" \n\n", "empty", "empty"),
        (b"I could not find the bug.\n", "error", "no_diff"),
        (GOOD + b"\0", "error", "not_text"),
        (GOOD + b"#" * (4 << 20), "error", "too_large"),
        (b"diff --git a/x.png b/x.png\nindex 1..2 100644\nBinary files a/x.png and b/x.png differ\n", "error", "binary_stub"),
        (head(".git/hooks/post-checkout"), "tampered", "git_directory"),
        (head("sub/.GIT/config"), "tampered", "git_directory"),
        (GOOD.replace(b"+++ b/m.py", b"+++ b/.git/config"), "tampered", "git_directory"),
        (b"Index: .git/hooks/x\n--- m.py\n+++ m.py\n@@ -1 +1 @@\n-a\n+b\n", "tampered", "git_directory"),
        (b'diff --git "a/.g\\151t/x" "b/.g\\151t/x"\n--- /dev/null\n+++ "b/.g\\151t/x"\n@@ -0,0 +1 @@\n+a\n', "tampered", "git_directory"),
        (b"diff --git a/m.py b/m.py\nsimilarity index 100%\nrename from m.py\nrename to ../m.py\n", "tampered", "parent_path"),
        (GOOD.replace(b"--- a/m.py\n+++ b/m.py", b"--- a/m.py\n+++ b/../../etc/cron.d/x"), "tampered", "parent_path"),
        (b"--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "tampered", "absolute_path"),
        (b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc/passwd\n", "tampered", "symlink"),
        (b"diff --git a/d/l b/d/l\nnew file mode 120000\n--- /dev/null\n+++ b/d/l\n@@ -0,0 +1 @@\n+../../x\n", "tampered", "symlink"),
        (b"diff --git a/d/l b/d/l\nnew file mode 120000\n--- /dev/null\n+++ b/d/l\n@@ -0,0 +1 @@\n+../.git\n", "tampered", "symlink"),
        (
            b"diff --git a/s b/s\nnew file mode 160000\nindex 000..123\n--- /dev/null\n+++ b/s\n@@ -0,0 +1 @@\n+Subproject commit 1\n",
            "tampered",
            "submodule",
        ),
    ],
)
def test_what_is_refused_and_why(patch: bytes, verdict: str, kind: str):
    refusal = judge(patch)
    assert refusal is not None and (refusal.verdict, refusal.kind) == (verdict, kind) and refusal.text


@pytest.mark.parametrize(
    "patch",
    [
        GOOD,
        b"Here is the mend:\n```diff\n" + GOOD + b"```\nIt was a typo.\n",
        b"diff --git a/d/l b/d/l\nnew file mode 120000\n--- /dev/null\n+++ b/d/l\n@@ -0,0 +1 @@\n+../m.py\n",
        b"diff --git a/.gitignore b/.gitignore\n--- a/.gitignore\n+++ b/.gitignore\n@@ -1 +1 @@\n-a\n+b\n",
        b"diff --git a/x.png b/x.png\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZ\n\n",
        b"diff --git a/with space.py b/with space.py\n--- a/with space.py\t\n+++ b/with space.py\t\n@@ -1 +1 @@\n-a\n+b\n",
    ],
)
def test_what_may_be_tried(patch: bytes):
    assert judge(patch) is None


def test_no_byte_of_a_patch_is_lost():
    assert normal("") == b"" and normal(GOOD) == GOOD
    crlf = b"--- a/m\n+++ b/m\n@@ -1,2 +1,2 @@\n-a\r\n+b\r\n \r"
    assert normal(crlf) == crlf + b"\n"
    trailing = "--- a/m\n+++ b/m\n@@ -1,3 +1,3 @@\n-a\n+b\n \n \n"
    assert normal(trailing) == trailing.encode()


def test_why_a_patch_does_not_apply_is_told_apart():
    assert why_not_applied(GOOD.replace(b"-1,3", b"-1,5")) == "counts"
    assert why_not_applied(b"--- m.py\n+++ m.py\n@@ -1 +1 @@\n-a\n+b\n") == "prefix"
    assert why_not_applied(GOOD) == "context"
    two = GOOD + GOOD.replace(b"m.py", b"n.py")
    assert why_not_applied(two) == "context"


def test_names_are_read_as_git_reads_them():
    assert paths(b'diff --git "a/\\303\\251.py" "b/\\303\\251.py"\n') == ["é.py".encode()]
    assert paths(b"diff --git a/x y b/x y\n") == [b"x y"]
    assert paths(GOOD) == [b"m.py"]


TEXT = st.lists(st.binary(max_size=8).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b"")), min_size=1, max_size=12)


@settings(max_examples=15)
@given(TEXT, st.data(), st.booleans())
def test_a_diff_of_one_line_and_of_a_new_file_does_what_git_would_do(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data: st.DataObject, ended: bool
):
    """The whole of `git apply` is the oracle; few examples, since each starts it."""
    line = data.draw(st.integers(1, len(rows)))
    joined = [row + b"\n" for row in rows[:-1]] + [rows[-1] + (b"\n" if ended else b"x")]
    before = b"".join(joined)
    after = b"".join([*joined[: line - 1], b"changed" + joined[line - 1], *joined[line:]])
    folder = tmp_path_factory.mktemp("git")
    (folder / "f").write_bytes(before)
    applied(folder, changed_line("f", before, after, line))
    assert (folder / "f").read_bytes() == after
    applied(folder, new_file("g", before))
    assert (folder / "g").read_bytes() == before


def applied(folder: Path, patch: bytes) -> None:
    done = subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=patch, cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
