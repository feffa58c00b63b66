from __future__ import annotations

import os

import pytest

from millpond.core.disk_prefixes import StoredBlock
from millpond.load.block_file import CHECKSUM, HEAD, BlockFileError, BlockFormat

IDENTITY, KEY, PARENT = bytes(range(32)), b"k" * 32, b"p" * 32
BLOCK = StoredBlock(KEY, PARENT, 3, (1, 2, 3, 70_000))
DATA = bytes(range(200)) + bytes(56)
FORM = BlockFormat(IDENTITY, 4, len(DATA))


def contents(block=BLOCK, form=FORM, data=DATA):
    buffer, room = form.new_buffer()
    room[:] = data
    form.seal(buffer, block)
    return buffer


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "block.kv"
    path.write_bytes(contents())
    return path


def test_what_was_written_is_read(path):
    assert bytes(FORM.read(path, BLOCK)) == DATA


def test_a_bit_that_flips_anywhere_is_seen(path):
    whole = contents()
    for place in range(0, len(whole), 5):
        for bit in (1, 128):
            whole[place] ^= bit
            path.write_bytes(whole)
            with pytest.raises(BlockFileError):
                FORM.read(path, BLOCK)
            whole[place] ^= bit
    path.write_bytes(whole)
    assert bytes(FORM.read(path, BLOCK)) == DATA


@pytest.mark.parametrize("num_bytes", [0, 1, HEAD.size, len(contents()) - CHECKSUM.size, len(contents()) - 1])
def test_a_file_that_was_cut_is_refused_with_both_sizes(path, num_bytes):
    os.truncate(path, num_bytes)
    with pytest.raises(BlockFileError, match=f"it has {num_bytes} bytes, not {FORM.num_bytes}"):
        FORM.read(path, BLOCK)


def test_a_file_that_goes_on_is_refused(path):
    path.write_bytes(contents() + b"x")
    with pytest.raises(BlockFileError, match=f"it has {FORM.num_bytes + 1} bytes"):
        FORM.read(path, BLOCK)


OTHERS = {
    "identity": (contents(form=BlockFormat(b"i" * 32, 4, len(DATA))), "another model's"),
    "key": (contents(BLOCK._replace(key=b"x" * 32)), "other tokens"),
    "parent": (contents(BLOCK._replace(parent=b"x" * 32)), "other tokens"),
    "tokens": (contents(BLOCK._replace(token_ids=(1, 2, 3, 4))), "other tokens"),
    "nothing": (bytearray(FORM.num_bytes), "first bytes"),
}


@pytest.mark.parametrize(("other", "reason"), OTHERS.values(), ids=OTHERS)
def test_a_whole_file_of_something_else_is_refused(path, other, reason):
    path.write_bytes(other)
    with pytest.raises(BlockFileError, match=reason):
        FORM.read(path, BLOCK)


def test_a_file_of_another_version_or_of_other_sizes_is_refused(path):
    whole = contents()
    whole[8] += 1
    path.write_bytes(whole)
    with pytest.raises(BlockFileError, match="version 2"):
        FORM.read(path, BLOCK)
    # As many bytes, but of fewer tokens.
    other = BlockFormat(IDENTITY, 2, len(DATA) + 8)
    path.write_bytes(contents(BLOCK._replace(token_ids=(1, 2)), other, DATA + bytes(8)))
    with pytest.raises(BlockFileError, match=r"sizes \[2, 264\]"):
        FORM.read(path, BLOCK)


def test_a_pipe_a_folder_and_a_link_are_not_read(path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(BlockFileError, match="it is not a file"):
            FORM.read(tmp_path / name, BLOCK)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        FORM.read(tmp_path / "link", BLOCK)
