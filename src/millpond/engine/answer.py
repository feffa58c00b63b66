"""One request's answer in the making: tokens in, certain text out, and the rules that end it."""

from __future__ import annotations

from millpond.core.request import FinishReason, Request
from millpond.core.step import RequestScores, TokenScore
from millpond.engine.outputs import RequestOutput
from millpond.errors import InvariantError
from millpond.text.detokenizer import Detokenizer
from millpond.text.stop import StopStrings
from millpond.text.tokenizer import Tokenizer


class Answer:
    """The text side of one request. stopped says that a stop string was found, which ends it whatever else does."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request = request
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        # So many tokens may not end the answer; the token that makes them min_tokens may.
        self._early = sampling.min_tokens - 1
        self._scores: tuple[TokenScore, ...] = ()
        self._prompt_scores: list[TokenScore] | None = [] if sampling.prompt_logprobs is not None else None
        self._embedding: bytes | None = None
        self._is_scored = sampling.wants_scores

    @property
    def stopped(self) -> bool:
        return self._stops is not None and self._stops.stopped

    def push(self, token_id: int, reason: FinishReason | None) -> str:
        """The text that this token makes certain; one that ends the answer, for a reason, leaves nothing held back."""
        if reason is None:
            text = self._detokenizer.push_token(token_id)
            return text if self._stops is None else self._watch(self._stops, text)
        text = "" if self._is_hidden_end(reason) else self._detokenizer.push_token(token_id)
        text += self._detokenizer.finish()
        if self._stops is None:
            return text
        text = self._watch(self._stops, text)
        return text if self._stops.stopped else text + self._stops.finish()

    def _watch(self, stops: StopStrings, text: str) -> str:
        self._early -= 1
        return stops.push(text, may_stop=self._early < 0)

    def finish(self) -> str:
        """What is still held back when the answer ends without a last token, by a fault."""
        text = self._detokenizer.finish()
        return text if self._stops is None else self._stops.push(text) + self._stops.finish()

    def note(self, scores: RequestScores) -> None:
        """Keep a step's scores for its output. A prompt that is computed again after a preemption has them already."""
        self._scores, self._embedding = scores.sampled, scores.embedding
        known = self._prompt_scores
        if known is not None and scores.prompt:
            if scores.prompt_position > len(known) + 1:
                raise InvariantError(
                    f"request {self.request.request_id}: its prompt's scores go on at {scores.prompt_position}, "
                    f"but have come up to {len(known)} only"
                )
            known += scores.prompt[max(0, len(known) + 1 - scores.prompt_position) :]

    def _is_hidden_end(self, reason: FinishReason) -> bool:
        return reason is FinishReason.STOP and not self.request.sampling.include_stop_str_in_output

    def output(self, token_ids: tuple[int, ...], text: str) -> RequestOutput:
        request = self.request
        plain = RequestOutput(
            request.request_id,
            token_ids,
            text,
            request.finish_reason,
            len(request.prompt_token_ids),
            len(request.output_token_ids),
            request.error,
            num_cached_tokens=request.num_hit_tokens,
        )
        if request.error_param is not None:
            plain = plain._replace(error_param=request.error_param)
        if self._stops is not None and self._stops.stopped:
            plain = plain._replace(stop_string=self._stops.matched)
        return self._scored(plain) if self._is_scored else plain

    def _scored(self, output: RequestOutput) -> RequestOutput:
        prompt_scores = None
        if self._prompt_scores is not None and output.new_token_ids:
            prompt_scores, self._prompt_scores = tuple(self._prompt_scores), None
        scores, self._scores = self._scores[: len(output.new_token_ids)], ()
        embedding, self._embedding = self._embedding, None
        return output._replace(scores=scores, prompt_scores=prompt_scores, embedding=embedding)
