"""Memory limits of containers, on folders laid out as the kernel lays out cgroup versions 1 and 2."""

import pytest

from sao.runtime import plan
from sao.runtime.container import MemoryGroup, memory_groups

GB = 1 << 30


def group(folder, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, used, f"anon 5\n{cache}"), strict=True):
        (folder / name).write_text(f"{text}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def read(tmp_path, membership):
    (tmp_path / "cgroup").write_text(membership)
    return list(memory_groups(tmp_path / "fs", tmp_path / "cgroup"))


def test_version_2_counts_every_group_from_its_own_outwards(tmp_path):
    group(tmp_path / "fs/job/step", V2, "max", GB, "inactive_file 7")
    group(tmp_path / "fs/job", V2, 4 * GB, 3 * GB, f"inactive_file {GB}")
    assert read(tmp_path, "0::/job/step\n") == [MemoryGroup(4 * GB, 2 * GB)]


def test_version_1_reads_the_memory_hierarchy(tmp_path):
    group(tmp_path / "fs/memory/box", V1, 2 * GB, GB, "total_inactive_file 0")
    group(tmp_path / "fs/memory", V1, 9223372036854771712, 8 * GB, "total_inactive_file 0")
    assert read(tmp_path, "5:cpu:/\n4:hugetlb,memory:/box\n0::/\n")[0] == MemoryGroup(2 * GB, GB)


def test_a_container_that_does_not_see_its_own_path_reads_the_root(tmp_path):
    group(tmp_path / "fs/memory", V1, GB, 2 * GB, "total_inactive_file 5")
    assert read(tmp_path, "4:memory:/docker/0123\n") == [MemoryGroup(GB, 0)]


@pytest.mark.parametrize("membership", ["", "0::/\n", "4:memory:/x\n"])
def test_without_a_limit_there_is_none(tmp_path, membership):
    assert read(tmp_path, membership) == []


def test_the_plan_has_what_the_container_leaves(monkeypatch):
    free = plan.machine()
    monkeypatch.setattr(plan, "memory_groups", lambda: [MemoryGroup(3 * GB, GB), MemoryGroup(2 * GB, 2 * GB), MemoryGroup(1 << 62, 1 << 62)])
    held = plan.machine()
    assert (held.total_mb, held.available_mb) == (2048, 1024) and free.total_mb > 2048
