"""The memory that a container leaves to a pool: control groups of both versions, as files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged_ops.pool import memory
from paged_ops.pool.cgroups import available_to_groups
from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.memory import available_bytes

V1_NONE = 9223372036854771712  # what the system writes for no limit


def system(root: Path, groups: str, mounts: str, **files: str) -> Path:
    """Make a system's files; ``a__b`` stands for ``a/b`` and ``_`` otherwise for itself."""
    texts = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    texts |= {f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
    for name, text in texts.items():
        folder, _, file = name.rpartition("/")
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / file.replace("memory_", "memory.")).write_text(text)
    return root


V2 = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 25 0:25 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "31 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def test_without_groups_nothing_is_limited(tmp_path: Path) -> None:
    files = {"memory__memory_limit_in_bytes": f"{V1_NONE}\n"}
    assert available_to_groups(system(tmp_path / "v1", "4:memory:/\n", V1, **files)) is None
    assert available_to_groups(tmp_path) is None
    assert available_to_groups(system(tmp_path, "0::/\n", V2)) is None


def test_a_limit_counts_without_what_is_used_of_it(tmp_path: Path) -> None:
    stat = "anon 30\nfile 60\ninactive_file 50\nactive_file 10\n"
    root = system(
        tmp_path,
        "0::/box\n",
        V2,
        box__memory_max="1000\n",
        box__memory_current="100\n",
        box__memory_stat=stat,
    )
    assert available_to_groups(root) == 950


def test_the_strictest_of_the_groups_above_counts(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        "0::/pods/pod/box\n",
        V2,
        pods__memory_max="5000\n",
        pods__memory_current="4000\n",
        pods__pod__memory_max="2000\n",
        pods__pod__memory_current="1700\n",
        pods__pod__box__memory_max="max\n",
        pods__pod__box__memory_current="200\n",
    )
    assert available_to_groups(root) == 300


def test_max_is_no_limit(tmp_path: Path) -> None:
    files = {"box__memory_max": "max\n", "box__memory_high": "max\n", "box__memory_current": "7\n"}
    assert available_to_groups(system(tmp_path, "0::/box\n", V2, **files)) is None


def test_what_slows_a_group_down_is_a_limit_too(tmp_path: Path) -> None:
    files = {"box__memory_max": "900\n", "box__memory_high": "600", "box__memory_current": "100"}
    assert available_to_groups(system(tmp_path, "0::/box\n", V2, **files)) == 500


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"box__memory_max": "900\n", "box__memory_current": "1000\n"}
    assert available_to_groups(system(tmp_path, "0::/box\n", V2, **files)) == 0


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/\n", V2, memory_max="800\n", memory_current="300\n")
    assert available_to_groups(root) == 500


@pytest.mark.parametrize("limit", [1000, V1_NONE])
def test_version_1_has_a_hierarchy_for_memory(tmp_path: Path, limit: int) -> None:
    root = system(
        tmp_path,
        "5:cpuset:/other\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n",
        V1,
        memory__memory_limit_in_bytes=f"{V1_NONE}\n",
        memory__docker__memory_limit_in_bytes="2000\n",
        memory__docker__memory_usage_in_bytes="800\n",
        memory__docker__abc__memory_limit_in_bytes=f"{limit}\n",
        memory__docker__abc__memory_usage_in_bytes="500\n",
        memory__docker__abc__memory_stat="inactive_file 1\ntotal_inactive_file 40\n",
    )
    assert available_to_groups(root) == (540 if limit == 1000 else 1200)


def test_a_container_of_version_1_is_mounted_by_its_path_outside(tmp_path: Path) -> None:
    mounts = V1.replace("0:31 / ", "0:31 /docker/abc ")
    files = {"memory__memory_limit_in_bytes": "700", "memory__memory_usage_in_bytes": "50"}
    root = system(tmp_path, "4:memory:/docker/abc\n", mounts, **files)
    assert available_to_groups(root) == 650


def test_both_versions_may_be_mounted(tmp_path: Path) -> None:
    unified = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files = {"memory__a__memory_limit_in_bytes": "700", "unified__b__memory_max": "600"}
    root = system(tmp_path, "4:memory:/a\n0::/b\n", V1 + unified, **files)
    assert available_to_groups(root) == 600


def test_a_mount_with_blanks_in_its_name_is_found(tmp_path: Path) -> None:
    mounts = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/a\\040b ")
    root = system(tmp_path, "0::/\n", mounts)
    (root / "sys/fs/cgroup/a b").mkdir(parents=True)
    (root / "sys/fs/cgroup/a b/memory.max").write_text("90\n")
    assert available_to_groups(root) == 90


@pytest.mark.parametrize(
    ("system_says", "groups_say", "expected"), [(10, 7, 7), (5, 7, 5), (5, None, 5), (None, 7, 7)]
)
def test_the_least_of_what_the_system_and_the_groups_say_is_available(
    monkeypatch: pytest.MonkeyPatch,
    system_says: int | None,
    groups_say: int | None,
    expected: int,
) -> None:
    monkeypatch.setattr(memory, "_available_on_cpu", lambda: system_says)
    monkeypatch.setattr(memory, "available_to_groups", lambda: groups_say)
    assert available_bytes(torch.device("cpu")) == expected


def test_a_pool_beyond_what_a_container_has_left_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_to_groups", lambda: 1000)
    with pytest.raises(MemoryError, match="1000 bytes are available on cpu"):
        PagedKVCache(1, 64, 4, 1, 8)
    blocks = PagedKVCache.num_blocks_for(1, 4, 1, 8, memory_fraction=0.5)
    assert PagedKVCache(1, blocks, 4, 1, 8).num_bytes <= 500


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[Path]:
    """Make a group of this system with a limit of memory, where that is allowed."""
    for top, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(top) / f"paged-ops-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no group can be made here")


def test_a_process_in_a_real_group_sees_its_limit() -> None:
    limit = 900 * 2**20
    program = """
        import torch
        from paged_ops.pool.memory import available_bytes
        print(available_bytes(torch.device("cpu")))
    """
    with real_group(limit) as group:
        run = f"exec {sys.executable} -c '{textwrap.dedent(program)}'"
        enter = f"echo $$ > {group}/cgroup.procs && {run}"
        done = subprocess.run(
            ["sh", "-c", enter], capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr[-500:]
    assert 0 < int(done.stdout) <= limit
