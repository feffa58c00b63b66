from __future__ import annotations

import os

import pytest

from millpond.errors import ConfigError
from millpond.lab import jsonl
from millpond.lab.jsonl import read_objects


def objects(path):
    return list(read_objects(path, "write one"))


def test_each_object_comes_with_its_place_and_blank_lines_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  {"a": 2}')  # with a byte order mark, as some editors write it
    assert objects(path) == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"a": 2})]


def test_what_is_no_file_is_refused_without_being_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe"):
        with pytest.raises(ConfigError, match="is a folder, a pipe or a device, not a file; write one"):
            objects(tmp_path / name)
    with pytest.raises(ConfigError, match=r"there is no file .*nothing; write one"):
        objects(tmp_path / "nothing")


def test_a_file_too_large_for_memory_is_refused_without_being_read(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MOST_BYTES", 9)
    (tmp_path / "a").write_text('{"a": 12}\n')
    with pytest.raises(ConfigError, match="has 10 bytes, more than the 9 that are read; write one"):
        objects(tmp_path / "a")


def test_a_damaged_line_is_shown_in_part(tmp_path):
    (tmp_path / "a").write_text("x" * 1000)
    with pytest.raises(ConfigError, match=r"line 1 is not a JSON object: 'x{60}'$"):
        objects(tmp_path / "a")
