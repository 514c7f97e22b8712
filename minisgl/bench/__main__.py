"""``python -m minisgl.bench NAME …``: measure one thing. Each benchmark is a module of this package with a ``main``."""

from __future__ import annotations

import importlib
import os
import sys

BENCHMARKS = {
    "offline": "throughput and latency of a list of requests, without a server",
    "stages": "the course's seven stages on one workload: what each idea bought",
    "ttft": "time to the first token of one prompt on an idle engine, by its length",
    "profile": "whether the device waits for the host while many requests decode, and what it does",
    "suite": "the design's workloads on named shapes, in one table",
    "kernels": "what each kernel reaches on this GPU, beside its torch twin and a library's",
    "link": "what the sum over ranks costs between GPUs, by rows and road",
    "tiles": "which tile shapes are fastest on this GPU",
    "host": "what a scheduling step costs on the host, without a model",
}


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in BENCHMARKS:
        known = "\n".join(f"  {name:10} {what}" for name, what in BENCHMARKS.items())
        text = f"usage: python -m minisgl.bench NAME [options] [key=value …]\n\n{known}\n\nNAME --help says more."
        if argv and argv[0] not in ("-h", "--help"):
            print(f"minisgl.bench: there is no benchmark {argv[0]!r}.\n{text}", file=sys.stderr)
            raise SystemExit(2)
        print(text)
        return
    # As in the server: two threads that spin for one busy core took 15 times as long, and waiting costs nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    module = "minisgl.course.ladder.stages" if argv[0] == "stages" else f"minisgl.bench.{argv[0]}"
    importlib.import_module(module).main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
