from __future__ import annotations

import errno
import os
import threading

import pytest

from millpond.core.disk_prefixes import StoredBlock
from millpond.errors import ConfigError
from millpond.load import prefix_store
from millpond.load.block_file import BlockFormat
from millpond.load.prefix_store import REFUSED_SECONDS, PrefixStore

IDENTITY, OTHER_IDENTITY = b"\x11" * 32, b"\x22" * 32
BLOCK_BYTES = 64
FORM = BlockFormat(IDENTITY, 2, BLOCK_BYTES)
SECONDS = 30.0


def block(number, depth=0):
    return StoredBlock(bytes([number]) * 32, b"p" * 32, depth, (number, number))


def data(number):
    return bytes([number]) * BLOCK_BYTES


def fill(block_id, into):
    """The K/V of block n of the pool is n over and over."""
    into[:] = data(block_id)


def open_store(folder, *, identity=IDENTITY, most_blocks=100, read_block=fill, **settings):
    form = BlockFormat(identity, 2, BLOCK_BYTES)
    return PrefixStore(folder, form, most_bytes=most_blocks * form.num_bytes, read_block=read_block, **settings)


def kept(folder, numbers, **settings):
    """A store that was offered these blocks, and is closed."""
    store = open_store(folder, **settings)
    for number in numbers:
        store.offer(number, block(number))
    store.close()
    return store


def read(store, *blocks):
    reading = store.read(blocks)
    assert reading.wait(SECONDS)
    return [bytes(each) for each in reading.data]


def take_turn(store, *offers):
    """The writer's next turn, in the test's thread: its own has nothing to wake up for."""
    store._offers.update(offers)
    store._write_next()


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_block_is_there_after_a_restart_and_is_what_it_was(tmp_path):
    assert kept(tmp_path, [3, 4]).counters.written_bytes == 2 * FORM.num_bytes
    store = open_store(tmp_path)
    assert (len(store), store.counters.stored_bytes) == (2, 2 * FORM.num_bytes)
    assert block(3).key in store
    assert block(5).key not in store
    assert read(store, block(3), block(4)) == [data(3), data(4)]
    assert store.counters.read_bytes == 2 * FORM.num_bytes
    store.close()


def test_folder_and_files_are_for_their_owner_alone(tmp_path):
    folder = tmp_path / "new" / "prefixes"
    kept(folder, [3])
    modes = {path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if path.is_dir()}
    assert modes == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.kv")} == {0o600}


def test_a_block_that_is_there_is_not_written_again(tmp_path):
    kept(tmp_path, [3])
    asked = []

    def note(block_id, into):
        asked.append(block_id)
        fill(block_id, into)

    store = kept(tmp_path, [3, 5], read_block=note)
    assert (asked, store.counters.written_bytes) == ([5], FORM.num_bytes)


def test_a_damaged_block_is_deleted_counted_and_named_and_the_ones_before_it_are_used(tmp_path, caplog):
    kept(tmp_path, [3, 4, 5])
    (path,) = tmp_path.rglob(f"{block(4).key.hex()}.kv")
    os.truncate(path, 50)
    store = open_store(tmp_path)
    assert read(store, block(3), block(4), block(5)) == [data(3)]
    assert (store.counters.damaged_blocks, block(4).key in store, path.exists()) == (1, False, False)
    assert f"{path} is not used and is deleted: it has 50 bytes" in caplog.text
    assert block(5).key in store
    store.close()


def test_a_link_in_the_place_of_a_block_is_not_followed(tmp_path):
    kept(tmp_path, [3])
    (path,) = tmp_path.rglob("*.kv")
    store = open_store(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(store, block(3)) == []
    assert (store.counters.damaged_blocks, (tmp_path / "elsewhere").exists()) == (1, True)
    store.close()


def test_a_block_that_another_server_has_deleted_is_missed_and_is_no_damage(tmp_path):
    kept(tmp_path, [3, 4])
    store = open_store(tmp_path)
    (path,) = tmp_path.rglob(f"{block(4).key.hex()}.kv")
    path.unlink()
    assert read(store, block(3), block(4)) == [data(3)]
    assert (store.counters.damaged_blocks, block(4).key in store) == (0, False)
    store.close()


def test_another_model_in_the_same_folder_sees_nothing_of_it(tmp_path):
    kept(tmp_path, [3])
    store = open_store(tmp_path, identity=OTHER_IDENTITY)
    assert len(store) == 0
    assert read(store, block(3)) == []
    store.close()
    # Nor does it believe a file that somebody has put there.
    (path,) = tmp_path.rglob("*.kv")
    (tmp_path / OTHER_IDENTITY.hex()[:16] / path.name).write_bytes(path.read_bytes())
    store = open_store(tmp_path, identity=OTHER_IDENTITY)
    assert block(3).key in store
    assert read(store, block(3)) == []
    assert store.counters.damaged_blocks == 1
    store.close()


def test_two_servers_share_a_folder(tmp_path):
    one, other = open_store(tmp_path), open_store(tmp_path)
    for store in (one, other):
        store.offer(3, block(3))
    one.offer(4, block(4))
    one.close()
    other.close()
    store = open_store(tmp_path)
    assert read(store, block(3), block(4)) == [data(3), data(4)]
    assert len(files(tmp_path)) == 2
    store.close()


@pytest.mark.parametrize("becomes", [None, 9])
def test_a_block_that_is_handed_out_while_it_is_copied_is_not_kept(tmp_path, becomes):
    becomes_of = {} if becomes is None else {3: block(becomes)}

    def hand_out(block_id, into):
        fill(block_id, into)
        if store._offers.get(3) == block(3):
            store.withdraw(3)
            store._offers.update(becomes_of)

    store = open_store(tmp_path, read_block=hand_out)
    take_turn(store, (3, block(3)))
    assert files(tmp_path) == []
    take_turn(store, (4, block(4)))
    take_turn(store)
    store.close()
    wanted = {4} if becomes is None else {4, 9}
    assert files(tmp_path) == sorted(f"{block(number).key.hex()}.kv" for number in wanted)


def test_what_is_withdrawn_before_its_turn_is_not_copied(tmp_path):
    copied = []

    def copy(block_id, into):
        copied.append(block_id)
        fill(block_id, into)

    store = open_store(tmp_path, read_block=copy)
    store._offers.update({3: block(3), 4: block(4)})
    store.withdraw(3)
    take_turn(store)
    store.close()
    assert copied == [4]


def test_the_least_recently_used_goes_first_and_the_deepest_of_those_used_together(tmp_path):
    store = open_store(tmp_path)
    for number in range(10):
        store.offer(number, block(number, depth=number))
    store.close()
    # Ten blocks of one sequence; another one's two take the room of the deepest.
    store = open_store(tmp_path, most_blocks=10)
    for number in (20, 21):
        store.offer(number, block(number))
    store.close()
    assert store.counters.evicted_blocks == 2
    assert files(tmp_path) == sorted(f"{block(number).key.hex()}.kv" for number in (*range(8), 20, 21))


def test_what_was_of_use_stays(tmp_path):
    kept(tmp_path, range(10))
    for path in tmp_path.rglob("*.kv"):
        os.utime(path, (1_000, 1_000))
    store = open_store(tmp_path, most_blocks=10)
    store.use([(block(number).key, number) for number in range(5, 10)])
    for number in range(20, 24):
        store.offer(number, block(number))
    store.close()
    assert store.counters.evicted_blocks == 4
    assert {f"{block(number).key.hex()}.kv" for number in (*range(5, 10), *range(20, 24))} < set(files(tmp_path))


def test_a_smaller_limit_is_kept_at_the_start_and_other_models_count(tmp_path):
    kept(tmp_path, [1, 2, 3], identity=OTHER_IDENTITY)
    for path in tmp_path.rglob("*.kv"):
        os.utime(path, (1_000, 1_000))
    kept(tmp_path, [4, 5])
    store = open_store(tmp_path, most_blocks=4)
    store.close()
    assert (store.counters.evicted_blocks, store.counters.stored_bytes) == (2, 3 * FORM.num_bytes)
    assert files(tmp_path) == sorted(f"{block(number).key.hex()}.kv" for number in (3, 4, 5))


def test_the_folder_never_holds_more_than_the_limit(tmp_path):
    store = open_store(tmp_path, most_blocks=7)
    sizes = []
    write = store._folder.write

    def watched(*arguments):
        write(*arguments)
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*.kv")))

    store._folder.write = watched
    for number in range(40):
        store.offer(number, block(number))
    store.close()
    assert len(sizes) == 40
    assert max(sizes) == 7 * FORM.num_bytes


class FullDisk:
    """os.open for files that are written: no room, while is_full."""

    def __init__(self, monkeypatch):
        self.is_full = True
        self._open = os.open
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path, flags, *mode, **settings):
        if self.is_full and flags & os.O_WRONLY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._open(path, flags, *mode, **settings)


def test_a_full_disk_is_said_once_and_written_to_again_later(tmp_path, monkeypatch, caplog):
    disk, now = FullDisk(monkeypatch), [0.0]
    store = open_store(tmp_path, clock=lambda: now[0])
    take_turn(store, (10, block(10)))
    take_turn(store, (11, block(11)))  # not tried
    now[0] += REFUSED_SECONDS
    take_turn(store, (12, block(12)))
    assert caplog.text.count("No space left on device") == 1
    assert (store.counters.failed_writes, len(store), store._offers) == (3, 0, {})
    disk.is_full = False
    now[0] += REFUSED_SECONDS
    take_turn(store, (13, block(13)))
    assert (store.counters.failed_writes, len(store), files(tmp_path)) == (3, 1, [f"{block(13).key.hex()}.kv"])
    store.close()


def test_a_write_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    store.offer(3, block(3))
    store.close()
    assert (files(tmp_path), store.counters.failed_writes, len(store)) == ([], 1, 0)


def test_what_an_interrupted_write_has_left_goes_once_it_is_old(tmp_path):
    kept(tmp_path, [3])
    own = tmp_path / IDENTITY.hex()[:16]
    for name in ("1-0-old.part", "1-1-new.part"):
        (own / name).write_bytes(b"half")
    os.utime(own / "1-0-old.part", (1_000, 1_000))
    open_store(tmp_path).close()
    assert files(own) == [f"{block(3).key.hex()}.kv", "1-1-new.part"]


def test_files_that_are_not_ours_are_said_and_left_alone(tmp_path, caplog):
    kept(tmp_path, [3])
    own = tmp_path / IDENTITY.hex()[:16]
    (tmp_path / "notes.txt").write_text("mine")
    (own / "photo.jpg").write_text("mine too")
    (own / f"{block(8).key.hex()}.kv").mkdir()
    store = open_store(tmp_path, most_blocks=1)
    store.offer(4, block(4))
    store.close()
    assert "holds 2 files that are not blocks of K/V and are left alone" in caplog.text
    assert files(tmp_path) == sorted(["notes.txt", "photo.jpg", f"{block(4).key.hex()}.kv"])


def test_a_place_that_cannot_be_written_to_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"prefixes cannot be kept in {place}: "):
            open_store(place)


def test_a_limit_below_one_block_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ConfigError, match=f"may hold 0 bytes, but one block takes {FORM.num_bytes}"):
        open_store(tmp_path, most_blocks=0)


def test_a_reading_that_nobody_wants_any_more_ends(tmp_path):
    kept(tmp_path, [3, 4])
    store = open_store(tmp_path)
    reading = store.read([block(3), block(4)])
    reading.cancel()
    assert reading.wait(SECONDS)
    store.close()
    store.close()  # twice does no harm


def test_two_servers_may_write_the_same_block_at_the_same_time(tmp_path, monkeypatch):
    one, other = open_store(tmp_path), open_store(tmp_path)
    replace, between = os.replace, [lambda: other._folder.write(block(3).key, 0, b"same bytes")]

    def replace_later(*paths):
        if between:
            between.pop()()
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_later)
    one._folder.write(block(3).key, 0, b"same bytes")
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [b"same bytes"]
    one.close()
    other.close()


def test_a_folder_in_the_place_of_a_block_costs_that_block_alone(tmp_path, caplog):
    kept(tmp_path, [3])
    own = tmp_path / IDENTITY.hex()[:16]
    (own / f"{block(8).key.hex()}.kv").mkdir()
    store = open_store(tmp_path, clock=lambda: 0.0)
    for number in (8, 9):
        take_turn(store, (number, block(number)))
    assert (store.counters.failed_writes, block(8).key in store, block(9).key in store) == (1, False, True)
    assert f"{block(8).key.hex()}.kv is a folder, where a block of K/V is to be" in caplog.text
    assert files(tmp_path) == sorted(f"{block(number).key.hex()}.kv" for number in (3, 9))
    store.close()


def test_what_is_not_written_at_the_end_is_counted_and_said_the_block_in_hand_too(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prefix_store, "JOIN_SECONDS", 0.05)
    begun, go_on = threading.Event(), threading.Event()
    store = open_store(tmp_path, clock=lambda: 0.0)
    write = store._folder.write

    def hang(*arguments):
        begun.set()
        assert go_on.wait(SECONDS)
        write(*arguments)

    store._folder.write = hang
    for number in (3, 4, 5):
        store.offer(number, block(number))
    assert begun.wait(SECONDS)
    assert store.num_unwritten == 3
    store.close()
    assert "millpond-disk-writer hangs in " in caplog.text
    assert "3 blocks of K/V were not written any more to " in caplog.text
    go_on.set()
    store._writer.join(SECONDS)
    assert store.num_unwritten == 0
