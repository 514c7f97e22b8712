"""``python -m minisgl.bench NAME …``: runs one benchmark. Each benchmark is a module with a function ``main``."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "offline": "throughput and latency of a list of requests, without a server",
    "online": "throughput and latency of an OpenAI-compatible server: Poisson, bursts, closed loop, sweeps",
    "replay": "the same for a trace of real requests, played in its own time or faster",
    "stages": "the nine stages of the course on one workload: what each stage gains",
    "ttft": "time to the first token on an idle engine, by the length of the prompt",
    "profile": "GPU timeline while many requests decode: idle time, kernels, host time of a step",
    "suite": "six workloads on named model shapes with random weights, in one table",
    "speculation": "speculative decoding: gain and cost by acceptance and number of requests, without a data set",
    "grammar": "what structured output costs, in output tokens a second",
    "cluster": "routing policies for several replicas: hit rate, load balance and TTFT, simulated or on real servers",
    "kernels": "time of each kernel on this GPU, next to its torch reference and other libraries",
    "link": "time of the all-reduce between GPUs, by number of rows and algorithm",
    "tiles": "the fastest tile shapes of the Triton kernels on this GPU",
    "cpu": "a small model on this CPU, beside llama.cpp and transformers",
    "abuse": "abuses of a server, and what its other clients notice of them",
    "live": "what open pages of the live view cost a server",
    "host": "host time of a scheduling step, without a model",
}


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in BENCHMARKS:
        known = "\n".join(f"  {name:11} {summary}" for name, summary in BENCHMARKS.items())
        text = f"usage: python -m minisgl.bench NAME [options] [key=value …]\n\n{known}\n\nNAME --help says more."
        if argv and argv[0] not in ("-h", "--help"):
            print(f"minisgl.bench: there is no benchmark {argv[0]!r}.\n{text}", file=sys.stderr)
            raise SystemExit(2)
        print(text)
        return
    module = "minisgl.chapters.ladder.stages" if argv[0] == "stages" else f"minisgl.bench.{argv[0]}"
    importlib.import_module(module).main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
