"""Counts and seconds of a run."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduler import ScheduledRow


@dataclass
class RunStats:
    """Counts and seconds of a run, prefill and decode apart.

    A token is a decode token if it came out of a step that computed its row's last token alone (or with drafts after it), past
    the prompt; all others are prefill, also those computed again after a preemption. The time of a step that holds both kinds is
    shared out in proportion to the tokens it computed.

    `num_waits`: steps with decode tokens after which the host waited for the device before it could go on, as it does after every
    step but those of a burst.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_steps: int = 0
    num_waits: int = 0

    @property
    def waits_per_token(self) -> float:
        """Host waits a decode token."""
        return self.num_waits / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def prefill_tok_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def add_step(self, rows: list[ScheduledRow], seconds: float, num_extra: int = 0, is_waited: bool = True) -> None:
        """`num_extra`: tokens that the step gave beyond one a row, by drafts that held. `is_waited`: before anything was launched
        behind it."""
        decode = [row.num_tokens for row in rows if row.is_decode]
        num_computed = sum(row.num_tokens for row in rows)
        num_prefill = num_computed - sum(decode)
        share = sum(decode) / num_computed
        self.decode_tokens += len(decode) + num_extra
        self.prefill_tokens += num_prefill
        self.decode_s += share * seconds
        self.prefill_s += (1.0 - share) * seconds
        self.num_steps += 1
        self.num_waits += bool(decode) and is_waited

    def add_burst_step(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens`: those that rows still open could use. `seconds`: since the step before was read."""
        self.decode_tokens += num_tokens
        self.decode_s += seconds
        self.num_steps += 1
