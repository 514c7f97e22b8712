"""`make check-api`: random requests to the routes that `/openapi.json` describes, by schemathesis.

Each check of schemathesis counts, such as that no status is 5xx, and that bodies outside of the schemas are refused.
What `check_api.toml` turns off is explained there.
"""

from __future__ import annotations

import subprocess
import sys

from minisgl.testing.serving import Server

from .catalog import ENVIRONMENTS, FOLDER

EXAMPLES = 60
"""Random requests for each route. With the requests that test the bounds, these are about 2,000 for 21 routes."""


def main() -> int:
    """Run the checks on a server. Return the exit status. The arguments are those of ``schemathesis run``."""
    program = str(ENVIRONMENTS / "api" / "bin" / "schemathesis")
    with Server("model=tutor", "num_pages=512", "max_seq_len=512", "server.admin_key=secret") as server:
        words = [program, "--config-file", str(FOLDER / "check_api.toml"), "run", f"{server.url}/openapi.json"]
        more = ["--phases", "examples,coverage,fuzzing", "-n", str(EXAMPLES), "--continue-on-failure", *sys.argv[1:]]
        status = subprocess.run([*words, *more], check=False, cwd=server.folder).returncode  # it writes files
        if server.process.poll() is not None:
            print("The server ended.", file=sys.stderr)
            return 1
        return status


if __name__ == "__main__":
    sys.exit(main())
