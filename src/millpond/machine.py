"""How much memory this process may still use."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had without swapping: what the system says is available, cut to what the cgroup leaves."""
    available = _system_memory(meminfo)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def _system_memory(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
