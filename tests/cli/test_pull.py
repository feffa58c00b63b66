from __future__ import annotations

from pathlib import Path

import pytest

from gguf_writer import write_gguf
from millpond.cli.app import run
from millpond.load import store


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """A store that hands out one small file, and notes what it was asked for and the folder it may keep things in."""
    path = tmp_path / "model.gguf"
    asked = []

    def resolve(model, *, cache_dir, progress):
        asked.append((model, cache_dir))
        progress(0, 10, "downloading it")
        return path

    monkeypatch.setattr(store, "resolve", resolve)
    return path, asked


def test_it_prints_where_the_file_is_and_the_licence(fetched, capsys):
    path, asked = fetched
    assert run(["pull", "smollm2"], {}) == 0
    out, error = capsys.readouterr()
    assert out == f"{path}\n"
    assert error == "downloading it\nlicence: Apache-2.0 (SmolLM2 135M Instruct)\n"
    assert asked == [("smollm2", None)]


def test_the_licence_of_gemma_is_named_with_its_terms(fetched, capsys):
    assert run(["pull", "gemma3-270m"], {}) == 0
    assert (
        "licence: Gemma Terms of Use, https://ai.google.dev/gemma/terms (Gemma 3 270M, a base model)"
        in capsys.readouterr().err
    )


def test_the_cache_folder_comes_from_the_environment(fetched):
    _, asked = fetched
    run(["pull", "smollm2"], {"MILLPOND_CACHE": "/elsewhere"})
    assert asked == [("smollm2", Path("/elsewhere"))]


@pytest.mark.parametrize(
    ("metadata", "licence"), [({"general.license": "mit"}, "mit"), ({}, "the file does not name one")]
)
def test_the_licence_of_any_other_model_is_what_its_file_says(fetched, capsys, metadata, licence):
    write_gguf(fetched[0], {"general.architecture": "llama", **metadata}, {})
    assert run(["pull", "someone/something"], {}) == 0
    assert f"licence: {licence}" in capsys.readouterr().err


def test_a_folder_of_safetensors_names_no_licence(fetched, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "resolve", lambda model, *, cache_dir, progress: tmp_path)
    assert run(["pull", "someone/something"], {}) == 0
    assert "licence: the file does not name one" in capsys.readouterr().err


def test_the_licence_of_the_model_for_embeddings_is_named(fetched, capsys):
    assert run(["pull", "all-minilm-l6-v2"], {}) == 0
    assert "licence: Apache-2.0 (all-MiniLM-L6-v2, for embeddings)" in capsys.readouterr().err
