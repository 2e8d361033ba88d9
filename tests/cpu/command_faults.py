"""The command with something broken in one rank: `-m command_faults` in place of `-m engine.generate`.

`DOORBELL_TEST_FAULT` is `<kind>:<rank>`; the tests that use it say what the kinds do to a run.
"""

from __future__ import annotations

import os
import signal

from engine.generate import main


def _die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break(kind: str) -> None:
    import engine.loading
    import engine.run
    from engine.replica import Replica
    from launch.errors import ModelError

    def refuse(*args: object, **kwargs: object) -> None:
        raise ModelError("the shard is unreadable here")

    def step(replica: Replica) -> object:
        if replica.scheduler.has_work and len(replica.sequences) and replica.digest % 7 == 3:
            raise ZeroDivisionError("a bug of this rank")
        return whole_step(replica)

    whole_step = Replica.step
    if kind == "step":
        Replica.step = step
    elif kind == "load":
        engine.loading.load_weights = _die
    elif kind == "meet":
        engine.run.open_communicator = _die
    elif kind == "refuse":
        engine.loading.load_weights = refuse


if __name__ == "__main__":
    fault, rank = os.environ["DOORBELL_TEST_FAULT"].split(":")
    if os.environ.get("RANK", "0") == rank:
        _break(fault)
    main()
