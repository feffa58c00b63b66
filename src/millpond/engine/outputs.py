"""What one step gives one request."""

from __future__ import annotations

from typing import NamedTuple

from millpond.core.request import FinishReason
from millpond.core.step import TokenScore


class RequestOutput(NamedTuple):
    """New tokens of a request and the text that is certain now; both may be empty.

    text is what came to the answer in this step: the texts of all steps join to the whole answer.
    num_output_tokens counts every generated token so far, with an end token whose text is not shown.
    error is set with finish_reason `error`, and only then. scores are those of new_token_ids where the request asks for
    logprobs; prompt_scores, those of all the prompt's tokens but the first, come with the first new token.
    stop_string is the one that ended the answer, where one did. num_cached_tokens of the prompt were found in the
    prefix cache. error_param names the field of the request that is to blame for its error, where one is. embedding is
    the prompt's, as little-endian float32, and comes with the first new token.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None = None
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] | None = None
    stop_string: str | None = None
    num_cached_tokens: int = 0
    error_param: str | None = None
    embedding: bytes | None = None
