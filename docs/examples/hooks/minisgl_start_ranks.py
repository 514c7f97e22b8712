"""Say on which machine an `LLM` with several ranks starts, and leave the start to other plugins."""

import platform

from minisgl import hookimpl


@hookimpl
def minisgl_start_ranks(config):
    print(f"starting {config.tp} ranks on {platform.node()}")
    return None  # the next plugin starts them
