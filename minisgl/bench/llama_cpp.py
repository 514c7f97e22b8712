"""Measures llama.cpp for `minisgl.bench.cpu`, in a separate process of a Python that has the package xllamacpp.

``python llama_cpp.py FILE.gguf THREADS VOCABULARY`` prints a line "ready", and then the results as JSON. With
VOCABULARY 0, it prints the address of a server, which runs until the standard input ends.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any


def main(file: str, threads: int, vocabulary: int) -> None:
    """Measure the workloads of `minisgl.bench.cpu` with llama.cpp's server, in this process, or only serve."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = file, 16 * 1024, 16, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    if vocabulary == 0:
        print(server.listening_address, flush=True)
        sys.stdin.read()
        return
    print("ready", flush=True)
    numbers = random.Random(0)

    def generate(prompt: int, output: int) -> dict[str, Any]:
        ids = [numbers.randrange(vocabulary) for _ in range(prompt)]
        request = {"prompt": ids, "n_predict": output, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        timings: dict[str, Any] = server.handle_completions(request)["timings"]
        return timings

    generate(8, 4)
    one = generate(128, 64)
    result = {
        "decode": 1000 / one["predicted_per_token_ms"],
        "ttft": one["prompt_ms"] / 1000,
        "prefill": generate(512, 1)["prompt_per_second"],
    }
    start = time.perf_counter()
    many = [threading.Thread(target=generate, args=(128, 64)) for _ in range(16)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    result["many"] = 16 * 64 / (time.perf_counter() - start)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
