"""Packed weights are kept for the next start and used then, unless anything at all is not as it was."""

import os
import shutil
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from millpond.build import build_model_runner
from millpond.config import EngineConfig
from millpond.kernels.isa import runnable
from millpond.load.gguf import open_gguf
from millpond.model import packed
from millpond.model.checkpoint import read_figures
from millpond.model.weights import Linear, load_weights
from tiny_llama import write_tiny_llama

LAYERS, FFN = 2, 128
INTEGERS = 4 * LAYERS + 1  # and the head
SMALL = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=8, threads=1)
KEPT = tuple(np.array([3 * i, 7], np.int64)[: i % 3] for i in range(INTEGERS))


@dataclass
class Start:
    """One start after another on the same model file and cache folder."""

    model: Path
    folder: Path
    dtype: str = "auto"
    kv_dtype: str = "auto"
    isa: str = "portable"
    told: list[str] = field(default_factory=list)

    def again(self, keep: bool = True):
        """The weights of one more start, and whether they had to be packed."""
        file = open_gguf(self.model)
        weights, keep_them = packed.packed_weights(
            file,
            read_figures(file),
            self.dtype,
            self.kv_dtype,
            isa=self.isa,
            folder=self.folder,
            notify=self.told.append,
        )
        was_packed = weights.outliers is None
        if keep and was_packed:
            keep_them(KEPT)
        return weights, was_packed

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    model = tmp_path / "tiny.gguf"
    write_tiny_llama(model, types={"*": "Q4_1"}, head_dim=32, ffn=FFN, layers=LAYERS)
    return Start(model, tmp_path / "cache" / "packed")


def change_byte(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 1]))


def test_what_is_kept_comes_back_bit_for_bit_with_its_outlier_channels(start):
    first, was_packed = start.again()
    second, packed_again = start.again()
    assert (was_packed, packed_again) == (True, False)
    np.testing.assert_array_equal(second.room, first.room)
    for one, other in zip(first.packed, second.packed, strict=True):
        assert (one.kind, one.columns, one.depth) == (other.kind, other.columns, other.depth)
        np.testing.assert_array_equal(one.weights, other.weights)
        np.testing.assert_array_equal(one.outliers, other.outliers)
    np.testing.assert_array_equal(first.norms, second.norms)
    assert [each.tolist() for each in second.outliers] == [each.tolist() for each in KEPT]
    assert start.told == []


@pytest.mark.parametrize("types", [{"*": "BF16"}, {"*ffn*": "F32", "*": "Q8_0"}], ids=str)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_every_kind_of_layer_comes_back(start, types, dtype, monkeypatch):
    write_tiny_llama(start.model, types=types, head_dim=32, ffn=FFN, tied=False, layers=1)
    start.dtype = dtype
    monkeypatch.setattr(packed, "_checked_outliers", lambda listed, weights: ())
    first, _ = start.again()
    second, packed_again = start.again()
    assert not packed_again
    np.testing.assert_array_equal(second.room, first.room)
    assert second.kinds == first.kinds
    assert second.head is not second.embedding


def test_a_second_start_packs_nothing(start, monkeypatch):
    start.again()
    monkeypatch.setattr(Linear, "pack_into", lambda *args: pytest.fail("a layer was packed again"))
    start.again()


def test_the_weights_are_mapped_and_cannot_be_written(start):
    start.again()
    weights, _ = start.again()
    with pytest.raises(ValueError, match="read-only"):
        weights.room[0] = 0


def test_an_engine_over_kept_weights_gives_the_same_bits_and_probes_no_more(start, tmp_path, monkeypatch):
    def logits():
        runner = build_model_runner(start.model, replace(SMALL, isa="portable"), cache_dir=tmp_path / "cache")
        assert all(channels.size for channels in runner.outliers)
        return runner.logits(range(3, 20))

    monkeypatch.setattr("millpond.model.outliers.LEAST_GAIN", 0.0)  # every layer has outlier channels
    fresh = logits()
    assert len(start.files) == 1
    monkeypatch.setattr("millpond.runner.model_runner.find_outliers", lambda *args: pytest.fail("probed again"))
    np.testing.assert_array_equal(logits(), fresh)


@pytest.mark.skipif("amx" not in runnable(), reason="this processor has no AMX, or may not use it")
def test_where_amx_multiplies_nothing_is_probed(start, tmp_path, monkeypatch):
    monkeypatch.setattr("millpond.runner.model_runner.find_outliers", lambda *args: pytest.fail("probed"))
    for _ in range(2):  # packed, then mapped
        runner = build_model_runner(start.model, replace(SMALL, isa="amx"), cache_dir=tmp_path / "cache")
        assert len(runner.outliers) == len(runner._packed.integer_layers) > 0
        assert not any(channels.size for channels in runner.outliers)


@pytest.mark.parametrize("place", [0, 9, 40, packed.START, -1], ids=["magic", "length", "head", "first", "last"])
def test_a_damaged_file_is_packed_again_and_replaced_with_a_notice(start, place):
    fresh, _ = start.again()
    (path,) = start.files
    change_byte(path, place if place >= 0 else path.stat().st_size + place)
    weights, was_packed = start.again()
    assert was_packed
    np.testing.assert_array_equal(weights.room, fresh.room)
    assert len(start.told) == 1
    assert "the packed weights of tiny.gguf cannot be used" in start.told[0]
    assert start.again()[1] is False
    assert start.files == [path]


@pytest.mark.parametrize("left", [0, 10, 100, packed.START, -1])
def test_a_cut_file_is_packed_again_with_a_notice(start, left):
    start.again()
    (path,) = start.files
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    assert start.again()[1] is True
    assert len(start.told) == 1
    assert start.again()[1] is False


def test_a_file_that_is_longer_than_it_should_be_is_not_used(start):
    start.again()
    with start.files[0].open("ab") as file:
        file.write(b"\0")
    assert start.again()[1] is True


@pytest.mark.parametrize("channels", [[-1], [1 << 20], list(range(9))], ids=["negative", "beyond", "too many"])
def test_channels_that_a_layer_does_not_have_are_never_handed_to_compiled_code(start, channels):
    weights, _ = start.again(keep=False)
    listed = [channels] + [[] for _ in range(INTEGERS - 1)]
    with pytest.raises(packed._Unusable, match="channels"):
        packed._checked_outliers(listed, weights)


def test_lists_for_fewer_layers_than_there_are_are_not_used(start):
    start.again(keep=False)
    file = open_gguf(start.model)
    _, keep = packed.packed_weights(
        file, read_figures(file), "auto", "auto", isa=start.isa, folder=start.folder, notify=start.told.append
    )
    keep(KEPT[:-1])
    assert start.again()[1] is True
    assert len(start.told) == 1


def test_another_model_under_the_same_name_is_packed_and_takes_the_old_ones_place(start):
    before, _ = start.again()
    (path,) = start.files
    write_tiny_llama(start.model, types={"*": "Q4_1"}, head_dim=32, ffn=FFN, layers=LAYERS, seed=1)
    after, was_packed = start.again()
    assert was_packed
    assert not np.array_equal(after.room, before.room)
    assert start.files == [path]
    assert start.told == []


def key_of(start):
    config = read_figures(open_gguf(start.model))
    return packed.key_of((start.model,), "auto", "auto", "portable", config, "off")


def test_a_change_of_the_file_changes_the_key_though_its_size_and_time_are_as_before(start):
    about, before = start.model.stat(), key_of(start)
    start.model.chmod(0o600 if about.st_mode & 0o077 else 0o640)
    assert start.model.stat().st_mtime_ns == about.st_mtime_ns
    assert key_of(start) != before


def test_other_contents_change_the_key_though_the_system_says_nothing_of_a_change(start, monkeypatch):
    about, config = start.model.stat(), read_figures(open_gguf(start.model))
    before = packed.key_of((start.model,), "auto", "auto", "portable", config, "off")
    change_byte(start.model, about.st_size // 2)
    monkeypatch.setattr(Path, "stat", lambda path: about)
    assert packed.key_of((start.model,), "auto", "auto", "portable", config, "off") != before


def test_other_figures_change_the_key_for_they_may_be_in_another_file(start):
    config = read_figures(open_gguf(start.model))
    keys = {
        packed.key_of((start.model,), "auto", "auto", "portable", each, "off")
        for each in (config, replace(config, rotary_dims=8))
    }
    assert len(keys) == 2


@pytest.mark.parametrize("what", ["isa", "source"])
def test_weights_of_other_code_or_kernels_are_packed_again(start, what, monkeypatch):
    start.again()
    if what == "isa":
        start.isa = "avx512"
    else:
        monkeypatch.setattr(packed, "source_hash", lambda folders: "another version")
    assert start.again()[1] is True
    assert start.again()[1] is False
    assert len(start.files) == 1


def test_the_code_that_decides_the_layout_is_part_of_the_key(monkeypatch, start):
    seen = []
    monkeypatch.setattr(packed, "source_hash", lambda folders: seen.extend(folders) or "")
    start.again()
    assert {"kernels", "model", "load"} <= set(seen)


def test_each_dtype_has_a_file_of_its_own(start):
    start.again()
    start.dtype = "float32"
    assert start.again()[1] is True
    start.dtype = "auto"
    assert start.again()[1] is False
    assert len(start.files) == 2


def test_weights_whose_outliers_were_found_with_8_bit_keys_and_values_have_a_file_of_their_own(start):
    start.again()
    (first,) = start.files
    start.kv_dtype = "int8"
    assert start.again()[1] is True
    assert start.again()[1] is False
    (second,) = set(start.files) - {first}
    assert second.name == first.name.replace("-auto-", "-auto-int8-")
    shutil.copy(first, second)  # under the other's name it is still not the other
    assert start.again()[1] is True
    start.kv_dtype = "auto"
    assert start.again()[1] is False


def test_an_engine_looks_for_weights_of_its_own_kind_of_keys_and_values(start, tmp_path):
    for kv_dtype in ("auto", "int8"):
        build_model_runner(start.model, replace(SMALL, kv_dtype=kv_dtype), cache_dir=tmp_path / "cache")
    assert len(start.files) == 2


def test_models_of_one_name_in_two_folders_do_not_replace_each_other(start, tmp_path):
    start.again()
    (tmp_path / "other").mkdir()
    other = Start(tmp_path / "other" / "tiny.gguf", start.folder)
    write_tiny_llama(other.model, types={"*": "Q4_1"}, head_dim=32, ffn=FFN, layers=LAYERS, seed=1)
    other.again()
    assert start.again()[1] is False
    assert other.again()[1] is False


def test_a_small_file_is_packed_every_time_and_nothing_is_kept(start, monkeypatch):
    monkeypatch.setattr(packed, "LEAST_BYTES", start.model.stat().st_size + 1)
    assert [start.again(keep=False)[1] for _ in range(2)] == [True, True]
    _, keep = packed.packed_weights(
        open_gguf(start.model),
        read_figures(open_gguf(start.model)),
        "auto",
        "auto",
        isa="",
        folder=start.folder,
        notify=print,
    )
    keep(KEPT)
    assert start.files == []


def test_a_folder_that_cannot_be_made_costs_a_notice_only(start, tmp_path):
    (tmp_path / "file").write_text("")
    start.folder = tmp_path / "file" / "packed"
    weights, _ = start.again()
    file = open_gguf(start.model)
    np.testing.assert_array_equal(weights.room, load_weights(file, read_figures(file), "auto").room)
    assert "not kept" in start.told[-1]


def test_a_disk_without_room_is_left_alone(start, monkeypatch):
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    start.again()
    assert "should be free" in start.told[0]
    assert start.files == []


def test_a_write_that_fails_leaves_nothing_behind(start, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed.os, "replace", fail)
    start.again()
    assert "No space left" in start.told[0]
    assert start.files == []


def test_weights_whose_model_is_gone_and_old_leftovers_are_cleared_away(start, tmp_path):
    gone = Start(tmp_path / "gone.gguf", start.folder)
    shutil.copy(start.model, gone.model)
    gone.again()
    gone.model.unlink()
    old, fresh, foreign = (start.folder / name for name in ("old.part", "fresh.part", "foreign.packed"))
    for path in (old, fresh, foreign):
        path.write_bytes(b"another's")
    os.utime(old, (0, 0))
    start.again()
    assert [path.name.split("-")[0] for path in start.files] == ["foreign.packed", "fresh.part", "tiny"]


def test_the_checksums_are_those_of_the_pieces_in_order(monkeypatch):
    monkeypatch.setattr(packed, "PIECE", 100)
    room = np.random.default_rng(0).integers(0, 256, 250, dtype=np.uint8)
    expected = [zlib.crc32(room[start : start + 100].tobytes()) for start in (0, 100, 200)]
    assert packed._checksums(room) == expected
