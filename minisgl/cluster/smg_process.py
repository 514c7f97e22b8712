"""``python -m minisgl.cluster.smg_process``: runs ``smg`` until standard input is closed.

The first line of standard input is a JSON list: the arguments of ``smg``, which may contain a key that no other user
should see in the list of processes. However the cluster ends, the operating system closes its end of the pipe, and this
process exits.
"""

from __future__ import annotations

import json
import os
import threading


def _exit_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)
        line += byte
    return line


if __name__ == "__main__":
    arguments = json.loads(_first_line())
    threading.Thread(target=_exit_with_input, daemon=True).start()
    from smg.cli import main

    main(arguments)
