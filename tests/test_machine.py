"""How much memory and how many cores there are to be had: the system's own figures, cut to what the cgroup leaves."""

import os

import pytest

from millpond.machine import available_memory, cgroup_quota, usable_cores

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


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def second_version(folder, text):
    (folder / "cpu.max").write_text(text)
    return folder


def first_version(folder, quota, period):
    (folder / "cpu").mkdir()
    (folder / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu" / "cpu.cfs_period_us").write_text(period)
    return folder


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("150000 100000\n", 2),
        ("200000 100000\n", 2),
        ("200001 100000\n", 3),
        ("50000 100000\n", 1),
        ("1000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("max 100000\n", 8),
    ],
)
def test_a_quota_is_rounded_up_to_whole_cores_and_never_above_the_affinity(eight_cores, tmp_path, text, cores):
    assert usable_cores(second_version(tmp_path, text)) == cores


def test_the_affinity_is_what_counts_where_there_is_no_quota(eight_cores, tmp_path):
    assert usable_cores(tmp_path) == 8
    assert usable_cores(tmp_path / "nowhere") == 8


def test_the_affinity_of_this_process_is_asked_and_not_the_host(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores(second_version(tmp_path, "max 100000")) == 1


def test_without_an_affinity_to_ask_the_systems_count_is_taken(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(("quota", "expected"), [("150000", 1.5), ("-1", None), ("400000\n", 4.0)])
def test_the_first_versions_pair_of_files_is_read_where_there_is_no_second(tmp_path, quota, expected):
    assert cgroup_quota(first_version(tmp_path, quota, "100000\n")) == expected


@pytest.mark.parametrize("text", ["", "\n", "150000", "many 100000", "1.5 x", "150000 0", "-5 100000", "0 100000"])
def test_a_quota_that_makes_no_sense_is_no_quota(eight_cores, tmp_path, text):
    assert usable_cores(second_version(tmp_path, text)) == 8


@pytest.mark.parametrize(("quota", "period"), [("", ""), ("many", "100000"), ("150000", "0"), ("0", "100000")])
def test_a_first_versions_quota_that_makes_no_sense_is_no_quota(eight_cores, tmp_path, quota, period):
    assert usable_cores(first_version(tmp_path, quota, period)) == 8
