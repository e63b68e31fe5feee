"""What one scheduler may put into a step, and what it has counted."""

from __future__ import annotations

from typing import Any

import attrs

from ..errors import ConfigError

__all__ = ["Counters", "StepLimits"]


@attrs.frozen(kw_only=True)
class StepLimits:
    """Bounds of a step and of a sequence.

    Raises:
        ConfigError: a bound is below its minimum.
    """

    #: Slots; at most `max_tokens_per_step // (num_drafts + 1)` of them are used, so that every running
    #: sequence fits a step.
    max_rows: int
    #: Query tokens of a step.
    max_tokens_per_step: int
    #: Longest prompt and output together.
    max_len: int
    #: Longest piece of a prompt in one step; None for whatever the step has left.
    max_chunk: int | None
    #: Draft tokens a carried row may verify.
    num_drafts: int
    #: Pages that stay free when a sequence is admitted beside others, so that those can grow.
    reserve_pages: int

    def __attrs_post_init__(self) -> None:
        lowest = {"max_rows": 1, "max_tokens_per_step": 1 + self.num_drafts, "max_len": 2, "num_drafts": 0}
        for name, low in {**lowest, "reserve_pages": 0}.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {low}")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ConfigError(f"max_chunk is {self.max_chunk}; expected at least 1, or None for no bound")

    @property
    def usable_rows(self) -> int:
        return min(self.max_rows, self.max_tokens_per_step // (self.num_drafts + 1))

    def chunk(self, wanted: int, budget: int) -> int:
        """Tokens of a prompt that wants `wanted` in a step with `budget` left."""
        return min(wanted, budget, self.max_chunk or wanted)


@attrs.define
class Counters:
    """Totals since the scheduler was made."""

    steps: int = 0
    #: Tokens put into steps, by kind of row.
    decode_tokens: int = 0
    chunk_tokens: int = 0
    #: Prompt tokens found in the prefix cache or shared with a sibling.
    cached_tokens: int = 0
    admissions: int = 0
    forks: int = 0
    preemptions: int = 0
    #: Rows that were computed and not used: their sequence had ended or left.
    dropped_rows: int = 0
    failed_steps: int = 0
    #: Ended sequences by `FinishReason`.
    finished: dict[str, int] = attrs.field(factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)
