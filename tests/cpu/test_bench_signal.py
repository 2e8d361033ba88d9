"""What the bench of put-with-signal times is what it says: messages to and fro, between two threads in place of two GPUs."""

from __future__ import annotations

import queue

import pytest
import torch

from comm.draft_channels import MAX_DRAFT_BYTES
from comm.threads import run_ranks
from engine.bench.signal import ROUNDS, SIZES, WAYS
from tests.draft_payload import SHAPES


class Mailbox:
    def __init__(self):
        self._messages, self.num_taken = queue.Queue(), 0

    def put(self, payload):
        self._messages.put(payload.clone())

    def take(self, out):
        out.copy_(self._messages.get(timeout=30))
        self.num_taken += 1

    def relay(self, out, onward):
        self.take(out)
        onward.put(out)


@pytest.mark.parametrize("launches", WAYS)
def test_a_message_goes_there_and_back(launches):
    there, back = Mailbox(), Mailbox()
    x = torch.arange(7, 11)

    def run(comm):
        y = torch.full_like(x, -1)
        WAYS[launches](comm.rank, there, back)(x if comm.rank == 0 else torch.zeros_like(x), y)
        return y

    for y in run_ranks(2, run):
        assert torch.equal(y, x)
    assert there.num_taken == back.num_taken == ROUNDS


def test_sizes_are_those_of_drafts_and_one_more():
    drafts = {8 * rows * num_drafts for rows, num_drafts in SHAPES if rows != 5}
    assert drafts < set(SIZES) and [size for size in SIZES if size > MAX_DRAFT_BYTES] == [4096]
