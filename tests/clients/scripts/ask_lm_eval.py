"""The package ``lm-eval``: log-likelihoods of a local server, compared with those that transformers computes."""

import os
from typing import Any

import torch
from cases import MODEL, URL, case, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = os.environ["MINISGL_MODEL"]
PAIRS = [("What is a KV cache?", " A KV cache keeps"), ("One two three", " four five"), ("A page", " of the pool")]


def model() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{URL}/completions", model=MODEL, tokenizer=FOLDER, tokenizer_backend="huggingface", max_length=512,
        max_retries=1, batch_size=2,
    )  # fmt: skip


@case
def loglikelihood() -> Any:
    """Return the largest difference from transformers' values, and whether all continuations are as likely as there."""
    lm = model()
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    got = lm.loglikelihood(requests, disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    differences = []
    for (context, continuation), (value, greedy) in zip(PAIRS, got, strict=True):
        ids = tokenizer(context + continuation).input_ids
        start = len(ids) - len(lm._encode_pair(context, continuation)[1])
        with torch.no_grad():
            scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        chosen = scores[range(start - 1, len(ids) - 1), ids[start:]]
        assert greedy == (scores[start - 1 : -1].argmax(-1).tolist() == ids[start:])
        differences.append(abs(value - float(chosen.sum())))
    return max(differences)


@case
def completion() -> Any:
    given = Instance("generate_until", {}, ("The KV cache", {"until": ["zz"], "max_gen_toks": 8}), 0)
    return model().generate_until([given], disable_tqdm=True)[0]


run()
