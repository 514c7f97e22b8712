"""A kit to test model classes with: a small random checkpoint, and transformers' logits for it.

However a sequence is cut into chunks, pages and batches, and over ranks, its logits must be the same. Knows the
`minisgl.models.decoder.Model` protocol and no architecture: whoever writes a model can test it with this.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.kernel.norm import add_rms_norm
from minisgl.models.config import ModelConfig
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

__all__ = ["Exchanged", "ModelConformance"]


class Exchanged:
    """A communicator that counts: ``calls`` in their order, and the ``bytes`` of their tensors, by kind.

    An all-reduce with a norm behind it counts as an all-reduce. It asks ``inner`` to do the work."""

    def __init__(self, inner: Communicator):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.calls: list[str] = []
        self.bytes: dict[str, int] = {}

    def _count(self, kind: str, x: Tensor) -> None:
        self.calls.append(kind)
        self.bytes[kind] = self.bytes.get(kind, 0) + x.nbytes

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count("all_reduce", x)
        return self.inner.all_reduce(x)

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self._count("all_gather", x)
        return self.inner.all_gather(x, dim)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._count("broadcast", x)
        return self.inner.broadcast(x, src)

    def exchange(self, data: bytes) -> list[bytes]:
        return self.inner.exchange(data)

    def capturing(self) -> AbstractContextManager[None]:
        return self.inner.capturing()

    def close(self, abort: bool = False) -> None:
        self.inner.close(abort)


class ModelConformance:
    """What every model class must do. Subclass it in a test file, name it ``Test…`` and say how to make yours.

    ``architecture`` names one of `minisgl.testing.checkpoints.ARCHITECTURES`; for another, override `checkpoint` and
    `reference`. transformers is imported when a test runs."""

    architecture = ""
    overrides: dict[str, Any] = {}
    """Fields of the checkpoint's config.json."""
    ranks: tuple[int, ...] = (2,)
    """How many ranks it is cut over; each must divide the checkpoint's heads."""
    tolerance = 1e-4
    """Greatest difference of a logit in float32."""

    def make(self) -> Callable[..., Any]:
        """Your class, which is called as ``cls(config, ctx)``."""
        raise NotImplementedError

    def checkpoint(self, folder: Path) -> Path:
        """Write a small checkpoint with random weights into ``folder``; returns its directory."""
        return tiny_checkpoint(self.architecture, folder, **self.overrides)

    def reference(self, path: Path, ids: Tensor) -> Tensor:
        """What the logits must be, [len(ids), vocab]: row i scores the token after ``ids[: i + 1]``."""
        logits: Tensor = Oracle(path).logits(ids)
        return logits.float()

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="minisgl-model-")

    @cached_property
    def path(self) -> Path:
        """The checkpoint, made once for each test."""
        return self.checkpoint(Path(self._folder.name))

    def model(self, **options: Any) -> PagedModel:
        """Yours with the checkpoint's weights; ``options`` are `PagedModel`'s."""
        return PagedModel(self.path, **{"max_len": 64, "slots": 3, "model": self.make(), **options})

    def ids(self, length: int, seed: int = 0) -> Tensor:
        """A random sequence."""
        vocab = ModelConfig.from_dir(self.path).vocab_size
        return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))

    def agree(self, got: Tensor, want: Tensor, what: str) -> None:
        """Raise AssertionError that names the first position whose logits differ."""
        assert got.dtype == torch.float32, f"{what}: logits are {got.dtype}, not float32"
        assert got.shape == want.shape, f"{what}: logits have the shape {list(got.shape)}, not {list(want.shape)}"
        off = (got - want).abs().amax(-1)
        wrong = (~(off <= self.tolerance)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise AssertionError(f"{what}: the logits of position {at} are off by {float(off[at]):.3g}")

    def test_logits_are_transformers(self) -> None:
        ids = self.ids(40)
        (got,) = self.model().run([(0, 0, ids)])
        self.agree(got, self.reference(self.path, ids), "a whole prompt")

    def test_chunks_pages_and_neighbours_do_not_matter(self) -> None:
        a, b = self.ids(30), self.ids(21, seed=1)
        want_a, want_b = self.reference(self.path, a), self.reference(self.path, b)
        for page_size in (1, 16):
            model, label = self.model(page_size=page_size), f"page_size={page_size}"
            (got,) = model.run([(2, 0, a[:17])])
            self.agree(got, want_a[:17], f"{label}, a chunk")
            got_a, got_b = model.run([(2, 17, a[17:18]), (0, 0, b[:9])])
            self.agree(got_a, want_a[17:18], f"{label}, a decode row beside a prompt")
            self.agree(got_b, want_b[:9], f"{label}, a prompt beside a decode row")
            got_a, got_b = model.run([(2, 18, a[18:19]), (0, 9, b[9:20])])
            self.agree(got_a, want_a[18:19], f"{label}, a decode row")
            self.agree(got_b, want_b[9:20], f"{label}, a chunk behind a cached prefix")
            got_b, got_a = model.run([(0, 20, b[20:21]), (2, 19, a[19:20])])
            self.agree(got_a, want_a[19:20], f"{label}, two decode rows")
            self.agree(got_b, want_b[20:21], f"{label}, two decode rows")

    def test_ranks_agree_with_one_and_read_only_their_part(self) -> None:
        ids = self.ids(24)
        alone = self.model()
        (want,) = alone.run([(0, 0, ids)])
        for size in self.ranks:

            def work(comm: Communicator) -> tuple[list[Tensor], int]:
                model = self.model(comm=comm)
                rows = [model.run([(0, 0, ids[:15])]), model.run([(0, 15, ids[15:23])]), model.run([(0, 23, ids[23:])])]
                return [row for (row,) in rows], model.bytes_read

            for rank, (rows, read) in enumerate(run_ranks(size, work)):
                self.agree(torch.cat(rows), want, f"rank {rank} of {size}")
                most = alone.bytes_read * (1 + 1 / size) / 2  # norms, and kv heads that the ranks share, are copied
                assert read < most, f"rank {rank} of {size} read {read} of {alone.bytes_read} bytes: what did it cut?"

    def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(self) -> None:
        from safetensors.torch import load_file, save_file

        file = self.path / "model.safetensors"
        tensors = load_file(file)
        name = sorted(name for name in tensors if "layers.1" in name)[0]
        del tensors[name]
        save_file(tensors, file)
        said = ""
        try:
            self.model()
        except ConfigError as error:
            said = str(error)
        assert said, f"a checkpoint without {name} was loaded"
        assert name in said, f"the error does not name {name}: {said}"
