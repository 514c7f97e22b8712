"""communicator=torch over NCCL, between two GPUs: a process each, and no default process group."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from minisgl.utils.ports import free_port

RANK = """
import sys, torch
from minisgl.kernel.norm import add_rms_norm
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
rank, address = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
comm = TorchCommunicator(Torch(timeout=60), rank, 2, address, device)
every = [torch.arange(6, device=device, dtype=torch.bfloat16).view(2, 3) + 10 * r for r in range(2)]
with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(device)):
    assert torch.equal(comm.all_reduce(every[rank].clone()), every[0] + every[1])
    assert torch.equal(comm.all_gather(every[rank]), torch.cat(every, dim=-1))
    assert torch.equal(comm.all_gather(every[rank], dim=0), torch.cat(every, dim=0))
    assert torch.equal(comm.broadcast(every[rank].clone(), src=1), every[1])
    residual, weight = torch.ones_like(every[0]), torch.ones(3, device=device, dtype=torch.bfloat16)
    got = comm.all_reduce_norm(every[rank].clone(), residual.clone(), weight, 1e-6)
    want = add_rms_norm(every[0] + every[1], residual, weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    graph, x = torch.cuda.CUDAGraph(), every[rank].clone()
    comm.all_reduce(x.clone())
    torch.cuda.synchronize()
    with comm.capturing(), torch.cuda.graph(graph):
        y = comm.all_reduce(x.clone())
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, every[0] + every[1])
assert comm.exchange(b"%d" % rank) == [b"0", b"1"]
assert not torch.distributed.is_initialized()
del graph, y
comm.close()
print("ok")
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_collectives_over_nccl() -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(r), address], stdout=subprocess.PIPE, text=True) for r in range(2)]
    try:
        assert [rank.communicate(timeout=180)[0].strip() for rank in ranks] == ["ok", "ok"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
