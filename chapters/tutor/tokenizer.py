"""The tokenizer of `tutor`: byte-level BPE learned from the corpus, in which every digit is one token.

This module trains the tokenizer and writes it in Hugging Face's format (`tokenizer.json`, and `tokenizer_config.json`
with the chat template), so that `tokenizers` and transformers can load it.

    python -m minisgl.chapters.tutor.tokenizer --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl.chapters.tutor.corpus import SHARES, conversation

VOCABULARY = 2048
END, START_TURN, END_TURN = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}"
    "{% elif content %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ text(messages[0]['content']) + '\\n\\n' }}{% endif %}"
    "{{ 'You may call these tools:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson }}{{ '\\n' }}{% endfor %}"
    '{{ \'</tools>\\nWrite a call as <tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if tools and loop.first and message['role'] == 'system' %}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n' if loop.first or loop.previtem['role'] != 'tool' else '\\n' }}"
    "{{ '<tool_response>\\n' + text(message['content']) + '\\n</tool_response>' }}"
    "{{ '<|im_end|>\\n' if loop.last or loop.nextitem['role'] != 'tool' else '' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text(message['content']) }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' }}"
    "{{ function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_COVERAGE = (
    "The quick brown fox jumps over the lazy dog. Whatever happened there, everybody should know about something else.",
    "def function(value): return value  # for i in range(10): print(i)",
    '{"role": "user", "content": "text", "model": "tutor", "messages": []}',
)


def corpus_text(seed: int, conversations: int) -> Iterator[str]:
    """Yield conversations of all domains as plain text, from which the BPE merges are learned."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(conversations):
        domain = rng.choices(list(SHARES), list(SHARES.values()))[0]
        talk = conversation(rng, domain, 600)
        yield "\n".join([talk.system or "", *(f"user\n{turn.user}\nassistant\n{turn.answer}" for turn in talk.turns)])
    for line in _COVERAGE:
        yield from [f"system\n{line}"] * 50


def train(seed: int = 0, conversations: int = 20_000) -> Tokenizer:
    """Train the tokenizer on ``conversations`` conversations.

    Ids 0 to 2 are the special tokens. The vocabulary contains all 256 bytes, so any text round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_text(seed, conversations), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END_TURN, "pad_token": END}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": None,
        **special,
        "unk_token": None,
        "additional_special_tokens": [START_TURN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(name)): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for name in SPECIALS
        },
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", {**special, "additional_special_tokens": [START_TURN]})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", type=int, default=20_000)
    options = parser.parse_args()
    tokenizer = train(options.seed, options.conversations)
    save(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} tokens in {options.out}")


if __name__ == "__main__":
    main()
