"""The command `amalgam`, in which cache-teachers waits for a signal between its first and its second pool of texts.

A test can then interrupt it in the middle on a machine of any speed: `python -m amalgam.tests.interruptible`. Other
tests run it as `main_killed`, which ends at a call of their choice.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from amalgam.cli import main
from amalgam.pipeline.signals import InterruptHandler
from amalgam.stages.cache_teachers import ask
from amalgam.stages.common.inference import batches

MODULE = "amalgam.tests.interruptible"
SECONDS = 120.0
"""Time after which the command continues without a signal."""


def waiting(run_passes: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run_passes`, whose later calls begin after a signal; the writer commits the first call's answers."""
    calls: list[float] = []

    def wait(*given: Any, stop: Callable[[], None], **named: Any) -> Any:
        signals, began = getattr(stop, "__self__", None), time.monotonic()
        assert isinstance(signals, InterruptHandler)
        while calls and not signals.requested() and time.monotonic() - began < SECONDS:
            time.sleep(0.01)
        calls.append(began)
        return run_passes(*given, stop=stop, **named)

    return wait


def main_killed() -> None:
    """Run the command in pools of one launch; it kills itself at the call of the teachers that KILL_AT names."""
    calls: list[object] = []

    def killed(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return batches.run_passes(*given, **named)

    ask.POOL_LAUNCHES = 1
    setattr(ask, "run_passes", killed)  # noqa: B010 - mypy has no assignment of a function
    sys.argv[0] = "amalgam"
    main()


if __name__ == "__main__":
    setattr(ask, "run_passes", waiting(batches.run_passes))  # noqa: B010 - mypy has no assignment of a function
    sys.argv[0] = "amalgam"
    main()
