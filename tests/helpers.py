"""What the tests share: a runner with no model that still reads and writes K/V through the block tables."""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.invariants import Auditor
from millpond.core.request import Request
from millpond.core.scheduler import RequestUpdate, Scheduler
from millpond.core.speculation import Drafter, StepLoad
from millpond.core.step import (
    Admission,
    RequestFault,
    RequestScores,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    TokenScore,
)

DEFAULT_TOKENS = range(100, 1000)


def next_token(token_ids: Iterable[int], tokens: range = DEFAULT_TOKENS) -> int:
    """The token that the scripted model puts after token_ids: a hash of all of them, so that any slip shows."""
    return tokens[zlib.crc32(array("q", token_ids).tobytes()) % len(tokens)]


def expected_output(prompt: Sequence[int], num_tokens: int, tokens: range = DEFAULT_TOKENS) -> list[int]:
    """What the scripted model answers to a prompt that runs alone, with no scheduler and no blocks."""
    sequence = list(prompt)
    for _ in range(num_tokens):
        sequence.append(next_token(sequence, tokens))
    return sequence[len(prompt) :]


def scripted_score(token_id: int, num_top: int) -> TokenScore:
    """The score that the scripted model gives a token, whatever stands before it."""
    top = tuple((other, -1 / (2 + other)) for other in range(num_top))
    return TokenScore(token_id, -1 / (2 + token_id), 1 + token_id, top)


def scripted_embedding(token_ids: Sequence[int]) -> bytes:
    """The embedding that the scripted model makes: four numbers of length 1, others for other tokens."""
    first = 0.1 + (sum(token_ids) % 7) / 10
    return struct.pack("<4f", first, -math.sqrt(1 - first**2 - 0.05), 0.1, 0.2)


class ScriptedRunner:
    """A Runner whose K/V is the token itself, kept by block: a stale, shared or lost block changes the answer.

    script gives the tokens of a request by output position; past its end, and for other requests, the token is
    next_token of everything read back through the block table. faults maps a request id to the output
    position at which it faults. raises maps the number of a call (from 0) to the exception it raises.
    """

    def __init__(
        self,
        *,
        block_size: int,
        tokens: range = DEFAULT_TOKENS,
        script: Mapping[str, Sequence[int]] | None = None,
        faults: Mapping[str, int] | None = None,
        raises: Mapping[int, Exception] | None = None,
    ) -> None:
        self.block_size = block_size
        self.tokens = tokens
        self.script = dict(script or {})
        self.faults = dict(faults or {})
        self.raises = dict(raises or {})
        self.outputs: list[SchedulerOutput] = []
        self.admissions: list[tuple[int, str, Admission]] = []
        self.slot_owners: dict[int, str] = {}
        self._admission_of: dict[int, Admission] = {}
        self._kv: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput) -> StepResult:
        call = len(self.outputs)
        self.outputs.append(output)
        if call in self.raises:
            raise self.raises[call]
        sampled: list[SampledTokens] = []
        faults: list[RequestFault] = []
        for load in output.loads:
            for offset, token_id in enumerate(array("q", bytes(load.data))):
                self._kv[load.block_id, offset] = token_id
        for each in output.scheduled:
            self._take_slot(each)
        for each in output.scheduled:
            self._write(each)
        for each in output.scheduled:
            if not each.samples:
                continue
            if self.faults.get(each.request_id) == each.output_position:
                faults.append(RequestFault(each.request_id, "the logits are not finite"))
            else:
                sampled.append(SampledTokens(each.request_id, self._sample(each)))
        tokens_of = dict(sampled)
        scores = (self._scores(each, tokens_of.get(each.request_id, ())) for each in output.scheduled)
        return StepResult(tuple(sampled), tuple(faults), scores=tuple(each for each in scores if each is not None))

    @property
    def block_bytes(self) -> int:
        return 8 * self.block_size

    def read_block(self, block_id: int, into: memoryview) -> None:
        tokens = array("q", [self._kv[block_id, offset] for offset in range(self.block_size)])
        into[:] = tokens.tobytes()

    def _scores(self, each: ScheduledRequest, token_ids: tuple[int, ...]) -> RequestScores | None:
        admission = self._admission_of[each.slot]
        num_top, of_prompt = admission.sampling.logprobs, admission.sampling.prompt_logprobs
        sampled = () if num_top is None else tuple(scripted_score(token_id, num_top) for token_id in token_ids)
        first, end = each.first_position + 1, each.first_position + len(each.token_ids) + (not each.samples)
        prompt = () if of_prompt is None else admission.prompt_token_ids[first:end]
        scored = tuple(scripted_score(token_id, of_prompt or 0) for token_id in prompt)
        embeds = admission.sampling.embedding and each.samples and not each.output_position
        embedding = scripted_embedding(admission.prompt_token_ids) if embeds else None
        return (
            RequestScores(each.request_id, sampled, first, scored, embedding) if sampled or scored or embeds else None
        )

    def _take_slot(self, each: ScheduledRequest) -> None:
        if each.admission is not None:
            self.admissions.append((each.slot, each.request_id, each.admission))
            self.slot_owners[each.slot] = each.request_id
            self._admission_of[each.slot] = each.admission
        owner = self.slot_owners.get(each.slot)
        assert owner == each.request_id, f"slot {each.slot} is {owner}'s, not {each.request_id}'s: admission missing"

    def _write(self, each: ScheduledRequest) -> None:
        for position, token_id in enumerate(each.token_ids, each.first_position):
            block, offset = divmod(position, self.block_size)
            self._kv[each.block_ids[block], offset] = token_id

    def _sample(self, each: ScheduledRequest) -> tuple[int, ...]:
        """A token behind the first position that samples, and one more behind each draft that is right."""
        end = each.first_position + len(each.token_ids)
        places = (divmod(position, self.block_size) for position in range(end))
        sequence = [self._kv[each.block_ids[block], offset] for block, offset in places]
        tokens: list[int] = []
        for length in range(end - each.num_drafts, end + 1):
            if tokens and tokens[-1] != sequence[length - 1]:
                break
            position = each.output_position + len(tokens)
            if tokens and self.faults.get(each.request_id) == position:
                break
            script = self.script.get(each.request_id, ())
            scripted = position < len(script)
            tokens.append(script[position] if scripted else next_token(sequence[:length], self.tokens))
        return tuple(tokens)


class ScriptedDrafter:
    """Guesses up to `longest` of the tokens that ScriptedRunner says next; where it goes wrong is a hash of the tokens.

    learned holds what the scheduler said of them: (request id, drafted, accepted).
    """

    def __init__(self, longest: int = 5, tokens: range = DEFAULT_TOKENS) -> None:
        self.longest = longest
        self.tokens = tokens
        self.learned: list[tuple[str, int, int]] = []

    def draft(self, request: Request, most: int, load: StepLoad) -> tuple[int, ...]:
        sequence = list(request.token_ids_between(0, request.num_tokens))
        chance = zlib.crc32(array("q", sequence).tobytes() + b"draft")
        count, num_right = chance % (self.longest + 1), chance // 64 % (self.longest + 1)
        for index in range(min(count, most)):
            guess = next_token(sequence, self.tokens)
            sequence.append(guess if index < num_right else self.tokens[guess == self.tokens[0]])
        return tuple(sequence[request.num_tokens :])

    def learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.learned.append((request.request_id, num_drafted, num_accepted))

    def forget(self, request_id: str) -> None:
        """What was learned stays, for the test."""


def make_scheduler(
    *,
    num_blocks: int = 8,
    block_size: int = 4,
    slots: int = 3,
    budget: int | None = None,
    reserve: int = 0,
    max_model_len: int = 10**6,
    drafter: Drafter | None = None,
    prefix_cache: bool = False,
    disk: DiskPrefixes | None = None,
) -> Scheduler:
    """A scheduler over a pool small enough that the rare paths are common."""
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        watermark_blocks=reserve,
        drafter=drafter,
        prefix_cache=prefix_cache,
        disk=disk,
    )


def make_request(request_id: str, num_prompt_tokens: int = 6, max_tokens: int = 10, **kwargs: object) -> Request:
    """A request whose prompt is its own, so that nobody else's K/V could pass for it."""
    start = zlib.crc32(request_id.encode()) % 10_000 + 1_000
    return Request(request_id, tuple(range(start, start + num_prompt_tokens)), max_tokens, **kwargs)


class Loop:
    """The engine's loop with no engine: schedule, execute, update, with the auditor on after every step."""

    def __init__(self, scheduler: Scheduler, runner: ScriptedRunner | None = None) -> None:
        self.scheduler = scheduler
        self.runner = runner or ScriptedRunner(block_size=scheduler.block_size)
        self.auditor = Auditor(scheduler)
        self.outputs: list[SchedulerOutput] = []
        self.updates: list[RequestUpdate] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def fail_step(self, output: SchedulerOutput) -> None:
        self.scheduler.fail([each.request_id for each in output.scheduled], "the forward pass of this step failed")
        self.auditor.after_update(StepResult(()))

    def schedule(self, prefill_budget: int | None = None) -> SchedulerOutput:
        output = self.scheduler.schedule(prefill_budget)
        self.outputs.append(output)
        self.auditor.after_schedule(output)
        return output

    def finish_step(self, output: SchedulerOutput) -> None:
        result = self.runner.execute(output)
        self.updates.extend(self.scheduler.update(result))
        self.auditor.after_update(result)

    def step(self, prefill_budget: int | None = None) -> SchedulerOutput:
        output = self.schedule(prefill_budget)
        self.finish_step(output)
        return output

    def steps(self, count: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(count)]

    def run(self, max_steps: int = 1_000) -> int:
        """Run until nothing is left and return how many steps that took; more than max_steps is a failure."""
        taken = 0
        while self.scheduler.has_work:
            assert taken < max_steps, f"not drained after {max_steps} steps"
            self.step()
            taken += 1
        return taken


def make_loop(*requests: Request, runner: ScriptedRunner | None = None, **sizes: int | None) -> Loop:
    """A Loop over a scheduler of these sizes, the requests waiting in it."""
    loop = Loop(make_scheduler(**sizes), runner)
    loop.add(*requests)
    return loop
