"""`millpond eval` on a tiny model of random weights, held to the logits of the model alone."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

from millpond.build import build_model_runner
from millpond.cli.app import run
from millpond.cli.eval_perplexity import as_line, read_text
from millpond.config import EngineConfig
from millpond.lab.evaluation import text_tokens
from millpond.load.gguf import open_gguf
from millpond.runner.logits_file import counted, open_logits_file
from millpond.text.tokenizer import Tokenizer
from tiny_llama import write_tiny_llama

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
CONTEXT = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    write_tiny_llama(folder / "tiny.gguf", head_dim=32, tied=False, types={"*": "Q8_0"})
    (folder / "empty.txt").write_bytes(b"\n")
    (folder / "text.txt").write_text(TEXT + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def windows(folder):
    token_ids = text_tokens(Tokenizer.from_gguf(open_gguf(folder / "tiny.gguf").metadata), TEXT)
    return [token_ids[start : start + CONTEXT] for start in range(0, len(token_ids) - CONTEXT + 1, CONTEXT)]


def logprobs_of(folder, windows, dtype="auto"):
    """Of every token that counts and of all others in its place, float64 [tokens, vocab], and the tokens."""
    config = EngineConfig(dtype=dtype, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, threads=1)
    runner = build_model_runner(folder / "tiny.gguf", config)
    logits = np.concatenate([runner.logits(window)[CONTEXT // 2 : -1] for window in windows]).astype(np.float64)
    tokens = np.concatenate([window[CONTEXT // 2 + 1 :] for window in windows])
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), tokens


def command(capsys, folder, *arguments):
    """What a call prints as JSON; model and text are those of the folder."""
    common = ["--model", str(folder / "tiny.gguf"), "--threads", "1", "--json"]
    assert run(["eval", *arguments, *common], {}) == 0
    return json.loads(capsys.readouterr().out)


def test_the_perplexity_is_that_of_the_models_logits(capsys, folder, windows):
    told = command(capsys, folder, "perplexity", str(folder / "text.txt"), "--context", str(CONTEXT))
    logprobs, tokens = logprobs_of(folder, windows)
    surprise = -logprobs[np.arange(len(tokens)), tokens]
    assert told["perplexity"] == pytest.approx(math.exp(surprise.mean()), rel=1e-5)
    error = math.exp(surprise.mean()) * surprise.std() / math.sqrt(len(tokens) - 1)
    assert told["error"] == pytest.approx(error, rel=1e-4)
    assert (told["num_tokens"], told["windows"], told["context"]) == (len(tokens), len(windows), CONTEXT)


def test_one_window_can_be_looked_at_alone(capsys, folder, windows):
    path = str(folder / "text.txt")
    told = command(capsys, folder, "perplexity", path, "--context", str(CONTEXT), "--windows", "1")
    logprobs, tokens = logprobs_of(folder, windows[:1])
    assert told["perplexity"] == pytest.approx(math.exp(-logprobs[np.arange(len(tokens)), tokens].mean()), rel=1e-5)


def test_a_stride_counts_the_last_tokens_of_every_window(capsys, folder):
    path = str(folder / "text.txt")
    told = command(capsys, folder, "perplexity", path, "--context", str(CONTEXT), "--stride", "8")
    assert (told["stride"], told["num_tokens"]) == (8, 8 * told["windows"])


def test_the_divergence_from_float32_is_that_of_the_two_models_logits(capsys, folder, windows):
    told = command(capsys, folder, "kl", str(folder / "text.txt"), "--context", str(CONTEXT))
    (ours, tokens), (base, _) = logprobs_of(folder, windows), logprobs_of(folder, windows, "float32")
    divergences = (np.exp(base) * (base - ours)).sum(axis=1)
    assert divergences.mean() > 1e-5
    rounding = {"rel": 0.02, "abs": 1e-5}  # a reference keeps 16 bits of a log probability
    assert told["kl"]["mean"] == pytest.approx(divergences.mean(), **rounding)
    assert told["kl"]["max"] == pytest.approx(divergences.max(), **rounding)
    assert told["same_top"]["mean"] == np.mean(ours.argmax(axis=1) == base.argmax(axis=1))
    places = np.arange(len(tokens)), tokens
    assert told["perplexity"]["perplexity"] == pytest.approx(math.exp(-ours[places].mean()), rel=1e-5)
    assert told["reference_perplexity"]["perplexity"] == pytest.approx(math.exp(-base[places].mean()), rel=1e-4)
    ratio = math.exp((base[places] - ours[places]).mean())
    assert told["perplexity_ratio"]["perplexity"] == pytest.approx(ratio, rel=1e-4)
    how = {"dtype": "float32", "kv_dtype": "auto", "quantize": "off"}
    assert told["reference"] == {"model": str(folder / "tiny.gguf"), **how}


def test_saved_log_probabilities_stand_for_the_reference(capsys, folder, windows):
    path, saved = str(folder / "text.txt"), str(folder / "reference.kld")
    flags = ["--context", str(CONTEXT), "--dtype", "float32", "--save-logits", saved]
    base = command(capsys, folder, "perplexity", path, *flags)
    file = open_logits_file(folder / "reference.kld")
    assert (file.windows, file.rows.shape[1]) == (windows, len(counted(CONTEXT)))
    told = command(capsys, folder, "kl", "--reference", saved)
    assert told["reference_perplexity"]["perplexity"] == pytest.approx(base["perplexity"], rel=1e-4)
    assert told["reference"] == {"file": "reference.kld"}
    live = command(capsys, folder, "kl", path, "--context", str(CONTEXT))
    assert told["kl"] == live["kl"]
    few = command(capsys, folder, "kl", "--reference", saved, "--windows", "2")
    assert (few["windows"], few["tokens"]) == (2, 2 * len(counted(CONTEXT)))
    itself = command(capsys, folder, "kl", "--reference", saved, "--dtype", "float32")
    assert itself["kl"]["max"] < 1e-5


def test_without_json_the_figures_are_a_table(capsys, folder):
    common = ["--model", str(folder / "tiny.gguf"), "--threads", "1", "--context", str(CONTEXT)]
    assert run(["eval", "kl", str(folder / "text.txt"), *common], {}) == 0
    out, err = capsys.readouterr()
    assert "KL, mean" in out
    assert f"windows of {CONTEXT}, their second halves" in err
    assert run(["eval", "perplexity", str(folder / "text.txt"), *common], {}) == 0
    assert capsys.readouterr().out.startswith("perplexity ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["perplexity", "{text}", "--context", "511"], "the text has"),
        (["perplexity", "{text}", "--stride", "8", "--save-logits", "{folder}/x"], "leave out --stride or"),
        (["perplexity", "{text}", "--context=32", "--max-model-len=32", "--save-logits={folder}/x"], "at most 31"),
        (["perplexity", "{text}", "--context=1000000000000"], "the context can be at most"),
        (["perplexity", "{folder}/none.txt"], "TEXT cannot be read: "),
        (["perplexity", "{folder}"], "Is a directory"),
        (["perplexity", "{folder}/empty.txt"], "TEXT is empty"),
        (["kl", "--reference", "{folder}/none.kld"], "--reference cannot be read: "),
        (["kl", "--reference", "{folder}"], "Is a directory"),
        (["perplexity", "{folder}/tiny.gguf"], "not a text in UTF-8"),
        (["kl"], "give a TEXT, or a --reference"),
        (["kl", "{text}", "--dtype", "float32"], "the model and its reference are the same"),
        (["kl", "{text}", "--reference", "{text}"], "give no other"),
        (["kl", "--reference", "{text}"], "does not begin with _logits_"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(capsys, folder, arguments, said):
    places = {"folder": folder, "text": folder / "text.txt"}
    common = ["--model", str(folder / "tiny.gguf"), "--threads", "1"]
    assert run(["eval", *(each.format(**places) for each in arguments), *common], {}) == 1
    assert said in capsys.readouterr().err
    assert not list(folder.glob("x*"))


@pytest.mark.parametrize(
    "option",
    [
        ["--reference-model", "smollm2"],
        ["--reference-dtype", "auto"],
        ["--reference-kv-dtype", "int8"],
        ["--context", "32"],
        ["--context", "512"],
    ],
    ids=" ".join,
)
def test_beside_a_file_an_option_that_describes_another_reference_is_wrong_usage(capsys, folder, option):
    arguments = ["eval", "kl", "--reference", str(folder / "none.kld"), "--model", str(folder / "tiny.gguf"), *option]
    assert run(arguments, {}) == 2
    assert f"'{option[0]}': it is not used with --reference" in capsys.readouterr().err


def test_a_reference_of_another_vocabulary_is_refused_with_both_numbers(capsys, folder, windows):
    from millpond.runner.logits_file import create_logits_file

    file = create_logits_file(folder / "other.kld", windows, 300)
    for window in range(len(windows)):
        file.put(window, CONTEXT // 2, np.zeros((CONTEXT // 2, 300), np.float32))
    file.flush()
    arguments = ["eval", "kl", "--reference", str(folder / "other.kld"), "--model", str(folder / "tiny.gguf")]
    assert run(arguments, {}) == 1
    assert "a vocabulary of 300 tokens and the model one of 267" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ([0, 1e30], "its lowest log probability 1e+30"),
        ([np.nan, -16], "its step is nan"),
        ([0, 0], "its probabilities sum to 267, not to 1"),
    ],
)
def test_a_reference_with_a_damaged_row_is_refused_before_a_model_is_loaded(capsys, folder, windows, figures, said):
    from millpond.runner.logits_file import create_logits_file

    file = create_logits_file(folder / "damaged.kld", windows, 267)
    for window in range(len(windows)):
        file.put(window, CONTEXT // 2, np.zeros((CONTEXT // 2, 267), np.float32))
    file.rows[1, 3, :4] = np.float32(figures).view(np.uint16)
    file.flush()
    arguments = ["eval", "kl", "--reference", str(folder / "damaged.kld"), "--model", "no/such:model.gguf"]
    assert run(arguments, {}) == 1
    error = capsys.readouterr().err
    assert "damaged.kld: row 3 of window 1 is damaged" in error
    assert said in error


def test_what_is_infinite_is_null_in_json():
    told = json.loads(as_line({"perplexity": math.inf, "kl": {"mean": math.nan, "max": 0.5}, "windows": 2}))
    assert told == {"perplexity": None, "kl": {"mean": None, "max": 0.5}, "windows": 2}


def test_standard_input_is_read_as_a_file_is(tmp_path, monkeypatch):
    content = "caf\u00e9\r\nau lait\r\n".encode()
    (tmp_path / "text.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))
    assert read_text("-") == read_text(str(tmp_path / "text.txt")) == "caf\u00e9\r\nau lait\r"


def test_a_model_too_short_for_the_usual_windows_has_shorter_ones(capsys, folder):
    arguments = ["eval", "perplexity", str(folder / "text.txt"), "--model", str(folder / "tiny.gguf"), "--threads=1"]
    assert run([*arguments, "--max-model-len", "32", "--json"], {}) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["context"] == 31
    assert "windows of 31 tokens, not 512: the model takes 32 at most" in told.err
