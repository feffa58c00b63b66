"""Request fields that are not supported yet, each with the values that change nothing and so may be sent.

Anything that would change the answer is honoured or refused by name; nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.text.checks import check_unicode

_BOTH: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}

COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
    "top_logprobs": (),
}

CHAT: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "echo": (False,),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True,),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "documents": ([],),
    "chat_template": (),
    "add_special_tokens": (False,),
    "mm_processor_kwargs": (),
    "include_reasoning": (True,),
}

EMBEDDING: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "normalize": (True,),
    "messages": (),
    "input_type": (),
}

# A message that an OpenAI client got from a server and sends back carries these, mostly null.
MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": (),
    "reasoning": (),
}

STREAM_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "include_obfuscation": (False,),
}

# What /v1/messages knows, with its token counts; and the fields that only a call for an answer has.
ANTHROPIC: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"},),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "context_management": (),
    "output_config": ({},),
    "output_format": (),
    "speed": ("standard",),
}

ANTHROPIC_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
}

TEXT_BLOCK: Mapping[str, tuple[Any, ...]] = {"citations": ([],)}
TOOL_USE_BLOCK: Mapping[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "toolset_name": ()}
TOOL_RESULT_BLOCK: Mapping[str, tuple[Any, ...]] = {"is_error": (False,), "toolset_name": ()}

RESPONSES: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "store": (False,),
    "background": (False,),
    "background_options": (),
    "include": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "max_tool_calls": (),
    "reasoning": ({}, {"effort": "none"}),
    "prompt": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "service_tier": ("auto", "default"),
    "context_management": ([],),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "24h"),
}

RESPONSES_TEXT: Mapping[str, tuple[Any, ...]] = {"format": ({"type": "text"},), "verbosity": ("medium",)}
RESPONSES_PART: Mapping[str, tuple[Any, ...]] = {"annotations": ([],), "logprobs": ([],)}
RESPONSES_MESSAGE: Mapping[str, tuple[Any, ...]] = {"phase": ()}


def keep_supported(
    body: Mapping[str, Any], supported: Collection[str], refused: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> dict[str, Any]:
    """A JSON object without the fields that are known and change nothing; InvalidRequestError names the first that
    would change something and cannot be served, and text that could not be sent back. What is not known stays."""
    kept = {}
    for name, value in body.items():
        path = f"{prefix}{name[:100]}"
        check_unicode(name, path)
        if isinstance(value, str):
            check_unicode(value, path)
        if name in supported or name not in refused:
            kept[name] = value
        elif not _is_neutral(value, refused[name]):
            raise InvalidRequestError(f"{path} is not supported yet; {_remedy(refused[name])}", path)
    return kept


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # 1 == True in Python, and a client that sends `n: true` should hear of it.
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _remedy(neutral: tuple[Any, ...]) -> str:
    return f"leave it out or set it to {' or '.join(map(json.dumps, neutral))}" if neutral else "leave it out"
