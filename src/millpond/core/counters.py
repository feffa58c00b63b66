"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """What has happened since the start.

    thrashed_admissions counts preemptions of a request that generated fewer than block_size tokens since it
    was admitted. recomputed_tokens counts the positions that resumed requests prefill again. forward_tokens counts
    drafted_tokens too; accepted_tokens are the drafts that turned out to be right. watermark_delays counts the steps in
    which the head of waiting would have been admitted but for the reserve. displaced of the preemptions made room for
    a head that the policy puts before its victim.
    Of the prefix cache, once for each admission: queried_tokens are the prompts of new requests that asked it,
    hit_tokens what they found; resumed_hit_tokens is what preempted ones found again. disk_hit_tokens of both came
    from disk.
    """

    iterations: int = 0
    admissions: int = 0
    preemptions: int = 0
    displaced: int = 0
    thrashed_admissions: int = 0
    forward_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    watermark_delays: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    disk_hit_tokens: int = 0

    @property
    def of_prefixes(self) -> tuple[int, int, int, int]:
        """Queried, hit, resumed hit and recomputed tokens."""
        return self.queried_tokens, self.hit_tokens, self.resumed_hit_tokens, self.recomputed_tokens

    @property
    def recompute_share(self) -> float:
        """recomputed_tokens over forward_tokens; 0 before anything was forwarded."""
        return self.recomputed_tokens / self.forward_tokens if self.forward_tokens else 0.0
