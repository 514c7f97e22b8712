# causes: summary
# gate: clock
"""The times to first token on /metrics are also those of requests that are still open."""

REPLACED = [
    (
        "        first = [timing.ttft for timing in self.ended if timing.ttft is not None]\n",
        "        timings = [*self.ended, *map(self.timing, self.arrived)]\n"
        "        first = [timing.ttft for timing in timings if timing.ttft is not None]\n",
    ),
]
