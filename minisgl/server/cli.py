"""The command line of the server: ``python -m minisgl`` and ``python -m minisgl.cluster.attached``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server with the options of the command line until it ends. Return the exit status of the program.

    ``argv`` are the command line's arguments without the program's name, by default those of ``sys.argv``.
    """
    if threading.current_thread() is threading.main_thread():
        # Before the launcher installs its own handler there is no worker to stop, so exit at once. The default
        # handler's KeyboardInterrupt could be caught inside an import.
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        # Imported here: each spawned worker process imports the main module again, and does not need these modules.
        from minisgl.config import Config
        from minisgl.options.compose import plain_errors, run_cli

        words = sys.argv[1:] if argv is None else argv
        config, manager = run_cli(words)
        with plain_errors():
            if "TORCHELASTIC_RUN_ID" in os.environ or config.multi_node != Config().multi_node:
                from minisgl.cluster.multi_node.start import start  # only if the options or torchrun ask for it

                return start(config, manager, words)
            from minisgl.server.serve import serve

            return serve(config, manager)
    except KeyboardInterrupt:  # no worker has been started yet
        return 130
