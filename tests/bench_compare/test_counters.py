from __future__ import annotations

import errno
import os
import struct

import pytest

from bench.compare.counters import CountersUnavailableError, count_during, open_counter


def refusing(number):
    def system(attributes):
        raise OSError(number, os.strerror(number))

    return system


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOENT, "shows no counters here"),
        (errno.EACCES, "perf_event_paranoid"),
        (errno.EPERM, "perf_event_paranoid"),
        (errno.ENOSYS, "no perf_event_open"),
        (errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
)
def test_where_there_is_no_counter_the_reason_is_said(number, reason):
    with pytest.raises(CountersUnavailableError, match=reason):
        open_counter(system=refusing(number))


def test_the_counter_asked_for_is_that_of_instructions_of_all_children_outside_the_kernel():
    asked = []
    assert open_counter(system=lambda attributes: asked.append(attributes) or 7) == 7
    kind, size, event, *_, flags = struct.unpack("=IIQQQQQ", asked[0][:48])
    assert (kind, size, event, len(asked[0])) == (0, 64, 1, 64)
    assert flags == 0b1100010


@pytest.fixture
def counter():
    """A descriptor that reads as a counter at 1234 does, made by nothing but a pipe."""
    reading, writing = os.pipe()
    os.write(writing, (1234).to_bytes(8, "little"))
    os.close(writing)
    return reading


def test_what_the_counter_holds_after_the_work_is_the_count(counter):
    done = []
    assert count_during(lambda: done.append(1), lambda: counter) == 1234
    assert done == [1]


def test_the_counter_is_closed_even_where_the_work_fails(counter):
    with pytest.raises(ZeroDivisionError):
        count_during(lambda: 1 / 0, lambda: counter)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(counter)
