"""Training of `tutor`, `tutor-moe`, `tutor-hybrid` and `tutor-draft` on text that is generated during training.

    python -m minisgl.chapters.tutor.train --out runs/tutor --minutes 8 --device cuda
    python -m minisgl.chapters.tutor.train --out runs/tiny --steps 30 --rows 2 --length 256     # a short run on a CPU
    python -m minisgl.chapters.tutor.train --model tutor-hybrid --out runs/hybrid --minutes 4 --tools --rows 24
    python -m minisgl.chapters.tutor.train --model tutor-draft --out runs/draft --steps 850 --rows 10 --length 512

Worker processes generate batches ahead of the training. The learning rate depends on the progress, which is measured
in steps or in minutes. The checkpoint is saved every `--save-minutes` minutes; the same command resumes from it. The
result is a folder in Hugging Face format.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from minisgl.chapters.tutor import model as models
from minisgl.chapters.tutor.packing import FewToolsPacker, HandbookPacker, Packer, Rows
from minisgl.models.shipped import weights_dir

WARMUP, DECAY = 0.01, 0.5
"""Fractions of the training: the learning rate rises linearly in the first, and falls linearly to zero in the last."""


class Batches(Dataset[Any]):
    """The batches from number ``start`` on. Batch i holds the rows from i * options.rows on."""

    def __init__(self, options: argparse.Namespace, start: int) -> None:
        self.options, self.start = options, start
        self.packer: Packer | None = None  # created in the worker process

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Rows[Tensor]:
        options = self.options
        if self.packer is None:
            self.packer = options.packer(options.tokenizer / "tokenizer.json", options.seed, options.length)
        rows = self.packer.rows((self.start + index) * options.rows, options.rows)
        return Rows(*(torch.from_numpy(array) for array in rows))


def batches(options: argparse.Namespace, start: int) -> Iterator[Rows[Tensor]]:
    """Return the batches from number ``start`` on, which ``options.workers`` processes generate ahead."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ahead: dict[str, Any] = {"prefetch_factor": 8, "multiprocessing_context": "spawn"} if options.workers else {}
    data = Batches(options, start)
    return iter(DataLoader(data, batch_size=None, sampler=itertools.count(), num_workers=options.workers, **ahead))


def token_losses(hidden: Tensor, head: Tensor, rows: Rows[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and the weight of each token except the first of its row: both float32 [rows, length - 1].

    ``hidden`` [rows, length, hidden_size] are the last hidden states, ``head`` is the output matrix. The first token of
    each document has the weight 0.
    """
    logits = F.linear(hidden[:, :-1], head).float()
    targets = rows.tokens[:, 1:].long()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return losses, rows.weights[:, 1:].float() * (rows.documents[:, 1:] == rows.documents[:, :-1])


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate at a progress of 0 to 1: linear rise, then ``peak``, then linear fall to 0."""
    return peak * max(0.0, min(1.0, (progress + 1e-4) / WARMUP, (1 - progress) / DECAY))


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of ``folder``, as a training exported them, into a model of the same architecture."""
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    assert not unexpected, unexpected


class Trainer:
    """Model, optimizer and progress of a training run; a checkpoint saves all three."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.model = models.build(options.model).to(options.device).train()
        matrices = [weight for weight in self.model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in self.model.parameters() if weight.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.rate,
            betas=(0.9, 0.95),
            fused=options.device == "cuda",
        )
        self.step, self.seconds = 0, 0.0
        self.losses = token_losses
        if options.checkpoint and options.checkpoint.exists():
            self.load()
        elif options.start:
            load_weights(self.model, options.start)
        if options.compile:
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.losses = torch.compile(token_losses, dynamic=False)

    def load(self) -> None:
        """Load the checkpoint. Raise SystemExit if the checkpoint is of another model."""
        saved = torch.load(self.options.checkpoint, map_location=self.options.device, weights_only=True)
        if saved["name"] != self.options.model:
            raise SystemExit(
                f"The checkpoint {self.options.checkpoint} holds {saved['name']}, not {self.options.model}."
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]

    def save(self) -> None:
        """Export the model, and write the checkpoint if ``options.checkpoint`` is given."""
        models.export(self.model, self.options.out, self.options.tokenizer)
        if self.options.checkpoint:
            state = {
                "name": self.options.model,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
            }
            part = self.options.checkpoint.with_suffix(".part")
            torch.save(state, part)
            part.replace(self.options.checkpoint)

    def progress(self) -> float:
        """Return the completed fraction of the training; 1 or more at the end."""
        if self.options.steps:
            return float(self.step / self.options.steps)
        return float(self.seconds / (60 * self.options.minutes))

    def batch_losses(self, rows: Rows[Tensor], mask: Any) -> tuple[Tensor, Tensor]:
        """Return the loss and the weight of each token as `token_losses` does. ``mask`` is the attention's."""
        options = {"document_mask": mask, "documents": rows.documents}
        hidden = self.model.model(rows.tokens.long(), use_cache=False, **options).last_hidden_state
        losses, weights = self.losses(hidden, self.model.lm_head.weight, rows)
        return losses, weights

    def train_step(self, rows: Rows[Tensor]) -> tuple[Tensor, Tensor]:
        """Update the model with one batch.

        Returns each row's mean loss on answer tokens [rows], and the weighted mean loss of the batch; both stay on the
        device.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress(), self.options.rate)
        mask = models.document_mask(rows.documents, dense=self.options.dense)
        on_gpu = self.options.device == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            losses, weights = self.batch_losses(rows, mask)
        loss = (losses * weights).sum() / weights.sum()
        total = loss
        if self.options.model == "tutor-moe":
            total = loss + self.options.balance * models.balance_loss(self.model)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        answers = (weights >= 1).float()
        return (losses.detach() * answers).sum(1) / answers.sum(1).clamp(min=1), loss.detach()

    def run(self) -> None:
        """Train until the end: show progress, report losses by domain, and save at intervals."""
        options = self.options
        source = batches(options, self.step)
        last, saved = time.monotonic(), time.monotonic()
        bar = tqdm(
            total=100, initial=round(100 * self.progress()), unit="%", desc=options.model, mininterval=options.log
        )
        reported, done = time.monotonic(), self.progress()
        while done < 1:
            rows = Rows(*(array.to(options.device, non_blocking=True) for array in next(source)))
            by_row, loss = self.train_step(rows)
            self.step += 1
            now = time.monotonic()
            if now - reported > options.log or self.step == 1:
                self.report(bar, by_row, loss)
                now = reported = time.monotonic()
            self.seconds += now - last
            last = now
            progress = min(1.0, self.progress())
            bar.update(100 * (progress - done))
            done = progress
            if now - saved > 60 * options.save_minutes:
                self.save()
                saved = last = time.monotonic()
        self.report(bar, by_row, loss)
        bar.close()
        self.save()

    def report(self, bar: tqdm[Any], by_row: Tensor, loss: Tensor) -> None:
        """Print the loss of the batch, and the loss on answer tokens by domain."""
        domains: dict[str, list[float]] = {}
        first = (self.step - 1) * self.options.rows
        for i, value in enumerate(by_row.tolist()):
            domains.setdefault(self.options.packer.domain_of(first + i), []).append(value)
        means = "  ".join(f"{name} {sum(values) / len(values):.4f}" for name, values in sorted(domains.items()))
        bar.write(f"step {self.step}  {self.seconds:.0f} s  loss {loss.item():.4f}  {means}")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options of a training."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tools",
        action="store_const",
        const=FewToolsPacker,
        default=Packer,
        dest="packer",
        help="let every sixth row hold conversations with tools, so that the model needs no tuning for them",
    )
    parser.add_argument(
        "--handbooks",
        action="store_const",
        const=HandbookPacker,
        dest="packer",
        help="as --tools, but every second row is about handbooks, which are learned last",
    )
    parser.add_argument("--model", choices=models.NAMES, default="tutor")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the trained model to")
    parser.add_argument("--start", type=Path, help="folder of a trained model to begin with its weights")
    parser.add_argument("--checkpoint", type=Path, help="file to save to, and to resume from if it exists")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="training time in minutes, without the time of saves")
    length.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--rows", type=int, default=40, help="rows per batch (multiples of 20 hold each domain by its share)"
    )
    parser.add_argument("--length", type=int, default=models.CONTEXT, help="tokens per row")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss of tutor-moe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(0, cores - 2), help="processes that generate text")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="use torch.compile")
    parser.add_argument(
        "--dense", action="store_true", help="use dense masks instead of FlexAttention (always so on a CPU)"
    )
    parser.add_argument("--save-minutes", type=float, default=2, help="minutes between two saves")
    parser.add_argument("--log", type=float, default=10, help="seconds between two lines of losses")
    default = weights_dir("tutor")
    parser.add_argument("--tokenizer", type=Path, default=default, help="folder with the tokenizer's files")
    return parser


def parse(arguments: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    options = (parser or make_parser(__doc__)).parse_args(arguments)
    options.dense |= options.device == "cpu"
    return options


def main() -> None:
    torch.set_float32_matmul_precision("high")
    Trainer(parse()).run()


if __name__ == "__main__":
    main()
