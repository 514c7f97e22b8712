"""Functions that run a student's plugin in an engine, for gates that compare answers. They judge nothing.

Under ``lab grade`` the functions in ``__all__`` run in the student's process, and the grader compares what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.chapters.lab.catalog import find
from minisgl.chapters.lab.grader.gate import Student
from minisgl.core import SamplingParams

F32 = npt.NDArray[np.float32]

__all__ = ["chat", "generate", "installed_plugin", "linked_logits", "moe_logits"]


def generate(
    overrides: Sequence[str], prompts: Sequence[str], params: SamplingParams, times: int
) -> list[list[list[int]]]:
    """Generate from all prompts at once, ``times`` times, on a CPU. Return the token ids: [times][prompts][tokens]."""
    from minisgl.llm import LLM

    with LLM("tutor", overrides=["device=cpu", *overrides]) as llm:
        return [[o.token_ids for o in llm.generate(list(prompts), params, progress=False)] for _ in range(times)]


def chat(
    overrides: Sequence[str], chats: Sequence[str], params: Sequence[SamplingParams]
) -> tuple[list[list[int]], dict[str, int]]:
    """Answer each chat of one message with each of ``params``, on a CPU.

    Return the token ids [params * chats][tokens], and the scheduler's counts of steps and drafts. With speculation, the
    number of drafts is fixed: the clock does not decide it.
    """
    from minisgl.llm import LLM

    asked = [[{"role": "user", "content": text}] for text in chats]
    with LLM("tutor", overrides=["device=cpu", *overrides]) as llm:
        if llm.scheduler.speculation is not None:
            llm.scheduler.speculation.adapt = False
        found = [o.token_ids for p in params for o in llm.chat(asked, p, progress=False)]
        stats: dict[str, Any] = llm.scheduler.stats()
    return found, {name: int(stats.get(name, 0)) for name in ("steps", "draft_tokens", "accepted_draft_tokens")}


def _loaded(lab: str, path: str) -> Student:
    student = Student(find(lab), Path(path))
    student.load()
    return student


def installed_plugin(lab: str, path: str) -> dict[str, Any]:
    """Build and install a student's package, and return the plugin that minisgl finds in it."""
    found: dict[str, Any] = find(lab).module.installed(Path(path))
    return found


def moe_logits(lab: str = "", path: str = "") -> F32:
    """Return logits of `tutor-moe`, float32 [positions, vocabulary], with the MoE backend of a student's file.

    Without a file: with the shipped backend.
    """
    import torch

    from minisgl.models.resolve import resolve_model
    from minisgl.testing.paged import PagedModel

    ids = torch.arange(100, 148)
    moe = _loaded(lab, path).make(device=torch.device("cpu")) if path else None
    model = PagedModel(resolve_model("tutor-moe"), moe=moe, max_seq_len=64, max_running_requests=1)
    rows = [model.run([(0, 0, ids[:40])]), *(model.run([(0, i, ids[i : i + 1])]) for i in range(40, 48))]
    logits: F32 = torch.cat([row for (row,) in rows]).float().numpy()
    return logits


def linked_logits(ranks: int, lab: str = "", path: str = "") -> list[F32]:
    """Return each rank's logits of `tutor`, float32 [positions, vocabulary].

    The communicator of a student's file links the ranks. Without a file there is one rank.
    """
    import torch

    from minisgl.models.resolve import resolve_model
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.testing.paged import PagedModel
    from minisgl.testing.ranks import run_ranks

    manager, ids, checkpoint = PluginManager.load(), torch.arange(100, 124), resolve_model("tutor")

    def drive(comm: Any = None) -> torch.Tensor:
        model = PagedModel(checkpoint, comm=comm, max_seq_len=32, max_running_requests=1, manager=manager)
        rows = [model.run([(0, 0, ids[:20])]), *(model.run([(0, i, ids[i : i + 1])]) for i in range(20, 24))]
        return torch.cat([row for (row,) in rows])

    if not path:
        return [drive().float().numpy()]
    student, cpu = _loaded(lab, path), torch.device("cpu")

    def link(rank: int, size: int, address: str) -> Any:
        return student.make(rank=rank, size=size, address=address, device=cpu)

    return [logits.float().numpy() for logits in run_ranks(ranks, drive, make=link, limit=8.0)]
