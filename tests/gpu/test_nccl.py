"""The communicators ``nccl`` and ``torch`` between GPUs, with one process per rank and no default process group.

The tests cover all collectives, races between fast and slow ranks, and several engines in one process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from minisgl.cluster.process import free_port

# Options of communicator=nccl; None is communicator=torch. The limits are chosen so that every algorithm is used.
ALGORITHMS = {
    "torch": None,
    "nccl": {"one_shot_bytes": 64 * 2048, "two_shot_bytes": 1024 * 2048},
    "one-shot alone": {"one_shot_bytes": 64 * 2048, "two_shot_bytes": 0},
    "two-shot alone": {"one_shot_bytes": 0, "two_shot_bytes": 1024 * 2048},
}

SETUP = """
import random, sys, time, torch
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.kernels.ops.norm import add_rms_norm
rank, size, address, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
manager = PluginManager.load()
config = manager.make("communicator", "torch" if options is None else "nccl")
config.timeout = 60
for name, value in (options or {}).items():
    setattr(config, name, value)
def connect(address):
    return manager.build("communicator", config, rank=rank, size=size, address=address, device=device)
comm = connect(address)
DIM = 1024
stream = torch.cuda.Stream(device)
torch.cuda.set_stream(stream)
torch.set_grad_enabled(False)

def part(i, r, rows, dtype=torch.bfloat16, dim=DIM):
    "Rank r's part of message i: whole numbers, of which eight add up exactly in bfloat16."
    x = torch.arange(rows * dim, device=device, dtype=torch.int64).view(rows, dim)
    return ((x * 7 + i * 13 + r * 29 + x // dim) % 32 - 16).to(dtype)

def total(i, rows, dtype=torch.bfloat16, dim=DIM):
    return sum(part(i, r, rows, torch.float32, dim) for r in range(size)).to(dtype)
"""

COLLECTIVES = """
for i, (rows, dim, dtype) in enumerate([
    (1, DIM, torch.bfloat16), (64, DIM, torch.bfloat16), (65, DIM, torch.bfloat16), (1024, DIM, torch.bfloat16),
    (1025, DIM, torch.bfloat16), (3, DIM, torch.float32), (3, DIM, torch.float16), (2, 3, torch.bfloat16),
    (1, 8, torch.bfloat16), (5, 2048, torch.bfloat16), (1, 5, torch.int64),
]):
    mine, want = part(i, rank, rows, dtype, dim), total(i, rows, dtype, dim)
    assert torch.equal(comm.all_reduce(mine.clone()), want), (rows, dim, dtype)
    every = [part(i, r, rows, dtype, dim) for r in range(size)]
    assert torch.equal(comm.all_gather(mine), torch.cat(every, dim=-1))
    assert torch.equal(comm.all_gather(mine, dim=0), torch.cat(every, dim=0))
    assert torch.equal(comm.broadcast(mine.clone(), src=size - 1), every[-1])
    if dtype.is_floating_point:
        residual = part(i + 100, 0, rows, dtype, dim)
        weight = part(i + 200, 0, 1, dtype, dim)[0]
        kept = residual.clone()
        out, new = comm.all_reduce_norm(mine.clone(), residual, weight, 1e-6)
        wanted = add_rms_norm(want.clone(), kept, weight, 1e-6)
        assert torch.equal(new, wanted[1]), (rows, dim, dtype)
        torch.testing.assert_close(out, wanted[0])
        assert new.untyped_storage().data_ptr() != comm.all_reduce(mine.clone()).untyped_storage().data_ptr()
        assert torch.equal(new, wanted[1]), "the next all-reduce overwrote the sum"
assert comm.exchange(b"%d" % rank) == [b"%d" % r for r in range(size)]
second = connect(sys.argv[5])  # two engines side by side
for i in range(20):
    for j, one in enumerate((comm, second)):
        assert torch.equal(one.all_reduce(part(i + j, rank, 1 + i)), total(i + j, 1 + i))
second.close()
assert torch.equal(comm.all_reduce(part(3, rank, 2)), total(3, 2))
assert not torch.distributed.is_initialized()
comm.close()
print("ok")
"""

RACES = """
# The host never waits for the device, ranks stall at random, and lengths change. A buffer that is overwritten before
# it was read gives a wrong sum.
wrong = torch.zeros((), dtype=torch.int64, device=device)
lengths, stalls = random.Random(1), random.Random(rank)
messages = [lengths.choice((1, 1, 2, 7, 64, 65, 300)) for _ in range(1500)]
parts = {rows: [part(i, rank, rows) for i in range(4)] for rows in set(messages)}
totals = {rows: [total(i, rows) for i in range(4)] for rows in set(messages)}
zeros = {rows: torch.zeros(rows, DIM, dtype=torch.bfloat16, device=device) for rows in set(messages)}
ones = torch.ones(DIM, dtype=torch.bfloat16, device=device)

def message(i, rows):
    x = parts[rows][i % 4].clone()
    got = comm.all_reduce(x) if i % 3 else comm.all_reduce_norm(x, zeros[rows], ones, 1e-6)[1]
    wrong.add_((got != totals[rows][i % 4]).sum())

for rows in sorted(set(messages)):  # first calls allocate and compile
    message(0, rows), message(1, rows)
torch.cuda.synchronize()
for i, rows in enumerate(messages):
    if stalls.random() < 0.1:
        torch.cuda._sleep(stalls.randrange(200_000))
    message(i, rows)
torch.cuda.synchronize()
assert wrong.item() == 0, f"{wrong.item()} elements of eager sums"

# The same in graphs with different numbers of messages, so that successive replays start at different mailbox turns.
graphs = []
for k in range(3):
    graph = torch.cuda.CUDAGraph()
    with comm.capturing(), torch.cuda.graph(graph, stream=stream):
        for i in range(5 + k):
            message(i, (1, 7, 64, 300)[(i + k) % 4])
    graphs.append(graph)
for i in range(600):
    if stalls.random() < 0.1:
        torch.cuda._sleep(stalls.randrange(400_000))
    graphs[lengths.randrange(3)].replay()
    if i % 5 == 0:
        message(i, 64)
torch.cuda.synchronize()
assert wrong.item() == 0, f"{wrong.item()} elements of sums in graphs"
graphs.clear()
del graph
comm.close()
print("ok")
"""


def second_address(first: str) -> str:
    """Return the address of a script's second communicator, the same for all ranks with the address ``first``."""
    return f"127.0.0.1:{int(first.rpartition(':')[2]) + 1}"


def start(rank: int, size: int, address: str, script: str, options: dict[str, int] | None) -> subprocess.Popen[str]:
    """Start a process that runs the script as one rank."""
    words = [str(rank), str(size), address, repr(options), second_address(address)]
    return subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def expect_ok(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for the processes; raise AssertionError with their errors unless each prints "ok"."""
    try:
        results = [process.communicate(timeout=120) for process in processes]
        assert [out.strip() for out, _ in results] == ["ok"] * len(processes), "\n".join(
            err[-3000:] for _, err in results
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_script(size: int, script: str, options: dict[str, int] | None) -> None:
    """Run the script on ``size`` ranks, each in a process, and expect each to print "ok"."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    address = f"127.0.0.1:{free_port()}"
    expect_ok([start(rank, size, address, SETUP + script, options) for rank in range(size)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_collectives(size: int, algorithm: str) -> None:
    """All collectives give exact results, for messages of many sizes and dtypes."""
    run_script(size, COLLECTIVES, ALGORITHMS[algorithm])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["nccl", "torch"])
def test_races(size: int, algorithm: str) -> None:
    """No message is overwritten before it was read, with and without CUDA graphs."""
    run_script(size, RACES, ALGORITHMS[algorithm])


USE = """
for i in range(6):
    assert torch.equal(comm.all_reduce(part(i, rank, 1 + 60 * i)), total(i, 1 + 60 * i))
comm.close()
"""


@pytest.mark.parametrize("algorithm", ["nccl", "torch"])
def test_second_engine_in_a_process(algorithm: str) -> None:
    """As with a second ``LLM``: rank 0 is the same process as before, the other ranks are new processes."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    again = f"comm = connect({second!r})\n{USE}print('ok')"
    processes = [
        start(0, 2, first, SETUP + USE + again, ALGORITHMS[algorithm]),
        start(1, 2, first, SETUP + USE + "print('ok')", ALGORITHMS[algorithm]),
        start(1, 2, second, SETUP + USE + "print('ok')", ALGORITHMS[algorithm]),
    ]
    expect_ok(processes)
