"""Processes of engines: started on chosen cores in a group of their own, paused while others are measured."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 5.0
TICKS = os.sysconf("SC_CLK_TCK")


class EngineFailure(Exception):
    """An engine could not be set up, started or measured; the text names it and says where to look."""


def tail(path: Path, lines: int = 8) -> str:
    """The last lines of a log that may not exist."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


@dataclass(slots=True)
class EngineProcess:
    """One running engine, the root of its process tree. Its standard error goes to the log."""

    name: str
    popen: subprocess.Popen[str]
    log: Path
    paused: bool = False

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        cores: Sequence[int],
        environment: Mapping[str, str],
        folder: Path,
        pipes: bool = False,
    ) -> EngineProcess:
        """Start command on the cores. With pipes, standard input and output are open to talk through."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else errors,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
                cwd=folder,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        return cls(name, popen, log)

    def failure(self, what: str) -> EngineFailure:
        return EngineFailure(f"{self.name}: {what}; the end of {self.log}:\n{tail(self.log)}")

    def pause(self) -> None:
        """Stop its threads where they are, so that nothing of it runs while another engine is measured."""
        if not self.paused and self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGSTOP)
            self.paused = True

    def resume(self) -> None:
        if self.paused and self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGCONT)
        self.paused = False

    def stop(self) -> None:
        """End the whole group, by force where it does not go."""
        self.resume()
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            if self.popen.poll() is None:
                os.killpg(self.popen.pid, signal_)
            try:
                self.popen.wait(STOP_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def tree(root: int) -> Iterator[int]:
    """root and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        pending += children.get(pid, [])


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def peak_bytes(root: int) -> int:
    """The highest resident memory of each process of the tree, added up: pages that two share count twice."""
    total = 0
    for pid in tree(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
    return total


def cpu_seconds(root: int) -> float:
    """Processor time that the tree has used so far, processes of it that have ended and were waited for included."""
    stats = [_stat_fields(pid) for pid in tree(root)]
    return sum(sum(map(int, fields[11:15])) for fields in stats if fields) / TICKS


def busy_seconds(cores: Sequence[int], stat: str) -> float:
    """Processor time that anybody has used on the cores so far, by the text of /proc/stat; stolen time counts."""
    wanted = {f"cpu{core}" for core in cores}
    busy = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            busy += user + nice + system + irq + softirq + steal
    return busy / TICKS


@dataclass(slots=True)
class NoiseMeter:
    """How much of the cores others took while something was measured. Every engine is a child of this process."""

    cores: Sequence[int]
    _start: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def _read(self) -> tuple[float, float, float]:
        stat = Path("/proc/stat").read_text()
        return time.perf_counter(), busy_seconds(self.cores, stat), cpu_seconds(os.getpid())

    def start(self) -> None:
        self._start = self._read()

    def others_share(self) -> float:
        """Of the cores' time since start: used by neither the engine nor the harness, 0 to 1."""
        wall, busy, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        capacity = wall * len(self.cores)
        return min(1.0, max(0.0, (busy - own) / capacity)) if capacity else 0.0
