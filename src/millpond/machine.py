"""How much of the machine this process may use: memory and cores. Imports nothing that takes time."""

from __future__ import annotations

import os
from pathlib import Path

# The limit and the use of a cgroup, version 2 and version 1.
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had without swapping: what the system says is available, cut to what the cgroup leaves."""
    available = _system_memory(meminfo)
    for limit_name, used_name in CGROUP_FILES:
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        if limit is not None and used is not None:
            return max(0, min(available, limit - used))
    return available


def _system_memory(meminfo: Path) -> int:
    """What the system says is available; half of its memory where it does not say."""
    try:
        lines = meminfo.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number(path: Path) -> int | None:
    """The number that a file holds; None where there is no such file, or something else in it ("max" is no limit)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, cut to the cgroup's quota (rounded up), never the host's count."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    quota = cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(-(-quota // 1))))


def cgroup_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cgroup's processor quota in cores (version 2's cpu.max, or version 1's pair of files); None where unlimited
    or not to be made out."""
    words = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_words(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", no files, or nothing that makes sense
        return None
    return quota / period if quota > 0 and period > 0 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
