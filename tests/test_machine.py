"""How much memory there is to be had: the system's own figure, cut to what the cgroup leaves."""

import os

import pytest

from millpond.machine import available_memory

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nBuffers: 5 kB\n"
AVAILABLE = 8_000_000 * 1024


@pytest.fixture
def meminfo(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path / "meminfo"


@pytest.fixture
def cgroup(tmp_path):
    """A function that writes a cgroup's limit and use, and returns its folder."""

    def write(limit: str, used: str = "0"):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        return tmp_path

    return write


def test_what_the_system_says_is_available_counts_and_not_what_is_free(meminfo, tmp_path):
    assert available_memory(meminfo, tmp_path / "nowhere") == AVAILABLE


def test_a_cgroup_cuts_it_to_its_limit_less_what_is_used(meminfo, cgroup):
    assert available_memory(meminfo, cgroup("3000000000", "1000000000")) == 2_000_000_000


def test_the_first_version_of_cgroups_counts_too(meminfo, tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("3000000000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000000000\n")
    assert available_memory(meminfo, tmp_path) == 2_000_000_000


def test_a_cgroup_that_leaves_more_than_there_is_changes_nothing(meminfo, cgroup):
    assert available_memory(meminfo, cgroup(str(2**50), "1000000000")) == AVAILABLE


def test_a_cgroup_without_a_limit_changes_nothing(meminfo, cgroup):
    assert available_memory(meminfo, cgroup("max", "1000000000")) == AVAILABLE


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(meminfo, cgroup):
    assert available_memory(meminfo, cgroup("1000", "5000")) == 0


@pytest.mark.parametrize(("limit", "used"), [("", ""), ("plenty", "5"), ("1000", "some"), ("1000", "")])
def test_a_cgroup_whose_files_make_no_sense_changes_nothing(meminfo, cgroup, limit, used):
    assert available_memory(meminfo, cgroup(limit, used)) == AVAILABLE


@pytest.mark.parametrize("text", ["", "MemTotal: 16000000 kB\n", "MemAvailable:\n", "MemAvailable: lots kB\n"])
def test_a_system_that_does_not_say_is_taken_to_have_half_of_its_memory(tmp_path, text):
    (tmp_path / "meminfo").write_text(text)
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert available_memory(tmp_path / "meminfo", tmp_path) == half
    assert available_memory(tmp_path / "missing", tmp_path) == half
