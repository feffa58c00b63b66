"""How long a server takes from its first instruction until it answers, and at what cost: each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from millpond.core.step import Clock
from millpond.errors import EngineError

READY = "millpond serves "  # how the line begins that a server prints when it answers
SERVE = ("-m", "millpond.cli", "serve")


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until the server answered; processor seconds and the largest memory of its processes."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StartupResult:
    """The first start of all, with nothing compiled or packed, and the starts after it."""

    first: Start
    later: tuple[Start, ...]

    @property
    def warm(self) -> Start:
        """The median of each figure of the later starts."""
        return Start(
            median(each.seconds for each in self.later),
            median(each.cpu_seconds for each in self.later),
            int(median(each.peak_bytes for each in self.later)),
        )

    def as_json(self) -> dict[str, object]:
        return {name: {k: round(v, 3) for k, v in asdict(start).items()} for name, start in self.rows().items()}

    def rows(self) -> dict[str, Start]:
        return {"cold": self.first, "warm": self.warm}


def measure_startup(
    model: Path, rounds: int, environment: Mapping[str, str], clock: Clock, notify: Callable[[str], None]
) -> StartupResult:
    """Start a server of the model again and again, all with one new cache folder; notify gets each start's name.

    environment is that of the processes, but for where they keep what they compile and pack.
    Raises EngineError, with what the server said, where one does not come up.
    """
    with TemporaryDirectory(prefix="millpond-startup-") as folder:
        cached = {**environment, "MILLPOND_CACHE": folder, "NUMBA_CACHE_DIR": ""}
        command = [sys.executable, *SERVE, str(model), "--port", "0"]
        starts = []
        for number in range(1 + rounds):
            notify(f"warm start {number}" if number else "first start")
            starts.append(time_start(command, cached, clock))
    return StartupResult(starts[0], tuple(starts[1:]))


def time_start(command: Sequence[str], environment: Mapping[str, str], clock: Clock) -> Start:
    """Run a server until it answers, then end it."""
    begin = clock()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stderr is not None
    said = []
    with process.stderr:
        for line in process.stderr:
            said.append(line)
            if line.startswith(READY):
                break
        seconds = clock() - begin
        os.kill(
            process.pid, signal.SIGTERM
        )  # unlike terminate(), this leaves a process that has ended to be waited for
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not said or not said[-1].startswith(READY):
        raise EngineError(f"the server did not come up: {' '.join(''.join(said).split()) or 'it said nothing'}")
    per_unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kibibytes elsewhere
    return Start(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * per_unit)
