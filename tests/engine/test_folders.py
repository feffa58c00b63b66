"""A folder of safetensors, from the files of Hugging Face to answers: the same as from a GGUF of the same model."""

from __future__ import annotations

import json
import shutil

import pytest

from millpond import LLM, SamplingParams
from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.errors import ModelFileError
from millpond.load.dequantize import dequantize
from millpond.load.safetensors import open_safetensors
from quantised_folders import Checkpoint, gptq
from tiny_models import tiny_model, write_safetensors
from tiny_tokenizers import write_tiny_tokenizer

SIZES = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 16, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the end and the beginning", "a", "Zwölf 123\n"]
HI = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny = tiny_model("llama")
    tiny.write_gguf(folder / "tiny.gguf")
    write_tiny_tokenizer(tiny.write_folder(folder / "tiny"))
    return folder


@pytest.fixture(scope="module")
def llm(files):
    return LLM(str(files / "tiny"), **SIZES)


@pytest.fixture(scope="module")
def from_gguf(files):
    return LLM(str(files / "tiny.gguf"), **SIZES)


def test_a_folder_answers_as_the_gguf_of_the_same_model_does(llm, from_gguf):
    ours, theirs = (each.generate(PROMPTS, GREEDY) for each in (llm, from_gguf))
    assert [each.prompt_token_ids for each in ours] == [each.prompt_token_ids for each in theirs]
    assert [each.outputs[0].token_ids for each in ours] == [each.outputs[0].token_ids for each in theirs]
    assert [each.outputs[0].text for each in ours] == [each.outputs[0].text for each in theirs]


def test_a_folder_chats_as_the_gguf_of_the_same_model_does(llm, from_gguf):
    (ours,), (theirs,) = llm.chat(HI, GREEDY), from_gguf.chat(HI, GREEDY)
    assert ours.prompt == theirs.prompt
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.outputs[0].text == theirs.outputs[0].text


def test_a_folder_is_named_by_its_whole_name_also_where_a_file_in_it_is_given(files, tmp_path):
    (tmp_path / "Big-1.5B").mkdir()
    for each in (files / "tiny").iterdir():
        (tmp_path / "Big-1.5B" / each.name).symlink_to(each)
    for model in ("Big-1.5B", "Big-1.5B/model.safetensors"):
        assert build_engine(str(tmp_path / model), EngineConfig(**SIZES)).model_name == "Big-1.5B"


def test_its_answers_end_at_every_id_of_the_generation_config(files, llm):
    (answer,) = llm.generate("the end", GREEDY)
    ends = answer.outputs[0].token_ids[3]
    (files / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ends]}))
    again = LLM.from_engine(build_engine(str(files / "tiny"), EngineConfig(**SIZES)))
    (files / "tiny" / "generation_config.json").unlink()
    (stopped,) = again.generate("the end", SamplingParams(temperature=0, max_tokens=12))
    expected = answer.outputs[0].token_ids.index(ends) + 1
    assert stopped.outputs[0].token_ids == answer.outputs[0].token_ids[:expected]
    assert stopped.outputs[0].finish_reason == "stop"


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path):
    tiny_model("llama").write_folder(tmp_path / "bare")
    with pytest.raises(ModelFileError, match=r"bare has no tokenizer\.json and no tokenizer\.model"):
        build_engine(str(tmp_path / "bare"), EngineConfig(**SIZES))


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path):
    folder = write_tiny_tokenizer(tiny_model("llama").write_folder(tmp_path / "small"))
    written = json.loads((folder / "tokenizer.json").read_text())
    written["model"]["vocab"]["more"] = len(written["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelFileError, match="the tokenizer has 268 tokens, but the embedding only 267 rows"):
        build_engine(str(folder), EngineConfig(**SIZES))


def test_a_gptq_folder_and_one_in_parts_answer_as_the_plain_folder_of_the_same_weights(tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    Checkpoint(config, gptq).write(tmp_path / "gptq", plain=tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "parts")
    split_folder(tmp_path / "parts")
    answers = []
    for name in ("gptq", "plain", "parts"):
        write_tiny_tokenizer(tmp_path / name)
        completions = LLM(str(tmp_path / name), **SIZES).generate(PROMPTS, GREEDY)
        answers.append([each.outputs[0].token_ids for each in completions])
    assert answers[0] == answers[1] == answers[2]


def test_a_folder_is_quantised_as_it_is_loaded(files):
    llm = LLM(str(files / "tiny"), **{**SIZES, "dtype": "auto", "quantize": "q4"})
    assert llm.engine.config.quantize == "q4"
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12


def split_folder(folder):
    """Its tensors in two files and an index."""
    weights = open_safetensors(folder).tensors
    arrays = {name: dequantize(tensor) for name, tensor in weights.items()}
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(arrays)}
    for file in set(places.values()):
        write_safetensors(folder / file, {name: arrays[name] for name in arrays if places[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def test_a_given_chat_template_takes_the_place_of_the_models_own(files, tmp_path):
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    for given in (TEMPLATE, str(tmp_path / "own.jinja")):
        (answer,) = LLM(str(files / "tiny"), chat_template=given, **SIZES).chat(HI, GREEDY)
        assert answer.prompt == "<hi there>"


def test_a_given_chat_template_with_an_error_is_refused(files):
    with pytest.raises(ModelFileError, match="error in line 1"):
        LLM(str(files / "tiny"), chat_template="{% for %}", **SIZES)
