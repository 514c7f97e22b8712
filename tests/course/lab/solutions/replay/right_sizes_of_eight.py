"""Multiples of eight above eight, buffers that are written column by column, and its own table of what to replay."""

from dataclasses import dataclass

import numpy as np
import torch

from minisgl import hookimpl
from minisgl.attention import AttnBatch, GraphKey
from minisgl.engine.inputs import ModelInputs
from minisgl.engine.record import Recorder


@dataclass
class Mine:
    """Buckets as cuda has them."""


class Static:
    def __init__(self, key, spec, table, device):
        scratch = spec.num_pages * spec.page_size
        self.empty = torch.tensor(
            [[0], [0], [scratch], [spec.max_running_requests], [1]], dtype=torch.int32, device=device
        )
        self.data = self.empty.repeat(1, key.rows)
        self.tokens = ModelInputs(self.data, pending=True)
        self.host_lengths = np.ones(key.rows, np.int32)
        host_ends = np.arange(key.rows + 1, dtype=np.int32)
        ends = torch.from_numpy(host_ends).to(device)
        lengths = self.data[4]
        self.batch = AttnBatch(key.rows, host_ends, self.host_lengths, ends, lengths, self.data[3], table, key)

    def fill(self, packed):
        n = 0 if packed is None else packed.shape[1]
        if n:
            self.data[:, :n] = torch.from_numpy(packed)
            self.host_lengths[:n] = packed[4]
        self.data[:, n:] = self.empty
        self.host_lengths[n:] = 1
        return self.batch


class Static8:
    def __init__(self, device):
        self.device, self.table = device, []

    def input_buffers(self, key, spec, table, device):
        return Static(key, spec, table, device)

    def buckets(self, max_rows):
        sizes = {1, 2, 4, *range(8, max_rows, 8), max_rows}
        return [GraphKey(size) for size in sorted(sizes) if size <= max_rows]

    def capture(self, keys, build, forward):
        recorder = Recorder(self.device)
        made = [(key, recorder.record(forward, build(key))) for key in reversed(keys)]
        self.table = made[::-1]

    def pick(self, rows, q_len, uniform):
        if uniform and q_len == 1:
            for key, _ in self.table:
                if key.rows >= rows:
                    return key
        return None

    def run(self, key):
        return dict(self.table)[key].replay()

    def close(self):
        self.table = []


@hookimpl
def minisgl_configs():
    yield "graph", "mine", Mine


@hookimpl
def minisgl_graph(config, device):
    return Static8(device) if isinstance(config, Mine) else None
