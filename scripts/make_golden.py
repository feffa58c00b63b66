"""Make the golden files of tests/golden from the demo model's GGUF file, with torch and transformers.

python -m venv .venv-reference && .venv-reference/bin/pip install -e '.[reference]'
.venv-reference/bin/python scripts/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from reference import golden, transformers_llama

NUM_GREEDY_TOKENS = 64
NUM_TEXT_TOKENS = 2000
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the demo model's file")
    path = parser.parse_args().gguf
    tokenizer = tokenizer_of(transformers_llama.read_metadata(gguf.GGUFReader(path)))
    model = transformers_llama.load_reference(path)
    prompts = json.loads(golden.TEXTS_FILE.read_text(encoding="utf-8"))
    golden.save_prompts([prompt_golden(model, tokenizer, prompt) for prompt in prompts])
    golden.save_text(text_golden(model, tokenizer))
    for file in (golden.PROMPTS_FILE, golden.TEXT_FILE):
        print(f"{file.name}: {file.stat().st_size:,} bytes")


def prompt_golden(model, tokenizer: Tokenizer, prompt: dict[str, str]) -> golden.PromptGolden:
    token_ids = tokenizer.encode(prompt["text"]).ids
    logits = transformers_llama.logits_of(model, token_ids)
    greedy, margins = transformers_llama.greedy_of(model, token_ids, NUM_GREEDY_TOKENS)
    print(f"{prompt['name']}: {len(token_ids)} tokens, least greedy margin {margins.min():.4f}")
    print(f"    {tokenizer.decode(greedy, skip_special_tokens=False)!r}")
    return golden.PromptGolden(
        name=prompt["name"],
        token_ids=np.array(token_ids, np.int32),
        greedy_token_ids=np.array(greedy, np.int32),
        greedy_margins=margins,
        **golden.fingerprint(logits),
    )


def text_golden(model, tokenizer: Tokenizer) -> golden.TextGolden:
    token_ids = tokenizer.encode((golden.FOLDER / "text.txt").read_text(encoding="utf-8")).ids
    if len(token_ids) < NUM_TEXT_TOKENS:
        raise SystemExit(f"text.txt has {len(token_ids)} tokens, {NUM_TEXT_TOKENS} are needed")
    token_ids = token_ids[:NUM_TEXT_TOKENS]
    logits = transformers_llama.logits_of(model, token_ids)
    result = golden.coarsen(np.array(token_ids, np.int32), logits)
    print(f"text: {len(token_ids)} tokens, perplexity {np.exp(result.nll.mean()):.3f}, ", end="")
    print(f"mean probability outside the kept classes {np.exp(result.rest_logprob).mean():.4f}")
    return result


def tokenizer_of(metadata: dict) -> Tokenizer:
    """SmolLM's byte-level BPE, digits one by one, from the file's own tables."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


if __name__ == "__main__":
    main()
