"""The command line of the server: ``python -m minisgl`` and ``python -m minisgl.server.attached``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with the options of the command line until told to end; the exit status."""
    # Torch's threads on a CPU spin while they wait for each other. Where another program had one of two cores, that
    # left 7 tokens a second of 170; to wait passively costs nothing that could be measured. Children inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threading.current_thread() is threading.main_thread():
        # Until the launcher takes over there is nothing to end, and an exception could be lost inside an import.
        signal.signal(signal.SIGINT, _leave)
    try:
        # Imported here, so that a child process that imports the main module again gets nothing with it.
        from minisgl.options.compose import plain_errors, run_cli

        config, host = run_cli(sys.argv[1:] if argv is None else argv)
        with plain_errors():
            from minisgl.server.serve import serve

            return serve(config, host)
    except KeyboardInterrupt:  # before there is anything to end
        return 130
