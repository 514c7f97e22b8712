"""Measure the average batch: decode rows and prompt tokens per step."""

from minisgl import hookimpl


class BatchSize:
    def __init__(self):
        self.steps = self.decode_rows = self.prompt_tokens = 0

    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs, now):
        self.steps += 1
        self.decode_rows += step.num_decode
        self.prompt_tokens += len(step.input_ids) - step.num_decode
        if self.steps % 100 == 0:
            rows, tokens = self.decode_rows / self.steps, self.prompt_tokens / self.steps
            print(f"{now:.3f} s: {rows:.1f} decode rows and {tokens:.1f} prompt tokens per step", flush=True)
