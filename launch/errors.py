"""The errors a user can meet, each with the exit code the process leaves with.

A `DoorbellError` is a sentence for a person: it names the cause and, where there is one, the remedy. Entry points print
it once, from one rank, without a traceback. Anything else that escapes is a bug and keeps its traceback (exit code 1).
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_MODEL = 3
EXIT_ROWS_FAILED = 4
EXIT_PEER_LOST = 5
EXIT_OUTPUT = 6
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class DoorbellError(Exception):
    """Base of every error that is the user's, the machine's or a peer's, never ours."""

    exit_code = EXIT_BUG


class UsageError(DoorbellError):
    """The command line, the API call or the input file as a whole cannot be used."""

    exit_code = EXIT_USAGE


class ModelError(DoorbellError):
    """The model folder, its configuration or the requested parallel degree cannot be used."""

    exit_code = EXIT_MODEL


class OutputError(DoorbellError):
    """The output file could not be written (full disk, vanished folder, no permission)."""

    exit_code = EXIT_OUTPUT


class KernelBuildError(DoorbellError):
    """Device code could not be compiled: NVRTC is absent or refused the source. The message carries its log."""


class KernelLaunchError(DoorbellError):
    """The driver refused to load or to launch a kernel. `code` is its name of the error, e.g. CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class PeerLost(DoorbellError):
    """A rank died or stopped answering. `rank` is the lost one."""

    exit_code = EXIT_PEER_LOST

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


class PeerFailed(PeerLost):
    """A rank left with an error of its own. `exit_code` is the one it left with, so that all ranks end alike."""

    def __init__(self, rank: int, message: str, exit_code: int):
        super().__init__(rank, message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class WaitRecord:
    """What a wait that expired was waiting for: the word of `peer` held `seen`, not `expected`."""

    operation: str
    epoch: int
    peer: int
    seen: int
    expected: int


class PeerTimeout(PeerLost):
    """A rank is alive but did not arrive at a collective before the deadline."""

    def __init__(self, rank: int, message: str, record: WaitRecord | None = None):
        super().__init__(rank, message)
        self.record = record


class ConnectError(DoorbellError):
    """The ranks could not find each other at start, or one left before they had."""

    exit_code = EXIT_PEER_LOST


class CommUnavailable(DoorbellError):
    """The communication between ranks that was asked for by name is not possible on this machine."""

    exit_code = EXIT_MODEL


class HeapExhausted(DoorbellError):
    """A symmetric heap is too small for what was asked of it."""

    exit_code = EXIT_MODEL
