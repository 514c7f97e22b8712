"""``python -m minisgl``: serve. The words after it are options, ``key=value``; ``--help`` lists them all."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with the options of the command line until told to end; the exit status."""
    try:
        # Imported here, so that a child process that imports the main module again gets nothing with it.
        from minisgl.compose import plain_errors, run_cli

        config = run_cli(sys.argv[1:] if argv is None else argv)
        with plain_errors():
            from minisgl.server.serve import serve

            return serve(config)
    except KeyboardInterrupt:  # before there is anything to end
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
