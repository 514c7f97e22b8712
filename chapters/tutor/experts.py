"""Statistics of which experts of `tutor-moe` compute which domain of text, and of the loss without one of them.

    python -m minisgl.chapters.tutor.experts                      # a table of the layer in which domains differ most
    python -m minisgl.chapters.tutor.experts --silence            # also the loss without each expert (takes longer)
    python -m minisgl.chapters.tutor.experts --json shares.json   # all layers
    python -m minisgl.chapters.tutor.experts --svg experts.svg    # all layers, as a heat map

This module counts the router's choices on text of one domain, and silences experts. `heatmap` draws the counts. The
option `knock_out` serves the model without an expert: ``python -m minisgl model=tutor-moe knock_out=5:3``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from minisgl.chapters.tutor.corpus import SHARES, conversation
from minisgl.chapters.tutor.heatmap import draw
from minisgl.chapters.tutor.packing import segments
from minisgl.models.shipped import weights_dir

Sample = tuple[Tensor, Tensor]


def samples(domain: str, count: int, tokenizer: Tokenizer, seed: int = 12345) -> list[Sample]:
    """Return ``count`` conversations of a domain.

    Each is (token ids [1, length], bool mask [length] of the tokens that belong to an answer). Conversations longer
    than 2048 tokens are cut off.
    """
    rng = random.Random(f"experts {seed} {domain}")
    out = []
    for _ in range(count):
        ids: list[int] = []
        answer: list[bool] = []
        for text, weight in segments(conversation(rng, domain, 400)):
            tokens = tokenizer.encode(text).ids
            ids += tokens
            answer += [weight >= 1] * len(tokens)
        out.append((torch.tensor([ids[:2048]]), torch.tensor(answer[:2048])))
    return out


@torch.inference_mode()
def use(model: PreTrainedModel, texts: list[Sample]) -> Tensor:
    """Return each expert's share of the router's choices: float32 [layers, experts], where each row sums to 1."""
    counts: Tensor | None = None
    for ids, _ in texts:
        logits = torch.stack(model(ids, output_router_logits=True, use_cache=False).router_logits)
        chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices  # [layers, tokens, chosen]
        hits = F.one_hot(chosen, logits.shape[-1]).sum((1, 2)).float()
        counts = hits if counts is None else counts + hits
    assert counts is not None, "texts is empty"
    return counts / counts.sum(-1, keepdim=True)


@torch.inference_mode()
def loss(model: PreTrainedModel, texts: list[Sample]) -> float:
    """Return the mean cross-entropy loss on the tokens of answers."""
    losses = []
    for ids, answer in texts:
        logits = model(ids, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, ids[0, 1:], reduction="none")[answer[1:]])
    return torch.cat(losses).mean().item()


@contextmanager
def silenced(model: PreTrainedModel, layer: int, expert: int) -> Iterator[None]:
    """Silence one expert of one layer within the context: its output is zero, but the router still chooses it."""
    weight = model.model.layers[layer].mlp.experts.down_proj
    kept = weight.data[expert].clone()
    weight.data[expert] = 0
    try:
        yield
    finally:
        weight.data[expert] = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=None, help="folder of a mixture-of-experts model (default: the shipped tutor-moe)"
    )
    parser.add_argument("--conversations", type=int, default=30, help="number of conversations of each domain")
    parser.add_argument("--silence", action="store_true", help="also print the loss without each expert")
    parser.add_argument("--json", type=Path, help="file to write the shares of all layers to")
    parser.add_argument("--svg", type=Path, help="file to draw the shares of all layers to")
    options = parser.parse_args()
    folder = options.model or weights_dir("tutor-moe")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = {domain: samples(domain, options.conversations, tokenizer) for domain in SHARES}
    shares = {domain: use(model, texts[domain]) for domain in SHARES}
    table = torch.stack(list(shares.values()))  # [domains, layers, experts]
    layer = int(table.std(0).mean(-1).argmax())
    experts = range(table.shape[-1])
    print(f"layer {layer}: percent of the router's choices (an even split is {100 / len(experts):.1f})")
    print(f"{'':<10}" + "".join(f"{f'expert {i}':>10}" for i in experts))
    for domain, share in shares.items():
        print(f"{domain:<10}" + "".join(f"{100 * value:>10.1f}" for value in share[layer].tolist()))
    if options.silence:
        print(f"\nloss on answers, and its increase without one expert of layer {layer}")
        print(f"{'':<10}{'all':>10}" + "".join(f"{f'without {i}':>10}" for i in experts))
        for domain in SHARES:
            full, increases = loss(model, texts[domain]), []
            for expert in experts:
                with silenced(model, layer, expert):
                    increases.append(loss(model, texts[domain]) - full)
            print(f"{domain:<10}{full:>10.4f}" + "".join(f"{value:>+10.4f}" for value in increases), flush=True)
    report = {domain: share.tolist() for domain, share in shares.items()}
    if options.svg:
        options.svg.write_text(draw(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
