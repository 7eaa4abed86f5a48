"""The parts of sandboxd alone: output, files, uids, groups, the watchdog's sums, the wire."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.errors import SandboxFailure
from sao.sandbox import cgroups, files, watchdog
from sao.sandbox.box import FIRST_UID, SLOTS, Slots, first_uid
from sao.sandbox.children import Output, input_file
from sao.sandbox.local import _as_patch
from sao.sandbox.protocol import Entry, FileAccess, SandboxSpec
from sao.sandbox.wire import pack, receive


def through(data, cap, flood=1 << 30):
    async def read():
        over = asyncio.get_running_loop().create_future()
        end, ours = os.pipe()
        output = Output(end, cap, flood, over)
        writer = asyncio.to_thread(
            lambda: (
                os.write(ours, data) if len(data) < 60000 else [os.write(ours, data[i : i + 5000]) for i in range(0, len(data), 5000)],
                os.close(ours),
            )
        )
        await writer
        await output.ended.wait()
        return output, over

    return asyncio.run(read())


@given(st.binary(max_size=400), st.integers(2, 300))
def test_output_is_whole_or_its_two_ends(data, cap):
    output, _ = through(data, cap)
    if len(data) <= cap:
        assert output.text() == data and not output.truncated
    else:
        head, tail = data[: cap // 2], data[len(data) - (cap - cap // 2) :]
        assert output.text() == head + f"\n[... {len(data) - cap} bytes not shown ...]\n".encode() + tail


def test_output_keeps_little_of_much_and_tells_a_flood():
    output, over = through(b"x" * 3_000_000 + b"end", 1000, flood=2_000_000)
    assert output.text().endswith(b"xend") and len(output.text()) < 1100 and over.result() == "output"
    assert len(output._tail) < 200_000


def test_input_is_read_from_its_beginning():
    for data in (b"", b"some input"):
        descriptor = input_file(data)
        assert subprocess.run(["cat"], stdin=descriptor, capture_output=True, check=True).stdout == data
        os.close(descriptor)


@pytest.mark.parametrize("path", ["../a", "a/../../b", "/etc/passwd", "/workspacex/a", "a\0b", "/workspace/../etc/passwd"])
def test_paths_that_leave_are_refused(path):
    with pytest.raises(FileAccess):
        files.components(path)


@given(st.lists(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_path_is_its_names_or_refused(names):
    path = "/".join(names)
    if ".." in names:
        with pytest.raises(FileAccess):
            files.components(path)
    else:
        expected = [name for name in names if name != "."]
        assert files.components(path) == files.components(f"/workspace/{path}") == expected


def test_files_are_written_read_and_listed(tmp_path):
    files.write(str(tmp_path), "a/b/c.sh", b"echo", owner=None, executable=True)
    files.write(str(tmp_path), "a/b/c.sh", b"echo again", owner=None)
    assert files.read(str(tmp_path), "/workspace/a/b/c.sh", 4) == b"echo"
    assert files.listing(str(tmp_path), "a/b") == [Entry("c.sh", "file", 10)] and files.listing(str(tmp_path), "") == [
        Entry("a", "directory", files.listing(str(tmp_path), "")[0].size)
    ]
    with pytest.raises(FileAccess, match="No such file"):
        files.read(str(tmp_path), "none", 4)


def test_an_unreadable_kind_of_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(sys.executable)
    for name in ("fifo", "link", ""):
        with pytest.raises(FileAccess):
            files.read(str(tmp_path), name, 4)


def test_uids_do_not_overlap_and_come_round_last():
    whole = "0 0 4294967295"
    starts = {first_uid(whole, pid) for pid in range(1, 5000)}
    assert len(starts) == 4999 and min(starts) >= FIRST_UID and all((a - FIRST_UID) % SLOTS == 0 for a in starts)
    assert max(first_uid(whole, pid) for pid in range(1, 4_000_000, 977)) + SLOTS < 2**32
    assert first_uid("0 100000 65536", 7) == 65536 - SLOTS and first_uid("0 1000 1", 7) is None
    slots = Slots(1000)
    first = slots.take()
    slots.give_back(first)
    assert [slots.take() for _ in range(SLOTS)][-1] == first
    with pytest.raises(SandboxFailure):
        slots.take()


def test_groups_are_used_where_they_can_be_written(tmp_path):
    mounts = f"30 24 0:27 / {tmp_path} rw shared:4 - cgroup2 cgroup2 rw"
    own = tmp_path / "user.slice"
    own.mkdir()
    assert cgroups.writable("", "0::/user.slice") == (None, "no cgroup v2 is mounted")
    (own / "cgroup.controllers").write_text("cpu io")
    assert cgroups.writable(mounts, "4:memory:/x\n0::/user.slice")[1] == "cgroup v2 has no memory and pids controller here"
    (own / "cgroup.controllers").write_text("cpu memory pids")
    (own / "cgroup.subtree_control").write_text("")
    groups, _ = cgroups.writable(mounts, "0::/user.slice")
    assert groups is not None and (own / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_group_bounds_and_tells_what_the_kernel_killed(tmp_path):
    group = cgroups.Cgroups(tmp_path).make(SandboxSpec(memory_mb=64, processes=9))
    assert (group.path / "memory.max").read_text() == str(64 << 20) and int((group.path / "pids.max").read_text()) >= 9
    assert subprocess.run(group.enter(["/bin/echo", "inside"]), capture_output=True).stdout == b"inside\n"
    assert int((group.path / "cgroup.procs").read_text()) > 1
    (group.path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert group.remove()


def test_memory_is_summed_over_a_tree():
    code = "import os, time\nif os.fork() == 0 and os.fork() == 0: os.setsid()\nblock = b'x' * (30 << 20)\nprint(flush=True)\ntime.sleep(20)"
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    for _ in range(3):
        parent.stdout.readline()
    totals = watchdog.resident_below({parent.pid, 1 << 30})
    subprocess.run(["pkill", "-9", "-P", str(parent.pid)], check=False)
    parent.kill()
    parent.wait()
    assert 90 << 20 < totals[parent.pid] < 300 << 20 and totals[1 << 30] == 0


def test_written_counts_names_and_follows_no_link(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100_000))
    (tmp_path / "up").symlink_to("/usr")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "empty").touch()
    assert 100_000 < watchdog.written(str(tmp_path), 1 << 30) < 130_000


def test_a_patch_has_both_names_and_no_repository():
    said = (
        b"diff --git b/new b/new\nnew file mode 100644\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+diff --git a/.git/x\n"
        b"diff --git a/.git/config b/.git/config\n--- a/.git/config\n+++ b/.git/config\n"
        b'diff --git "a/\\303\\244" "a/\\303\\244"\ndeleted file mode 100644\n'
    )
    assert _as_patch(said) == (
        b"diff --git a/new b/new\nnew file mode 100644\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+diff --git a/.git/x\n"
        b'diff --git "a/\\303\\244" "b/\\303\\244"\ndeleted file mode 100644\n'
    )
    assert _as_patch(b"") == b""


@given(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.binary(max_size=50))
def test_the_wire_returns_what_went_in(head, blob):
    async def there_and_back():
        reader = asyncio.StreamReader()
        reader.feed_data(pack(head | {"ask": "x"}, blob))
        return await receive(reader)

    head.pop("bytes", None)
    assert asyncio.run(there_and_back()) == (head | {"ask": "x"}, blob)
