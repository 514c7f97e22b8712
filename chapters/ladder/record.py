"""``python -m minisgl.chapters.ladder.record``: serve the workload with `tutor` on a CPU, and write its outputs.

`minisgl.chapters.ladder.recorded` reads them.
"""

from __future__ import annotations

import json

from minisgl.chapters.ladder.recorded import FILE
from minisgl.chapters.ladder.stages import compose_stage, serve
from minisgl.chapters.ladder.workload import workload
from minisgl.engine.build import start_engine
from minisgl.plugin_manager.manager import PluginManager


def main() -> None:
    """Write the outputs of stage 7."""
    manager = PluginManager.load()
    config = compose_stage(manager, 7, ["device=cpu"])
    engine = start_engine(config, manager)
    try:
        _, tokens = serve(config, manager, engine, workload(), 7)
    finally:
        engine.close()
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, tokens)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
