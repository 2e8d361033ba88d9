"""Where the device leaves the tokens it chose: a ring of words in host memory.

A word carries its token together with the number of its step, so arrival is the data: the host looks at memory until the number
is there. No copy, no event, no synchronisation. The writer is `kernels/advance_rows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kernels.advance_rows import ID_BITS
from launch.errors import DoorbellError

NO_TOKEN = -1
STEP_DEADLINE_S = 90.0  # above the deadline of a wait between GPUs (30 s), which can say more about what is wrong
_SPINS_BEFORE_SLEEP = 200
_SLEEP_S = 20e-6  # a nap lets the other threads of this process run; steps of large models take milliseconds
_CHECK_EVERY = 64  # looks


class TokenRing:
    """`num_slots` steps of up to `max_rows` rows. Steps are numbered from 0 and never start anew.

    `words`: int64 `[num_slots, max_rows]` as the host sees them (pinned for a GPU); `device_words`: the same memory as a tensor
    of `device`. The writer may be at most `num_slots` steps ahead of the reader.
    """

    def __init__(self, num_slots: int, max_rows: int, device: torch.device):
        self.num_slots = num_slots
        self.words = torch.zeros(num_slots, max_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device_words = _seen_by(device, self.words)
        self._host = self.words.numpy()
        self._device = device

    def read(self, step: int, num_rows: int, check: Callable[[], None]) -> list[int]:
        """The tokens of `step`, once they are there; `NO_TOKEN` for a row whose logits were not finite.

        `check()` runs now and then and raises what is known to be wrong with a peer. *Raises* that, and `DoorbellError` when the
        step does not come.
        """
        self._wait(step, num_rows, check)
        row = self._host[step % self.num_slots, :num_rows]
        return ((row & ((1 << ID_BITS) - 1)) - 1).tolist()

    def wait(self, step: int, check: Callable[[], None]) -> None:
        """Return once `step`, or a later one, is done. *Raises* as `read`."""
        self._wait(step, 1, check)

    def restart(self) -> None:
        """Forget all steps: the next one is number 0. Only while the device is idle."""
        self.words.zero_()

    def _wait(self, step: int, num_rows: int, check: Callable[[], None]) -> None:
        row = self._host[step % self.num_slots, :num_rows]
        first, looks, deadline = word_base(step), 0, time.monotonic() + STEP_DEADLINE_S
        while (row < first).any():
            looks += 1
            if looks % _CHECK_EVERY == 0:
                check()
                self._check_device(deadline)
            time.sleep(0 if looks < _SPINS_BEFORE_SLEEP else _SLEEP_S)

    def _check_device(self, deadline: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).query()  # raises what went wrong on the GPU; waits for nothing
        if time.monotonic() > deadline:
            raise DoorbellError(f"the device did not finish a decode step within {STEP_DEADLINE_S:.0f} s")


def word_base(step: int) -> int:
    """The smallest word of `step`."""
    return (step + 1) << ID_BITS


class _DeviceView:
    """Pinned host memory offered to torch as memory of the GPU: with unified addressing it has one address for both."""

    def __init__(self, host: torch.Tensor):
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i8",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def _seen_by(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    if device.type != "cuda":
        return host
    view = torch.as_tensor(_DeviceView(host), device=device)
    if view.data_ptr() != host.data_ptr():
        raise DoorbellError("torch copied the token ring instead of mapping it; run with --eager")
    return view
