"""Packed weights are kept for every format, known by all of its files and by how they are packed."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from load.test_split import Split
from millpond.build import _identity
from millpond.config import EngineConfig
from millpond.model import packed
from millpond.model.checkpoint import open_checkpoint
from millpond.model.weights import Linear
from quantised_folders import Checkpoint, gptq
from tiny_models import tiny_model, write_safetensors

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
KEPT = [np.array([1, 5], np.int64)]


def whole(folder: Path) -> Path:
    return tiny_model("llama").write_folder(folder, "BF16")


def sharded(folder: Path) -> Path:
    model = tiny_model("llama")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    places = {}
    for part, names in enumerate(np.array_split(list(model.arrays), 3), 1):
        file = f"model-{part:05}-of-00003.safetensors"
        write_safetensors(folder / file, {name: model.arrays[name] for name in names})
        places |= dict.fromkeys(names.tolist(), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def split(folder: Path) -> Path:
    folder.mkdir()
    return Split(folder).write().paths[0]


def gptq_folder(folder: Path) -> Path:
    return Checkpoint(GPTQ, gptq).write(folder)


FORMATS = {
    "safetensors": (whole, "off"),
    "safetensors in 8 bits": (whole, "q8"),
    "sharded": (sharded, "off"),
    "sharded, in 4 bits": (sharded, "q4"),
    "split GGUF": (split, "off"),
    "GPTQ": (gptq_folder, "off"),
}
every_format = pytest.mark.parametrize(("write", "quantize"), FORMATS.values(), ids=FORMATS)


@dataclass
class Starts:
    model: Path
    folder: Path
    told: list = field(default_factory=list)

    def again(self, quantize: str, **options):
        """The weights of one more start, and whether they had to be packed."""
        file, config = open_checkpoint(self.model)
        weights, keep = packed.packed_weights(
            file, config, "auto", "auto", isa="portable", folder=self.folder, notify=self.told.append,
            quantize=quantize, **options,
        )  # fmt: skip
        was_packed = weights.outliers is None
        if was_packed:
            keep(KEPT * len(weights.integer_layers))
        return weights, was_packed


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    return lambda write: Starts(write(tmp_path / "model"), tmp_path / "packed")


@every_format
def test_a_second_start_maps_what_the_first_has_packed_and_says_nothing(start, write, quantize, monkeypatch):
    starts, told = start(write), []
    first, was_packed = starts.again(quantize, progress=lambda *words: told.append(words))
    assert was_packed
    assert told
    told.clear()
    monkeypatch.setattr(Linear, "pack_into", lambda *args: pytest.fail("a layer was packed again"))
    second, packed_again = starts.again(quantize, progress=lambda *words: told.append(words))
    assert not packed_again
    assert told == starts.told == []
    assert not second.room.flags.writeable
    np.testing.assert_array_equal(second.room, first.room)
    np.testing.assert_array_equal(second.norms, first.norms)
    assert second.kinds == first.kinds


@every_format
def test_a_change_of_any_file_of_the_model_packs_it_again(start, write, quantize):
    starts = start(write)
    starts.again(quantize)
    for path in open_checkpoint(starts.model)[0].paths:
        os.utime(path, (1, 1))
        assert starts.again(quantize)[1] is True
        assert starts.again(quantize)[1] is False
    assert len(list(starts.folder.iterdir())) == 1


def test_another_config_packs_again(start):
    starts = start(whole)
    starts.again("off")
    path = starts.model / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 5000.0'))
    assert starts.again("off")[1] is True


def test_each_way_to_quantise_has_a_file_of_its_own(start):
    starts = start(whole)
    rooms = {}
    for quantize in ("off", "q8", "q4"):
        weights, was_packed = starts.again(quantize)
        assert was_packed
        rooms[quantize] = weights.room.nbytes
    assert rooms["off"] > rooms["q8"] > rooms["q4"]
    assert [starts.again(quantize)[1] for quantize in rooms] == [False] * 3
    names = sorted(path.name.rsplit("-", 1)[0] for path in starts.folder.iterdir())
    assert names == ["model-auto", "model-auto-q4", "model-auto-q8"]


def test_the_size_of_all_files_counts(start, monkeypatch):
    starts = start(sharded)
    sizes = [path.stat().st_size for path in open_checkpoint(starts.model)[0].paths]
    monkeypatch.setattr(packed, "LEAST_BYTES", sum(sizes))
    starts.again("off")
    assert starts.again("off")[1] is False
    monkeypatch.setattr(packed, "LEAST_BYTES", sum(sizes) + 1)
    assert starts.again("off")[1] is True


@every_format
def test_prefixes_on_disk_are_of_all_files_the_figures_and_the_way_to_quantise(start, write, quantize):
    file, config = open_checkpoint(start(write).model)
    settings = EngineConfig(quantize=quantize, isa="portable")
    seen = {_identity(file.paths, config, settings)}
    other = EngineConfig(quantize="q8" if quantize != "q8" else "off", isa="portable")
    seen.add(_identity(file.paths, config, other))
    with file.paths[-1].open("r+b") as last:
        last.seek(-1, 2)
        byte = last.read(1)[0]
        last.seek(-1, 2)
        last.write(bytes([byte ^ 1]))
    seen.add(_identity(file.paths, config, settings))
    assert len(seen) == 3


def test_weights_under_the_name_of_another_way_to_quantise_are_not_used(start):
    starts = start(whole)
    starts.again("q8")
    (first,) = starts.folder.iterdir()
    first.rename(first.with_name(first.name.replace("-q8-", "-q4-")))
    assert starts.again("q4")[1] is True
    assert starts.told == []  # it was not even looked into


@pytest.mark.parametrize("part", [0, 1, 2])
def test_other_contents_of_any_part_change_the_key_though_the_system_says_nothing_of_a_change(start, part, monkeypatch):
    file, config = open_checkpoint(start(sharded).model)
    about = {path: path.stat() for path in file.paths}
    before = packed.key_of(file.paths, "auto", "auto", "portable", config, "off")
    path = file.paths[part]
    with path.open("r+b") as changed:
        changed.seek(about[path].st_size // 2)
        byte = changed.read(1)[0]
        changed.seek(about[path].st_size // 2)
        changed.write(bytes([byte ^ 1]))
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: about.get(path) or stat(path, **options))
    assert packed.key_of(file.paths, "auto", "auto", "portable", config, "off") != before
