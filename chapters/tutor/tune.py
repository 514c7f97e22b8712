"""Fine-tuning of `tutor` on conversations with tools.

    python -m minisgl.chapters.tutor.tune --out runs/tools --minutes 3 --device cuda
    python -m minisgl.chapters.tutor.tune --out runs/tools --steps 30 --rows 3 --length 512 --score 10    # on a CPU

Every third row holds conversations with tools (`tools`), on which the model learns the text, as in `train`. The other
rows hold the text of the first training. There the model learns the probabilities of the weights with which it began
(Learning without Forgetting, arXiv:1606.09282), so that its other answers stay as they are. The result is a folder in
Hugging Face format, whose chat template has tools. Its scores are printed at the end.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from minisgl.chapters.tutor import model as models
from minisgl.chapters.tutor import score
from minisgl.chapters.tutor.packing import Rows, ToolPacker
from minisgl.chapters.tutor.tokenizer import CHAT_TEMPLATE
from minisgl.chapters.tutor.train import Trainer, load_weights, make_parser, parse, token_losses
from minisgl.models.shipped import weights_dir


def tune_losses(
    hidden: Tensor, teacher_hidden: Tensor, head: Tensor, teacher_head: Tensor, rows: Rows[Tensor], replayed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss and the weight of each token as `token_losses` does.

    The loss of a token in the rows ``replayed`` (bool [rows, 1]) is the Kullback-Leibler divergence from the teacher's
    probabilities, which ``teacher_hidden`` [rows, length, hidden_size] and ``teacher_head`` give.
    """
    losses, weights = token_losses(hidden, head, rows)
    ours = F.linear(hidden[:, :-1], head).float().log_softmax(-1)
    theirs = F.linear(teacher_hidden[:, :-1], teacher_head).float().log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    return torch.where(replayed, divergence, losses), weights


class Tuner(Trainer):
    """A training that begins with the weights of ``options.start``, and keeps them as its teacher."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.teacher: PreTrainedModel = models.build("tutor").to(options.device).eval().requires_grad_(False)
        load_weights(self.teacher, options.start)
        self.tune_losses: Any = tune_losses
        if options.compile:
            for layer in self.teacher.model.layers:
                layer.compile(dynamic=False)
            self.tune_losses = torch.compile(tune_losses, dynamic=False)

    def batch_losses(self, rows: Rows[Tensor], mask: Any) -> tuple[Tensor, Tensor]:
        tokens = rows.tokens.long()
        hidden = self.model.model(tokens, use_cache=False, document_mask=mask).last_hidden_state
        with torch.no_grad():
            teacher_hidden = self.teacher.model(tokens, use_cache=False, document_mask=mask).last_hidden_state
        first = self.step * self.options.rows
        replayed = [[self.options.packer.domain_of(first + i) != "tools"] for i in range(len(tokens))]
        heads = self.model.lm_head.weight, self.teacher.lm_head.weight
        found: tuple[Tensor, Tensor] = self.tune_losses(
            hidden, teacher_hidden, *heads, rows, torch.tensor(replayed, device=tokens.device)
        )
        return found

    def save(self) -> None:
        super().save()
        path = self.options.out / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}, indent=2) + "\n")


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser(__doc__)
    parser.set_defaults(packer=ToolPacker, rate=1e-3, rows=32, start=weights_dir("tutor"))
    parser.add_argument("--score", type=int, default=200, help="held-out questions per family at the end; 0 for none")
    options = parse(arguments, parser)
    if options.model != "tutor":
        parser.error("only tutor can be tuned")
    return options


def main() -> None:
    torch.set_float32_matmul_precision("high")
    options = options_of()
    Tuner(options).run()
    if options.score:
        score.main(["--model", str(options.out), "--device", options.device, "--size", str(options.score)])


if __name__ == "__main__":
    main()
