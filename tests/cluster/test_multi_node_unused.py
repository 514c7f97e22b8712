"""Without torchrun, the command line and the modules of a server's processes load no module of multi-node ranks."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import minisgl.server.cli, minisgl.server.launcher, minisgl.server.rank_process, minisgl.server.serve
import minisgl.server.text_process
assert not [name for name in sys.modules if name.startswith("minisgl.cluster.multi_node")]
"""


def test_a_server_without_torchrun_imports_no_multi_node_module() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
