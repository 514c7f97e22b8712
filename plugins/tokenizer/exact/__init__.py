"""A tokenizer with the tokens and the prompts of transformers, which refuses what a chat template would drop."""
