from __future__ import annotations

import json

import pytest

from gguf_writer import write_gguf
from millpond.errors import ModelFileError
from millpond.load.gguf import open_gguf
from millpond.load.safetensors import open_safetensors
from millpond.model.pooling import read_pooling
from tiny_models import tiny_model


def of_gguf(tmp_path, **metadata):
    path = tmp_path / "model.gguf"
    write_gguf(
        path, {"general.architecture": "qwen3", **{f"qwen3.{key}": value for key, value in metadata.items()}}, {}
    )
    return read_pooling(open_gguf(path))


@pytest.fixture
def folder(tmp_path):
    return tiny_model("qwen3").write_folder(tmp_path / "folder")


def of_folder(folder, settings):
    (folder / "1_Pooling").mkdir(exist_ok=True)
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (folder / "1_Pooling" / "config.json").write_text(text, encoding="utf-8")
    return read_pooling(open_safetensors(folder))


@pytest.mark.parametrize(("number", "kind"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank")])
def test_a_gguf_says_it_by_a_number(tmp_path, number, kind):
    assert of_gguf(tmp_path, pooling_type=number) == kind


def test_a_language_model_has_none(tmp_path, folder):
    assert of_gguf(tmp_path) is None
    assert read_pooling(open_safetensors(folder)) is None


def test_another_number_is_refused_with_its_key(tmp_path):
    with pytest.raises(ModelFileError, match=r"model\.gguf: qwen3\.pooling_type is 5, not a number from 0 to 4"):
        of_gguf(tmp_path, pooling_type=5)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "cls", "embedding_dimension": 128}, "cls"),
        ({"pooling_mode": ["mean", "lasttoken"]}, "mean + last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "last + mean"),
    ],
)
def test_a_folder_says_it_in_sentence_transformers_settings(folder, settings, kind):
    assert of_folder(folder, settings) == kind


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        (" " * 10_000_001, "is longer than 10000000 bytes"),
        ("[]", "must be an object, got list"),
        ("{}", "chooses none of"),
        ({"pooling_mode_lasttoken": "false"}, ": pooling_mode_lasttoken must be true or false, got 'false'"),
    ],
)
def test_settings_that_say_nothing_are_refused(folder, settings, said):
    with pytest.raises(ModelFileError, match=f"1_Pooling/config.json ?{said}"):
        of_folder(folder, settings)


def with_modules(folder, modules, settings=None):
    text = modules if isinstance(modules, str) else json.dumps(modules)
    (folder / "modules.json").write_text(text, encoding="utf-8")
    return of_folder(folder, settings or {"pooling_mode_mean_tokens": True})


STEPS = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


def test_of_the_listed_steps_those_that_are_done_anyway_change_nothing(folder):
    assert with_modules(folder, STEPS) == with_modules(folder, STEPS[:2]) == "mean"


def test_a_further_step_is_named_and_so_is_no_pooling_that_is_known(folder):
    assert with_modules(folder, [*STEPS[:2], DENSE, STEPS[2]]) == "mean, then Dense"


def test_the_settings_of_pooling_are_where_the_list_says(folder):
    (folder / "pool").mkdir()
    (folder / "pool" / "config.json").write_text('{"pooling_mode": "cls"}')
    steps = [STEPS[0], {"path": "pool", "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}]
    assert with_modules(folder, steps) == "cls"


@pytest.mark.parametrize("more", [{"path": ""}, {}], ids=["empty path", "no path"])
def test_where_the_list_names_no_folder_they_are_in_the_models_own(folder, more):
    with pytest.raises(ModelFileError, match=r"^config\.json .*pooling"):
        with_modules(folder, [{"type": "a.Pooling", **more}])


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ("{}", "modules.json must be a list, got dict"),
        ("[", "modules.json is not JSON"),
        ([{"path": ""}], "modules.json must be a list of objects that have a type each"),
        ([7], "modules.json must be a list of objects that have a type each"),
        (
            [{"type": "a.Pooling", "path": "../elsewhere"}],
            "modules.json has the path '../elsewhere', which is no folder",
        ),
        ([{"type": "a.Pooling", "path": ".."}], r"modules.json has the path '\.\.', which is no folder"),
    ],
)
def test_a_list_of_steps_that_is_none_is_refused(folder, modules, said):
    with pytest.raises(ModelFileError, match=said):
        with_modules(folder, modules)
