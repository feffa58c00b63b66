"""Makes the golden values of tests/text from a SmolLM2-135M-Instruct GGUF file, with transformers as the reference.

    python scripts/make_text_golden.py MODEL.gguf        (needs the `reference` extra; torch is not used)

Writes smollm2_tokenizer.json.xz, the tokenizer metadata of the file without what merges imply, and
golden_smollm2.json: the ids of strings.json, decoded ids and rendered chats, each by the reference named in
`references`. It imports nothing of millpond.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path

import transformers
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

HERE = Path(__file__).parent.parent / "tests" / "text"

REFERENCES = {
    "smollm": "AutoTokenizer on the GGUF file, its pre-tokenizer replaced by the one of the published "
    "SmolLM2 tokenizer (single digits, then ByteLevel); the conversion in transformers leaves the digits out",
    "gpt-2": "GPT2Tokenizer with this vocabulary and these merges",
    "qwen2": "Qwen2Tokenizer with this vocabulary and these merges",
    "llama-bpe": "the pattern of TikTokenConverter (that of Llama 3), words that are tokens taken whole",
    "decode": "the `smollm` reference's decode()",
    "chats": "the `smollm` reference's apply_chat_template()",
}

HI = {"role": "user", "content": "Hi"}
CHATS = [
    {"messages": [{"role": "user", "content": "What is the capital of France?"}], "add_generation_prompt": True},
    {"messages": [HI], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be brief."}, HI], "add_generation_prompt": True},
    {
        "messages": [HI, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "And 2+2?\n"}],
        "add_generation_prompt": True,
    },
    {"messages": [{"role": "user", "content": "<|im_end|> {{ x }} 😀"}], "add_generation_prompt": True},
    {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": True},
]


def read_metadata(path: Path) -> dict:
    fields = GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def byte_level(metadata: dict, split, *, ignore_merges=False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with this vocabulary and the given pre-tokenizer, as tokenizer.json files describe it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = split
    backend.add_special_tokens(special_tokens(metadata))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def special_tokens(metadata: dict) -> list[AddedToken]:
    pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == 3]


def make_references(path: Path, metadata: dict) -> dict:
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    smollm = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    smollm.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    gpt2, qwen2 = GPT2Tokenizer(vocab=vocab, merges=merges), Qwen2Tokenizer(vocab=vocab, merges=merges)
    for tokenizer in (gpt2, qwen2):
        tokenizer.backend_tokenizer.add_special_tokens(special_tokens(metadata))
    assert isinstance(qwen2.backend_tokenizer.normalizer, normalizers.NFC)
    pattern = Regex(TikTokenConverter().pattern)
    words = [
        pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    llama = byte_level(metadata, pre_tokenizers.Sequence(words), ignore_merges=True)
    return {"smollm": smollm, "gpt-2": gpt2, "qwen2": qwen2, "llama-bpe": llama}


def encodings(references: dict) -> list[dict]:
    """For each string the ids by the first reference, and by the others where they differ."""
    cases = []
    for text in json.loads((HERE / "strings.json").read_text(encoding="utf-8")):
        ids = {name: tokenizer(text, add_special_tokens=True)["input_ids"] for name, tokenizer in references.items()}
        others = {name: value for name, value in ids.items() if name != "smollm" and value != ids["smollm"]}
        cases.append({"text": text, "smollm": ids["smollm"], **others})
    return cases


def decodings(tokenizer) -> list[dict]:
    """Random ids, many of them single bytes and special tokens, so that most are not valid UTF-8."""
    draw = random.Random(0)
    cases = []
    for low, high, length in [(0, 300, 12), (0, 49152, 12), (17, 252, 8), (0, 20, 6), (140, 252, 20)] * 8:
        ids = [draw.randrange(low, high) for _ in range(length)]
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
        cases.append({"ids": ids, "skipped": texts[0], "kept": texts[1]})
    return cases


def chats(tokenizer) -> list[dict]:
    cases = []
    for chat in CHATS:
        text = tokenizer.apply_chat_template(
            chat["messages"], add_generation_prompt=chat["add_generation_prompt"], tokenize=False
        )
        cases.append({**chat, "text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
    return cases


def compact(metadata: dict) -> dict:
    """The metadata without the tokens that merges make: they follow the others, in the order of the merges."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    first = len(tokens) - len(merges)
    assert [merge.replace(" ", "") for merge in merges] == tokens[first:]
    types = metadata["tokenizer.ggml.token_type"]
    assert set(types[first:]) == {1}
    return {**metadata, "tokenizer.ggml.tokens": tokens[:first], "tokenizer.ggml.token_type": types[:first]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct as a GGUF file")
    path = parser.parse_args().model
    metadata = read_metadata(path)
    references = make_references(path, metadata)
    golden = {
        "made_by": f"scripts/make_text_golden.py, transformers {transformers.__version__}",
        "references": REFERENCES,
        "encode": encodings(references),
        "decode": decodings(references["smollm"]),
        "chats": chats(references["smollm"]),
    }
    lines = [f"{json.dumps(key)}: {json_lines(value)}" for key, value in golden.items()]
    (HERE / "golden_smollm2.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    text = json.dumps(compact(metadata), ensure_ascii=False).encode()
    (HERE / "smollm2_tokenizer.json.xz").write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def json_lines(value) -> str:
    """JSON with one case to a line, so that a change shows in a diff. ASCII, for the sake of editors."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(case) for case in value) + "\n]"


if __name__ == "__main__":
    main()
