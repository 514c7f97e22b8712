"""`attention=profiled`: any other attention backend, with a count of steps and query tokens."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.attention import AttentionBackend


@dataclass
class Profiled:
    """Count the steps and the query tokens that another backend computes."""

    backend: str = "auto"
    """Name of the backend that computes attention."""

    def build(self, build_other):
        return ProfiledBackend(build_other(self.backend))


class ProfiledBackend(AttentionBackend):
    def __init__(self, backend):
        self.backend = backend
        self.needs, self.bind = backend.needs, backend.bind
        self.attend, self.forward = backend.attend, backend.forward
        self.steps = self.query_tokens = 0

    def plan(self, batch):
        self.steps += 1
        self.query_tokens += int(batch.cu_seqlens_q_cpu[-1])
        self.backend.plan(batch)


@hookimpl
def minisgl_configs():
    yield "attention", "profiled", Profiled
