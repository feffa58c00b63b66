"""A model in several GGUF files: read as one, and every way in which the parts do not fit is an error that names it."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from gguf import GGUFReader

from gguf_writer import UINT16, TensorData, Typed, quantize, write_gguf
from millpond.errors import ModelFileError, ModelNotFoundError
from millpond.load.gguf import open_gguf
from millpond.load.parts import part_names
from millpond.load.store import find, resolve
from millpond.model.checkpoint import read_figures
from millpond.model.weights import load_weights
from tiny_llama import write_tiny_llama


@dataclass
class Split:
    """A tiny model written once whole and once in parts; changes says what is wrong with the metadata of a part."""

    folder: object
    count: int = 3
    changes: dict = field(default_factory=dict)

    def __post_init__(self):
        write_tiny_llama(self.folder / "whole.gguf", head_dim=32, types={"*": "Q4_1"})

    @property
    def paths(self):
        return [self.folder / "parts" / f"m-{i + 1:05}-of-{self.count:05}.gguf" for i in range(self.count)]

    def write(self):
        (self.folder / "parts").mkdir(exist_ok=True)
        whole = open_gguf(self.folder / "whole.gguf")
        tensors = {
            name: TensorData(each.shape, int(each.type), each.data.tobytes()) for name, each in whole.tensors.items()
        }
        names = np.array_split(list(tensors), self.count)
        for number, (path, own) in enumerate(zip(self.paths, names, strict=True)):
            split = {"split.no": Typed(UINT16, number), "split.count": Typed(UINT16, self.count)}
            metadata = {**(whole.metadata if number == 0 else {}), **split, "split.tensors.count": len(tensors)}
            metadata |= self.changes.get(number, {})
            write_gguf(
                path, {k: v for k, v in metadata.items() if v is not None}, {name: tensors[name] for name in own}
            )
        return self


@pytest.fixture
def split(tmp_path):
    return Split(tmp_path)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_part_opens_the_whole_model(split, part):
    split.write()
    whole, joined = open_gguf(split.folder / "whole.gguf"), open_gguf(split.paths[part])
    assert list(joined.tensors) == list(whole.tensors)
    assert all(np.array_equal(joined.tensors[name].data, whole.tensors[name].data) for name in whole.tensors)
    assert (joined.path, joined.paths) == (split.paths[0], tuple(split.paths))
    assert whole.paths == (whole.path,)
    config = read_figures(joined)
    assert config == read_figures(whole)
    assert np.array_equal(load_weights(joined, config, "auto").room, load_weights(whole, config, "auto").room)


def test_the_parts_are_such_as_the_gguf_package_reads(split):
    split.write()
    fields = GGUFReader(split.paths[1]).fields
    assert [fields[f"split.{key}"].contents() for key in ("no", "count")] == [1, 3]


def test_a_missing_part_is_named(split):
    split.write()
    split.paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"1 of the model's 3 parts are missing .* m-00002-of-00003\.gguf"):
        open_gguf(split.paths[0])


def test_a_part_under_another_name_is_refused(split):
    split.write()
    other = split.paths[0].rename(split.folder / "model.gguf")
    with pytest.raises(ModelFileError, match=r"model\.gguf: one of 3 parts .* NAME-00001-of-00003\.gguf"):
        open_gguf(other)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (1, {"split.no": 2}, "m-00002-of-00003.gguf: metadata 'split.no' is 2, by its name it is 1"),
        (1, {"split.no": None}, "m-00002-of-00003.gguf: metadata 'split.no' is -1, by its name it is 1"),
        (2, {"split.count": 4}, "m-00003-of-00003.gguf: metadata 'split.count' is 4, by its name it is 3"),
        (0, {"split.count": 2}, "m-00001-of-00003.gguf: one of 2 parts"),
        (0, {"split.count": "3"}, "m-00001-of-00003.gguf: metadata 'split.count' must be a count, got 3"),
        (0, {"split.count": 2**31}, "metadata 'split.count' must be a count, got 2147483648"),
        (0, {"split.tensors.count": 99}, "the parts have 20 tensors, and should have 99"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_each_other_are_refused_with_both_numbers(split, part, changes, message):
    split.changes = {part: changes}
    split.write()
    with pytest.raises(ModelFileError) as caught:
        open_gguf(split.paths[0])
    assert message in str(caught.value)


def test_a_tensor_in_two_parts_is_refused(split):
    split.write()
    split_part = {"split.no": 1, "split.count": 3}
    write_gguf(split.paths[1], split_part, {"blk.0.attn_k.weight": quantize(np.zeros((1, 32), np.float32), "F32")})
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: tensor 'blk\.0\.attn_k\.weight' is in an"):
        open_gguf(split.paths[0])


def test_damage_in_a_later_part_is_told_of_that_part(split):
    split.write()
    split.paths[2].write_bytes(split.paths[2].read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"^m-00003-of-00003\.gguf: incomplete file"):
        open_gguf(split.paths[0])


def test_a_folder_of_one_split_model_resolves_to_its_first_part(split):
    split.write()
    assert resolve(str(split.folder / "parts")) == split.paths[0]
    assert find(str(split.folder / "parts")) == split.paths[0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_folder_without_one_of_the_parts_says_which_is_missing(split, missing):
    split.write()
    split.paths[missing].unlink()
    name = split.paths[missing].name
    with pytest.raises(ModelFileError, match=f"1 of the model's 3 parts are missing from its folder.*{name}"):
        open_gguf(resolve(str(split.folder / "parts")))
    for call in (resolve, find):
        with pytest.raises(ModelNotFoundError, match=f"{name}': this part of the model is missing from its folder"):
            call(str(split.paths[missing]))


def test_a_folder_of_two_split_models_lists_their_files(split):
    split.write()
    (split.folder / "parts" / "other-00001-of-00002.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"has 4 \.gguf files; name one of them"):
        resolve(str(split.folder / "parts"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-00002-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]),
        ("q/a-00001-of-00001.gguf", ["q/a-00001-of-00001.gguf"]),
        ("a-00003-of-00002.gguf", ["a-00003-of-00002.gguf"]),
        ("a-00000-of-00002.gguf", ["a-00000-of-00002.gguf"]),
        ("a.gguf", ["a.gguf"]),
    ],
)
def test_the_names_of_all_parts_follow_from_one(name, expected):
    assert part_names(name) == expected
