"""Measure the share of the prompt tokens that a cluster finds in its caches.

Usage: python hit_rate.py http://127.0.0.1:1919
"""

import asyncio
import random
import sys

import openai

DOCUMENTS, WORDS, REQUESTS, CLIENTS = 24, 260, 480, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"


async def main(url):
    rng = random.Random(7)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 6))) for _ in range(500)]
    documents = [" ".join(rng.choices(words, k=WORDS)) for _ in range(DOCUMENTS)]
    popularity = [1 / (rank + 1) for rank in range(DOCUMENTS)]  # Zipf's law
    chosen = rng.choices(documents, popularity, k=REQUESTS)
    prompts = iter([f"{document}\nQuestion {i}: what follows?" for i, document in enumerate(chosen)])
    total = cached = 0
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    model = (await client.models.list()).data[0].id

    async def ask():
        nonlocal total, cached
        for prompt in prompts:  # the clients share the prompts
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": prompt}], max_tokens=8
            )
            total += answer.usage.prompt_tokens
            cached += answer.usage.prompt_tokens_details.cached_tokens

    await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    print(f"{REQUESTS} requests, {total} prompt tokens, {cached / total:.1%} of them cached")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
