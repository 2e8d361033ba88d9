"""An obstacle met by one rank, and all ranks taking the same way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch.errors import DoorbellError, HeapExhausted

Exchange = Callable[[Any], list[Any]]
"""All-gather of a small JSON-like value; collective."""


def agree(exchange: Exchange, failure: Exception | None, what: str = "") -> None:
    """*Collective*. If some ranks come with a failure, *raises* the lowest one's on all, as `HeapExhausted` or `DoorbellError`.

    `what`: put before the text, with the rank's number: "`what` failed on rank 1: ...".
    """
    reports = exchange(None if failure is None else [isinstance(failure, HeapExhausted), str(failure)])
    for peer, report in enumerate(reports):
        if report is not None:
            is_exhausted, text = report
            kind = HeapExhausted if is_exhausted else DoorbellError
            raise kind(f"{what} failed on rank {peer}: {text}" if what else text) from failure


def agreed(exchange: Exchange, what: str, attempt: Callable[[], Any], errors: tuple[type[Exception], ...] = ()) -> Any:
    """Run `attempt` on all ranks and return this one's value; if it failed on one, raise on all as `agree` does.

    *Collective*. `errors`: what counts as a failure beside `DoorbellError`; anything else is a bug and escapes at once.
    """
    failure, value = None, None
    try:
        value = attempt()
    except (DoorbellError, *errors) as error:
        failure = error
    agree(exchange, failure, what)
    return value
