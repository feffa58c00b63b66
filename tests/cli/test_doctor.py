from __future__ import annotations

import json

import pytest

from millpond import machine
from millpond.build import build_engine
from millpond.cli import facts
from millpond.cli.app import run
from millpond.config import EngineConfig
from millpond.kernels import isa, threads
from quantised_folders import Checkpoint, gptq
from tiny_bert import CONTEXT, HIDDEN, write_bert_folder
from tiny_llama import write_tiny_llama
from tiny_models import tiny_model, write_safetensors
from tiny_tokenizers import write_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("doctor") / "tiny.gguf"
    write_tiny_llama(
        path, types={"*attn*weight": "Q4_1", "token_embd.weight": "Q8_0"}, metadata={"general.license": "mit"}
    )
    return path


def report_of(capsys, *arguments: str) -> dict:
    assert run(["doctor", *arguments, "--json"], {}) == 0
    return json.loads(capsys.readouterr().out)


def test_it_tells_the_figures_of_the_model(model, capsys):
    told = report_of(capsys, str(model))["model"]
    assert told["name"] == "tiny llama"
    assert (told["architecture"], told["layers"], told["hidden_size"], told["ffn_size"]) == ("llama", 2, 64, 128)
    assert (told["heads"], told["kv_heads"], told["head_dim"], told["context_length"]) == (4, 2, 16, 512)
    assert told["tensor_types"] == {"Q8_0": 1, "F32": 11, "Q4_1": 8}
    assert told["size_bytes"] == model.stat().st_size
    assert (told["vocab_size"], told["chat_template"], told["licence"]) == (267, True, "mit")


def test_a_model_that_is_not_here_is_not_fetched_and_the_remedy_is_named(tmp_path, capsys):
    assert run(["doctor", "smollm2"], {"MILLPOND_CACHE": str(tmp_path)}) == 0
    assert "not here yet; fetch it with: millpond pull smollm2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lacks", "kernels", "why"),
    [
        ({"avx512bf16"}, "vnni256", "avx512 needs avx512bf16; it can run vnni256, avx2, portable"),
        ({"avx512vnni", "avxvnni"}, "avx2", "vnni256 needs avxvnni; it can run avx2, portable"),
        ({"amx-permission"}, "avx512", "amx needs amx-permission; it can run avx512, vnni256, avx2, portable"),
        (set(), "amx", "it has all they need; it can run amx, avx512, vnni256, avx2, portable"),
    ],
)
def test_it_names_the_kernels_that_a_processor_gets_and_what_it_lacks_for_better_ones(monkeypatch, lacks, kernels, why):
    features = isa.CpuFeatures("Old One", "x86_64", frozenset(isa.FEATURES) - lacks)
    monkeypatch.setattr(isa, "detect", lambda: features)
    told = {each.name: each for each in facts.processor_facts(EngineConfig())}
    assert told["name"].value == "Old One"
    assert told["kernels"].value == kernels
    assert told["kernels"].text == f"{kernels} ({why})"
    assert told["features"].value == {flag: flag not in lacks for flag in isa.FEATURES}


def test_kernels_that_were_asked_for_are_said_to_be_asked_for():
    told = {each.name: each for each in facts.processor_facts(EngineConfig(isa="portable"))}
    assert told["kernels"].text.startswith("portable (asked for")


def test_threads_are_those_that_the_engine_would_take_and_the_reason_is_shown(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_quota", lambda *_: 1.5)
    told = {each.name: each for each in facts.thread_facts(EngineConfig())}
    assert told["threads"].value == threads.thread_count(None)
    assert told["cgroup_quota_cores"].value == 1.5
    assert "cgroup quota 1.5 cores" in told["threads"].text


def test_a_thread_count_that_was_asked_for_is_said_to_be_asked_for():
    told = {each.name: each for each in facts.thread_facts(EngineConfig(threads=1))}
    assert told["threads"].text == "1 (asked for)"


@pytest.mark.slow
def test_the_pool_is_the_one_that_the_engine_would_have(model, capsys):
    arguments = ("--kv-memory", "1M", "--max-model-len", "64", "--block-size", "32", "--watermark-blocks", "3")
    told = report_of(capsys, str(model), *arguments)["pool"]
    config = EngineConfig(kv_memory=2**20, max_model_len=64, block_size=32, watermark_blocks=3, threads=1)
    engine = build_engine(str(model), config)
    scheduler = engine.scheduler
    assert told["blocks"] == scheduler.pool.num_blocks
    assert told["tokens"] == scheduler.pool.num_blocks * 32
    assert (told["block_size"], told["max_model_len"]) == (scheduler.block_size, engine.config.max_model_len)
    assert told["watermark_blocks"] == scheduler.watermark_blocks == 3
    assert told["memory_bytes"] <= 2**20


@pytest.mark.parametrize(
    ("flags", "kind", "num_bytes"),
    [
        ((), "bfloat16", 2 * 2 * 2 * 16 * 2),
        (("--dtype", "float32"), "float32", 2 * 2 * 2 * 16 * 4),
        (("--kv-dtype", "int8"), "int8", 2 * 2 * 2 * (16 + 4)),
    ],
)
def test_it_tells_what_keys_and_values_are_kept_in_and_what_a_position_takes(model, capsys, flags, kind, num_bytes):
    told = report_of(capsys, str(model), *flags, "--kv-memory", "1M")["pool"]
    assert (told["type"], told["position_bytes"]) == (kind, num_bytes)
    assert told["memory_bytes"] == told["tokens"] * num_bytes
    assert run(["doctor", str(model), *flags], {}) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["type", kind] in lines
    assert ["position", f"{num_bytes / 1024:.1f}", "KiB"] in lines


def test_a_share_that_reserves_nothing_of_a_small_pool_is_said_to_reserve_nothing(model, capsys):
    assert run(["doctor", str(model), "--kv-memory", "100K"], {}) == 0
    text = capsys.readouterr().out
    assert "0 blocks: 0.01 of the pool is less than one block; --watermark-blocks sets it in blocks" in text


def test_a_reserve_in_blocks_is_said_to_be_asked_for():
    assert facts.watermark_text(3, EngineConfig(watermark_blocks=3)) == "3 blocks held back from newcomers (asked for)"
    assert facts.watermark_text(0, EngineConfig(watermark_blocks=0)) == "0 blocks held back from newcomers (asked for)"
    assert facts.watermark_text(0, EngineConfig(watermark="auto")).startswith("chosen as requests run")
    assert facts.watermark_text(0, EngineConfig(watermark=0.0)) == "0 blocks held back from newcomers (0 of the pool)"


def test_a_folder_of_safetensors_is_told_of_too(tmp_path, capsys):
    folder = write_tiny_tokenizer(tiny_model("llama").write_folder(tmp_path / "tiny-1.5B"), eos_token="<|im_end|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    told = report_of(capsys, str(folder))["model"]
    assert (told["name"], told["vocab_size"], told["chat_template"]) == ("tiny-1.5B", 267, True)
    assert (told["tokenizer"], told["ends"]) == ("BPE, bytes (tokenizer.json)", [0, 2])
    assert run(["doctor", str(folder)], {}) == 0
    assert "<|endoftext|>, <|im_end|>" in capsys.readouterr().out


def test_a_quantised_folder_and_one_in_parts_are_told_of_with_all_their_bytes(tmp_path, capsys):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    folder = write_tiny_tokenizer(Checkpoint(config, gptq).write(tmp_path / "gptq"))
    told = report_of(capsys, str(folder))["model"]
    assert told["size_bytes"] == (folder / "model.safetensors").stat().st_size
    assert set(told["tensor_types"]) > {"BF16"}
    model = tiny_model("llama")
    parts = write_tiny_tokenizer(model.write_folder(tmp_path / "parts"))
    (parts / "model.safetensors").unlink()
    names = list(model.arrays)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        write_safetensors(parts / file, {name: model.arrays[name] for name in names if places[name] == file})
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    told = report_of(capsys, str(parts))["model"]
    assert told["size_bytes"] == sum((parts / file).stat().st_size for file in set(places.values()))


def test_memory_is_what_the_pool_would_be_sized_by(model, capsys, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 2**20)
    told = report_of(capsys, str(model))
    assert told["memory"] == {"available_bytes": 2**20}
    assert told["pool"]["memory_bytes"] <= 2**18


def test_text_has_a_heading_for_each_section_and_units(model, capsys):
    assert run(["doctor", str(model)], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and line[0] != " "] == [
        "processor", "threads", "memory", "kernel cache", "pool", "model"
    ]  # fmt: skip
    assert any(line.split() == ["block", "size", "16", "tokens"] for line in lines)


def test_as_many_slots_as_the_server_may_have_can_be_asked_about(model, capsys):
    arguments = ("--max-num-seqs", "1024", "--max-num-batched-tokens", "1024", "--kv-memory", "1M")
    assert report_of(capsys, str(model), *arguments)["pool"]["memory_bytes"] <= 2**20


def test_a_setting_that_the_engine_would_refuse_is_refused_here_too(model, capsys):
    assert run(["doctor", str(model), "--max-model-len", "9999"], {}) == 1
    assert "error: --max-model-len is 9999" in capsys.readouterr().err


def test_an_encoder_is_told_of_with_how_it_makes_embeddings(tmp_path, capsys):
    told = report_of(capsys, str(write_bert_folder(tmp_path / "tiny", "cls")))
    assert (told["model"]["architecture"], told["model"]["embeddings"]) == ("bert", "cls")
    assert told["model"]["tokenizer"] == "WordPiece, words (tokenizer.json)"
    assert (told["pool"]["max_model_len"], told["pool"]["blocks"]) == (CONTEXT, 64 + 512 // 16)
    assert run(["doctor", str(tmp_path / "tiny")], {}) == 0
    out = capsys.readouterr().out
    assert f"of length {HIDDEN}, by cls" in out
    assert "96 (decided by: a step of 512 tokens)" in out


def test_an_encoder_whose_prompts_do_not_fit_a_step_is_refused_as_the_engine_would(tmp_path, capsys):
    folder = write_bert_folder(tmp_path / "tiny")
    assert run(["doctor", str(folder), "--max-num-batched-tokens", "95", "--max-num-seqs", "8"], {}) == 1
    error = capsys.readouterr().err
    assert (
        "--max-num-batched-tokens, 95, must be at least --max-model-len, 96; raise the one or lower the other" in error
    )


def test_a_language_model_is_said_to_make_no_embeddings(model, capsys):
    assert report_of(capsys, str(model))["model"]["embeddings"] is None
