"""The engine: requests in, steps turned, text out. Synchronous and owned by one thread."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub

from millpond.config import EngineConfig
from millpond.core.invariants import Auditor
from millpond.core.pace import StepPrices
from millpond.core.request import FinishReason, Request
from millpond.core.sampling import SEED_BITS, SEEDS, SamplingParams
from millpond.core.scheduler import RequestUpdate, Scheduler
from millpond.core.step import Clock, RequestScores, Runner, SchedulerOutput, StepResult, StepStats
from millpond.engine.answer import Answer
from millpond.engine.limits import RequestLimits
from millpond.engine.masks import token_mask
from millpond.engine.metrics import EngineMetrics
from millpond.engine.outputs import RequestOutput
from millpond.engine.timelines import Timelines
from millpond.errors import InvalidRequestError
from millpond.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Turns one step after another over a scheduler and a runner.

    config is what the engine was built with, its open sizes filled in. vocab_size bounds the token ids that
    may be sent and sampled. embedding_size is that of a model that is made for embeddings, 0 of any other. observer is
    called with the numbers of every step, in the thread that steps; metrics and timelines, where they are set, keep
    what becomes of requests. prices are learned from what steps take. admitted are the ids that the last step admitted,
    for the first time or again.
    Raises ModelFileError for a chat template that does not compile.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        model_name: str,
        vocab_size: int,
        clock: Clock = time.monotonic,
        observer: Callable[[StepStats], None] | None = None,
        embedding_size: int = 0,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.make_chat_template()
        self.model_name = model_name
        self.limits = RequestLimits(vocab_size, scheduler.door, tokenizer.eos_token_ids, config.policy, embedding_size)
        self.observer = observer
        self.metrics: EngineMetrics | None = None
        self.timelines: Timelines | None = None
        self.admitted: tuple[str, ...] = ()
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._auditor = self._new_auditor()
        self.prices = StepPrices()
        self._answers: dict[str, Answer] = {}
        self._counted = scheduler.counters.of_prefixes
        # Who has a slot as far as the runner knows, and who of them has left it without the runner's hearing of it.
        self._seated: set[str] = set()
        self._unheard: tuple[str, ...] = ()

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do: tokens to compute, or blocks to give back."""
        return self.scheduler.has_work

    def now(self) -> float:
        """Seconds of the clock that steps and requests are timed by."""
        return self._clock()

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """The requests that have still to be answered, oldest first."""
        return tuple(self._answers)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrived: float | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        """Queue a request. Raises InvalidRequestError, naming the field, for whatever could not be served.

        An id is in use until the step after its end, which gives its blocks back. arrived is when it came, by the
        engine's clock, where that is not now. priority and tenant are for the policy.
        """
        if request_id in self._answers:
            raise InvalidRequestError(f"request id {request_id!r} is already in use", "request_id")
        if sampling.n != 1:
            raise InvalidRequestError(f"an engine's request is one answer, but n is {sampling.n}", "n")
        max_tokens = self.limits.check(prompt_token_ids, sampling)
        self.limits.check_priority(priority)
        ends = self.limits.end_token_ids(sampling)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=ends,
            seed=self._seeds.getrandbits(SEED_BITS) if sampling.seed is None else sampling.seed % SEEDS,
            mask=token_mask(sampling, ends, self.tokenizer),
            # The log probabilities of a prompt are those of all its positions, found or not.
            reads_prefix_cache=sampling.prompt_logprobs is None,
            priority=priority,
            tenant=tenant,
        )
        answer = Answer(request, self.tokenizer)
        self.scheduler.add_request(request)
        self._answers[request_id] = answer
        if self.metrics is not None or self.timelines is not None:
            arrived = self._clock() if arrived is None else arrived
            if self.metrics is not None:
                self.metrics.add(request_id, arrived)
            if self.timelines is not None:
                self.timelines.add(request, arrived)

    def abort(self, request_id: str, cause: str | None = None) -> None:
        """End a request in any state, with no further output; cause is for its timeline. One that is unknown or has
        ended is left alone."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return
        self.scheduler.abort(request_id)
        if self.metrics is not None:
            self.metrics.abort(answer.request, self._clock())
        if self.timelines is not None:
            self.timelines.end(answer.request, self.scheduler.counters.iterations, self._clock(), cause)

    def abort_all(self) -> None:
        """End everything and give every block and slot back, without another forward.

        Safe after a step that an exception left half done: what it had scheduled is ended with the rest.
        """
        for request_id in list(self._answers):
            self.abort(request_id)
        self._tell_later(self.scheduler.release_finished())
        # The old one has seen requests that no step released.
        self._auditor = self._new_auditor()

    def close(self) -> None:
        """Let what is kept on disk be written to its end. For an engine that takes no step any more."""
        if self.scheduler.disk is not None:
            self.scheduler.disk.close()

    @property
    def num_unwritten(self) -> int:
        """Blocks that are to be kept on disk and are not there yet."""
        return 0 if self.scheduler.disk is None else self.scheduler.disk.num_unwritten

    def _new_auditor(self) -> Auditor | None:
        return Auditor(self.scheduler) if self.config.audit else None

    def step(self) -> list[RequestOutput]:
        """One step: schedule, forward, update, text. Returns what it gave each request, in their order."""
        started = self._clock()
        plan = self.scheduler.schedule(self._prefill_budget())
        self.admitted = plan.admitted
        if self._auditor is not None:
            self._auditor.after_schedule(plan)
        if self.timelines is not None:
            self.timelines.begin(plan, started)
        scheduled = self._clock()
        result = self._execute(plan)
        executed = self._clock()
        _note(self.prices, plan, executed - started)
        updates = () if result is None else self.scheduler.update(result)
        updated = self._clock()
        if result is not None and result.scores:
            self._note(result.scores)
        outputs = self._fail(plan) if result is None else [self._output(update) for update in updates]
        if self._auditor is not None:
            self._auditor.after_update(result or StepResult(()))
        if self.timelines is not None:
            self.timelines.step(plan.step, self._clock())
        if self.observer is not None or self.metrics is not None:
            ended = self._clock()
            times = (scheduled - started, executed - scheduled, updated - executed, ended - updated)
            stats = self._stats(plan, result or StepResult(()), times)
            if self.metrics is not None:
                self.metrics.step(stats, plan.admitted, outputs, started, ended)
            if self.observer is not None:
                self.observer(stats)
        return outputs

    def _prefill_budget(self) -> int | None:
        target = self.config.itl_target
        return None if target is None else self.prices.prefill_budget(self.scheduler.num_decoding, target / 1000)

    def _execute(self, plan: SchedulerOutput) -> StepResult | None:
        """The forward of a step, None where it failed. A failed forward ends the requests in it, not the engine."""
        if not plan.scheduled:
            self._tell_later(plan.released + plan.preempted)
            return StepResult(())
        if self._unheard:
            plan = replace(plan, released=self._unheard + plan.released)
        self._seated.update(plan.admitted)
        try:
            result = self.runner.execute(plan)
        except Exception:
            # Whether the runner came so far as to hear who has left, nobody knows.
            self._unheard = ()
            self._tell_later(plan.released + plan.preempted)
            request_ids = ", ".join([each.request_id for each in plan.scheduled])
            logger.exception(
                "step %d failed; its %d requests end with an error: %s", plan.step, len(plan.scheduled), request_ids
            )
            return None
        self._unheard = ()
        self._seated.difference_update(plan.released)
        return result

    def _tell_later(self, request_ids: tuple[str, ...]) -> None:
        """Have the next forward's plan name these as released: the runner keeps what is special about a slot until it
        hears that its request is gone. Those that never had a slot might be many, and are nothing to it."""
        self._unheard += tuple([request_id for request_id in request_ids if request_id in self._seated])

    def _note(self, scores: Sequence[RequestScores]) -> None:
        for each in scores:
            if (answer := self._answers.get(each.request_id)) is not None:
                answer.note(each)

    def _fail(self, plan: SchedulerOutput) -> list[RequestOutput]:
        request_ids = [each.request_id for each in plan.scheduled]
        self.scheduler.fail(request_ids, "the forward pass of this step failed")
        return [self._ended(self._answers[request_id]) for request_id in request_ids]

    def _output(self, update: RequestUpdate) -> RequestOutput:
        request, token_ids, _ = update
        answer = self._answers[request.request_id]
        if not token_ids:
            return self._ended(answer)
        if len(token_ids) == 1:  # as in nearly every step, and once for each of its requests
            text = self._text_of_one(answer, token_ids[0], request.finish_reason)
        else:
            num_tokens, text = self._text(answer, token_ids)
            if num_tokens < len(token_ids):
                self.scheduler.drop(request.request_id, len(token_ids) - num_tokens)
                token_ids = token_ids[:num_tokens]
        if answer.stopped and request.finish_reason is not FinishReason.STOP:
            self.scheduler.finish(request.request_id, FinishReason.STOP)
        if request.finish_reason is not None:
            del self._answers[request.request_id]
        return answer.output(token_ids, text)

    def _text(self, answer: Answer, token_ids: tuple[int, ...]) -> tuple[int, str]:
        """The text of a step's tokens, and how many of them there are up to the one that ends the answer."""
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            is_last = count == len(token_ids)
            text += self._text_of_one(answer, token_id, answer.request.finish_reason if is_last else None)
            if answer.stopped or answer.request.error is not None:
                return count, text
        return len(token_ids), text

    def _text_of_one(self, answer: Answer, token_id: int, reason: FinishReason | None) -> str:
        """The text of one token. A fault in making it ends this request with an error, and no other."""
        request = answer.request
        try:
            return answer.push(token_id, reason)
        except Exception:
            logger.exception("the text of request %s could not be made", request.request_id)
            message = "the text of this answer could not be made"
            self.scheduler.fail([request.request_id], message)
            request.finish_reason, request.error = FinishReason.ERROR, message
            return ""

    def _ended(self, answer: Answer) -> RequestOutput:
        del self._answers[answer.request.request_id]
        return answer.output((), answer.finish())

    def _stats(self, plan: SchedulerOutput, result: StepResult, times: tuple[float, float, float, float]) -> StepStats:
        num_sampled = result.num_tokens
        counted, self._counted = self._counted, self.scheduler.counters.of_prefixes
        num_queried, num_hit, num_resumed_hit, num_recomputed = map(sub, self._counted, counted)
        drafts = [] if self.scheduler.drafter is None else [each.num_drafts for each in plan.scheduled]
        return StepStats(
            step=plan.step,
            num_scheduled=len(plan.scheduled),
            num_tokens=plan.num_tokens,
            num_sampled=num_sampled,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            free_blocks=self.scheduler.pool.num_free,
            num_blocks=self.scheduler.pool.num_blocks,
            num_preempted=len(plan.preempted),
            schedule_seconds=times[0],
            execute_seconds=times[1],
            update_seconds=times[2],
            text_seconds=times[3],
            times=result.times,
            num_drafted=sum(drafts),
            num_accepted=num_sampled - len(result.sampled),
            audited=self._auditor is not None,
            num_queried=num_queried,
            num_hit=num_hit,
            num_resumed_hit=num_resumed_hit,
            num_recomputed=num_recomputed,
        )


def _note(prices: StepPrices, plan: SchedulerOutput, seconds: float) -> None:
    """Tell the rows of a step that decode, guesses among them, from the tokens of prompts."""
    rows = [each for each in plan.scheduled if each.output_position and len(each.token_ids) == 1 + each.num_drafts]
    num_rows = sum(len(each.token_ids) for each in rows)
    prices.note(num_rows, plan.num_tokens - num_rows, seconds)
