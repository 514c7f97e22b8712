"""The built-in tokenizers (group `tokenizer`), one file each. `exact` has the code of `tokenizer=auto`."""
