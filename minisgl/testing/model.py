"""A conformance kit for model classes: compares the logits for a small random checkpoint with those of transformers.

The logits of a sequence must not depend on how it is split into chunks, pages, batches and ranks. The kit uses only the
protocol `minisgl.models.decoder.Model`, so it applies to every architecture.
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
from minisgl.models.config import ModelConfig
from minisgl.plugins.kernels.ops.norm import add_rms_norm
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

__all__ = ["CountingCommunicator", "ModelConformance"]


class CountingCommunicator(Communicator):
    """A communicator that passes all calls on to the communicator ``inner`` and records the collectives of tensors.

    ``calls`` lists the kinds of the collectives in order, and ``bytes`` maps each kind to the bytes of its tensors. An
    all-reduce followed by a norm (`all_reduce_norm`) is recorded as an all-reduce. `exchange` is not recorded.
    """

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
    """The tests that every model class must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, set ``architecture`` and implement
    `make`. For an architecture that is not in `minisgl.testing.checkpoints.ARCHITECTURES`, also override `checkpoint`
    and `reference`. transformers is imported when a test runs.
    """

    architecture = ""
    """A key of `minisgl.testing.checkpoints.ARCHITECTURES`."""
    overrides: dict[str, Any] = {}
    """Fields of the checkpoint's config.json that differ from the default."""
    ranks: tuple[int, ...] = (2,)
    """Numbers of tensor-parallel ranks to test. Each must divide the checkpoint's number of heads."""
    tolerance = 1e-4
    """Largest allowed difference of a logit, in float32."""

    def make(self) -> Callable[..., Any]:
        """Return your model class. The kit calls it as ``cls(config, ctx)``."""
        raise NotImplementedError("make(self) must return the model class to test")

    def checkpoint(self, folder: Path) -> Path:
        """Write a small checkpoint with random weights into ``folder`` and return its directory."""
        return tiny_checkpoint(self.architecture, folder, **self.overrides)

    def reference(self, path: Path, ids: Tensor) -> Tensor:
        """Return the expected logits, [len(ids), vocab] in float32. Row i scores the token after ``ids[: i + 1]``."""
        logits: Tensor = Oracle(path).logits(ids)
        return logits.float()

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="minisgl-model-")

    @cached_property
    def path(self) -> Path:
        """Directory of the checkpoint, which is written once for each test."""
        return self.checkpoint(Path(self._folder.name))

    def model(self, **options: Any) -> PagedModel:
        """Build your model with the checkpoint's weights. ``options`` are `PagedModel`'s."""
        return PagedModel(self.path, **{"max_seq_len": 64, "max_running_requests": 3, "model": self.make(), **options})

    def ids(self, length: int, seed: int = 0) -> Tensor:
        """Return random token ids, [length]."""
        vocab = ModelConfig.from_dir(self.path).vocab_size
        return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))

    def agree(self, got: Tensor, want: Tensor, what: str) -> None:
        """Raise AssertionError that names the first position whose logits ``got`` differ from ``want``."""
        assert got.dtype == torch.float32, f"{what}: the dtype of the logits is {got.dtype}, expected torch.float32"
        assert got.shape == want.shape, (
            f"{what}: the shape of the logits is {list(got.shape)}, expected {list(want.shape)}"
        )
        off = (got - want).abs().amax(-1)
        wrong = (~(off <= self.tolerance)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise AssertionError(
                f"{what}: the logits of position {at} are off by {float(off[at]):.3g}; expected at most "
                f"{self.tolerance:g}"
            )

    def test_whole_prompt(self) -> None:
        """The logits of a prompt computed in one step equal the reference."""
        ids = self.ids(40)
        (got,) = self.model().run([(0, 0, ids)])
        self.agree(got, self.reference(self.path, ids), "a whole prompt")

    def test_chunks_and_batches(self) -> None:
        """The logits do not depend on chunks, page size, and other rows of the batch."""
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

    def test_tensor_parallel(self) -> None:
        """Several ranks compute the same logits as one rank, and each reads only its part of the weights."""
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
                # The limit is above 1 / size of the bytes: every rank reads all norms, and ranks may share KV heads.
                most = alone.bytes_read * (1 + 1 / size) / 2
                assert read < most, (
                    f"rank {rank} of {size} read {read} of {alone.bytes_read} bytes of the checkpoint; expected less "
                    f"than {most:.0f}, because each rank should read only its part"
                )

    def test_missing_tensor(self) -> None:
        """A checkpoint without a needed tensor is refused with a `ConfigError` that names the tensor."""
        from safetensors.torch import load_file, save_file

        file = self.path / "model.safetensors"
        tensors = load_file(file)
        name = sorted(name for name in tensors if "layers.1" in name)[0]
        del tensors[name]
        save_file(tensors, file)
        message = ""
        try:
            self.model()
        except ConfigError as error:
            message = str(error)
        assert message, f"expected a ConfigError: the checkpoint has no tensor {name}, but it was loaded"
        assert name in message, f"expected an error that names the missing tensor {name}; the error was: {message}"
