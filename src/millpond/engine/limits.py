"""What can be known of a request before it enters: numbers that never change, so any thread may check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.door import Door
from millpond.core.policies import MOST_PRIORITY
from millpond.core.sampling import SamplingParams, check_int
from millpond.errors import InvalidRequestError, shown


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """vocab_size bounds token ids; the scheduler's door bounds lengths; eos_token_ids end what does not ignore them.

    policy says whether a priority means anything. embedding_size is the length of an embedding, 0 where the model is
    not made for any.
    """

    vocab_size: int
    door: Door
    eos_token_ids: frozenset[int] = frozenset()
    policy: str = "fcfs"
    embedding_size: int = 0

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens that a prompt may have that gets one token."""
        return self.door.max_tokens_that_fit(1)

    @property
    def max_total_tokens(self) -> int:
        """The most tokens that prompt and output may have together; of a model that generates nothing, the prompt."""
        return self.max_prompt_tokens + self.generates

    @property
    def generates(self) -> bool:
        """Whether the model has anything but embeddings to give."""
        return not self.door.whole_prompts

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """The max_tokens that the request runs with. Raises InvalidRequestError with the limit and both numbers."""
        self.check_ids(prompt_token_ids, "prompt")
        self.check_ids(sampling.stop_token_ids, "stop_token_ids")
        self.check_ids(sampling.allowed_token_ids or (), "allowed_token_ids")
        self.check_ids([token_id for token_id, _ in sampling.biases], "logit_bias")
        if sampling.embedding:
            self._check_embeds()
        else:
            self.check_generates()
        if not self.generates and (sampling.logprobs, sampling.prompt_logprobs) != (None, None):
            raise InvalidRequestError("a model that makes embeddings alone has no log probabilities", "logprobs")
        length, max_tokens = len(prompt_token_ids), sampling.max_tokens
        if max_tokens is None:
            max_tokens = self.door.max_tokens_that_fit(length)
        self.door.check(length, max_tokens)
        self._check_minimum(sampling, max_tokens)
        return max_tokens

    def check_generates(self) -> None:
        """Raise InvalidRequestError for a model that makes embeddings alone."""
        if not self.generates:
            raise InvalidRequestError(
                "this model makes embeddings and generates no text: send the text to /v1/embeddings, or in Python to "
                "LLM.embed, or serve a language model",
                "model",
            )

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequestError for more numbers of an embedding than it has; None is all of them."""
        self._check_embeds()
        if dimensions is not None:
            check_int("dimensions", dimensions, 1, self.embedding_size)

    def check_priority(self, priority: int) -> None:
        """Raise InvalidRequestError for a priority out of bounds, or one that would be ignored."""
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
            raise InvalidRequestError(
                f"priority must be from {-MOST_PRIORITY} to {MOST_PRIORITY}, got {shown(priority)}", "priority"
            )
        if priority and self.policy != "priority":
            raise InvalidRequestError(
                f"priority {priority} would change nothing: the policy here is {self.policy}, and priorities take "
                f"--policy priority; leave it out or set it to 0",
                "priority",
            )

    def check_tenant(self, tenant: str) -> None:
        """Raise InvalidRequestError for a tenant that would be ignored: for callers who mean nothing else by it."""
        if tenant and self.policy != "fair":
            raise InvalidRequestError(
                f"tenant {shown(tenant)} would change nothing: the policy here is {self.policy}, and tenants take "
                f"--policy fair; leave it out",
                "tenant",
            )

    def end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer."""
        ends = frozenset() if sampling.ignore_eos else self.eos_token_ids
        return ends.union(sampling.stop_token_ids)

    def _check_embeds(self) -> None:
        if not self.embedding_size:
            raise InvalidRequestError("this is a language model and makes no embeddings", "embedding")

    def _check_minimum(self, sampling: SamplingParams, max_tokens: int) -> None:
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {sampling.min_tokens}, but at most {max_tokens} tokens have room behind this prompt",
                "min_tokens",
            )
        allowed = sampling.allowed_token_ids if sampling.min_tokens else None
        if allowed and self.end_token_ids(sampling).issuperset(allowed):
            raise InvalidRequestError(
                f"allowed_token_ids holds only tokens that end the answer, and min_tokens is {sampling.min_tokens}",
                "allowed_token_ids",
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        # map, min and max run in C: a long prompt is checked without a loop in Python.
        if strange := set(map(type, token_ids)) - {int}:
            bad = next(each for each in token_ids if type(each) in strange)
            raise InvalidRequestError(f"{param} must hold token ids, which are whole numbers; got {shown(bad)}", param)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            outside = next(each for each in token_ids if not 0 <= each < self.vocab_size)
            raise InvalidRequestError(
                f"{param} holds token id {outside}, but ids run from 0 to {self.vocab_size - 1}", param
            )
