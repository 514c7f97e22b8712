"""This graph runner has buckets of 1, 2, 4 and multiples of 8 rows, and keeps its recordings in a list."""

from dataclasses import dataclass

import numpy as np
import torch

from minisgl import hookimpl
from minisgl.attention import AttnBatch, GraphKey
from minisgl.engine.inputs import ModelInputs
from minisgl.plugins.graph.replaying import BucketRunner
from minisgl.plugins.graph.replaying.record import Recorder


@dataclass
class Mine:
    """Bucket sizes as those of graph=cuda."""

    def build(self, device):
        return Static8(device)


class Static:
    def __init__(self, key, spec, page_table, device):
        scratch = spec.num_pages * spec.page_size
        self.empty = torch.tensor(
            [[0], [0], [scratch], [spec.max_running_requests], [1]], dtype=torch.int32, device=device
        )
        self.data = self.empty.repeat(1, key.rows)
        self.tokens = ModelInputs(self.data, pending=True)
        self.seq_lens_cpu = np.ones(key.rows, np.int32)
        cu_seqlens_q_cpu = np.arange(key.rows + 1, dtype=np.int32)
        cu_seqlens_q = torch.from_numpy(cu_seqlens_q_cpu).to(device)
        seq_lens = self.data[4]
        self.batch = AttnBatch(
            key.rows, cu_seqlens_q_cpu, self.seq_lens_cpu, cu_seqlens_q, seq_lens, self.data[3], page_table, key
        )

    def fill(self, packed):
        n = 0 if packed is None else packed.shape[1]
        if n:
            self.data[:, :n].copy_(torch.from_numpy(packed), non_blocking=True)
            self.seq_lens_cpu[:n] = packed[4]
        self.data[:, n:] = self.empty
        self.seq_lens_cpu[n:] = 1
        return self.batch


class Static8(BucketRunner):
    def __init__(self, device):
        self.device, self.entries = device, []  # (key, recording) of each bucket

    def input_buffers(self, key, spec, page_table, device):
        return Static(key, spec, page_table, device)

    def buckets(self, max_rows):
        sizes = {1, 2, 4, *range(8, max_rows, 8), max_rows}
        return [GraphKey(size) for size in sorted(sizes) if size <= max_rows]

    def capture(self, keys, build, forward):
        recorder = Recorder(self.device)
        made = [(key, recorder.record(forward, build(key))) for key in sorted(keys, reverse=True)]
        self.entries = made[::-1]

    def pick(self, rows, q_len, uniform):
        if uniform and q_len == 1:
            for key, _ in self.entries:
                if key.rows >= rows:
                    return key
        return None

    def run(self, key):
        return dict(self.entries)[key].replay()

    def close(self):
        self.entries = []


@hookimpl
def minisgl_configs():
    yield "graph", "mine", Mine
