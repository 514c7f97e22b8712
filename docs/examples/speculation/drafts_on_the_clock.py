"""CPU time and tokens a step of `tutor` with and without drafts, on held-out copies and look-ups, in turns.

It prints the fastest of three rounds, after a first round that fills the prefix cache, and with `suffix` the memory of
earlier answers too.
"""

import time

from minisgl import LLM, SamplingParams
from minisgl.chapters.tutor.corpus import exam

ROUNDS = 3
greedy = SamplingParams(max_tokens=200, temperature=0.0)
names = ("none", "ngram", "suffix")
llms = {name: LLM("tutor", overrides=["device=cpu", "num_pages=3000", f"speculation={name}"]) for name in names}


def measure(llm: LLM, chats: list[list[dict[str, str]]], batch: int) -> tuple[float, float]:
    """Return seconds of CPU time, and tokens a step."""
    start, steps, tokens = time.process_time(), llm.scheduler.stats()["steps"], 0
    for i in range(0, len(chats), batch):
        tokens += sum(len(output.token_ids) for output in llm.chat(chats[i : i + batch], greedy))
    return time.process_time() - start, tokens / (llm.scheduler.stats()["steps"] - steps)


for family in ("copy", "lookup"):
    chats = [list(question.messages) for question in exam(family, 40, seed=5)]
    for batch in (1, 8):
        rounds = [{name: measure(llm, chats, batch) for name, llm in llms.items()} for _ in range(1 + ROUNDS)]
        for name in names:
            seconds, tokens_per_step = min(one[name] for one in rounds[1:])
            print(f"{family}, {batch} at a time, {name}: {seconds:.2f} s CPU, {tokens_per_step:.2f} tokens a step")
for llm in llms.values():
    llm.close()
