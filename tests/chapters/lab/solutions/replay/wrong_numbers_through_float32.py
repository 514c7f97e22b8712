# causes: numbers
# gate: buffers
"""Torch.Tensor(columns) is float32, so KV locations above 2^24 are rounded."""


class Buffers:
    def padding(self) -> I32:
        scratch_row = self.spec.max_running_requests
        scratch_location = self.spec.num_pages * self.spec.page_size
        return np.array([0, 0, scratch_location, scratch_row, 1], dtype=np.int32)

    def fill(self, packed: I32 | None) -> AttnBatch:
        columns = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            columns[:, : packed.shape[1]] = packed
        self.packed.copy_(torch.Tensor(columns))
        return AttnBatch(
            num_decode=self.key.rows,
            cu_seqlens_q_cpu=self.cu_seqlens_q_cpu,
            seq_lens_cpu=columns[4],
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=self.packed[4],
            req_pool_indices=self.packed[3],
            page_table=self.page_table,
            graph_key=self.key,
        )


class MyRunner:
    def sizes(self, max_rows: int) -> list[int]:
        sizes = []
        size = 1
        while size < max_rows:
            sizes.append(size)
            size *= 2
        return [*sizes, max_rows] if max_rows > 0 else []

    def bucket(self, rows: int) -> GraphKey | None:
        return min((key for key in self.recordings if key.rows >= rows), key=lambda key: key.rows, default=None)

    def capture(
        self, keys: Sequence[GraphKey], build: Callable[[GraphKey], Any], forward: Callable[[Any], torch.Tensor]
    ) -> None:
        from minisgl.plugins.graph.replaying.record import Recorder

        recorder = Recorder(self.device)
        for key in sorted(keys, key=lambda key: key.rows, reverse=True):
            self.recordings[key] = recorder.record(forward, build(key))
