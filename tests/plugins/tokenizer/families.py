"""Small tokenizers in the form of public families: files as on the Hugging Face hub, with a vocabulary trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ...tokenizer.conftest import TEXT

WORDS = [
    *TEXT,
    "In 2024, 12345 apples!  Naïve CAFÉ, don't we'll ... \t tabs\n\n  spaces   12 + 3 = x_y; def f(a): return a",
]
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _ENDS
QWEN = LLAMA3.replace("{1,3}", "")
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lo}]*[\p{Ll}\p{Lo}]+|\p{N}|" + _ENDS
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _train(raw: tokenizers.Tokenizer, special: list[str], **options: Any) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, **options)
    raw.train_from_iterator(WORDS, trainer)
    return raw


def _byte_level(special: list[str], pre_tokenizer: Any, bos: str | None = None) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizer, decoders.ByteLevel()
    _train(raw, special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if bos is not None:
        raw.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, raw.token_to_id(bos))]
        )
    return raw


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def _spaces(special: list[str], normalizer: Any, strip: bool, bos: str) -> tokenizers.Tokenizer:
    """Build a BPE tokenizer with "▁" for spaces and byte tokens, as sentencepiece trains them."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizers.Metaspace("▁", "never", split=True)
    _train(trained, [*special, *BYTES])
    source = json.loads(trained.to_str())
    source["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] in special]
    source["pre_tokenizer"] = None
    raw = tokenizers.Tokenizer.from_str(json.dumps(source))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    raw.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, raw.token_to_id(bos))])
    return raw


def _write(folder: Path, raw: tokenizers.Tokenizer, model_type: str, **config: Any) -> None:
    raw.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "4.40.0"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _decoder_of(raw: tokenizers.Tokenizer, *more: AddedToken) -> dict[str, Any]:
    tokens = dict(raw.get_added_tokens_decoder())
    tokens |= {raw.get_vocab_size() + i: token for i, token in enumerate(more)}
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(i): {name: getattr(token, name) for name in fields} for i, token in tokens.items()}


def _llama2_raw(special: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> tokenizers.Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _spaces([*special], normalizer, True, "<s>")


SENTENCEPIECE: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama2(folder: Path, **options: Any) -> None:
    raw = _llama2_raw()
    _write(folder, raw, "llama", **{"tokenizer_class": "LlamaTokenizer", **SENTENCEPIECE, "legacy": False, **options})


def llama3(folder: Path) -> None:
    raw = _byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], _split(LLAMA3), "<|begin_of_text|>")
    raw.model.ignore_merges = True  # type: ignore[attr-defined]
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True}
    _write(folder, raw, "llama", tokenizer_class="PreTrainedTokenizerFast", **names)


def qwen(folder: Path) -> None:
    raw = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _split(QWEN))
    raw.normalizer = normalizers.NFC()
    more = _decoder_of(raw, AddedToken("<tool_call>", special=False), AddedToken("<|box|>", special=True))
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    extra = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "add_prefix_space": False}
    _write(folder, raw, "qwen2", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=more, **names, **extra)


def mistral_tekken(folder: Path) -> None:
    raw = _byte_level(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], _split(TEKKEN), "<s>")
    _write(folder, raw, "mistral", tokenizer_class="LlamaTokenizerFast", add_eos_token=True, **SENTENCEPIECE)


def gemma(folder: Path) -> None:
    raw = _spaces(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"], normalizers.Replace(" ", "▁"), False, "<bos>"
    )
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write(folder, raw, "llama", tokenizer_class="GemmaTokenizer", **names)


def phi3(folder: Path) -> None:
    raw = _llama2_raw()
    more = [AddedToken(text, rstrip=True, special=True) for text in ("<|end|>", "<|user|>", "<|assistant|>")]
    raw.add_tokens(more)
    names = {**SENTENCEPIECE, "eos_token": "<|end|>", "legacy": False, "add_bos_token": False}
    _write(folder, raw, "llama", tokenizer_class="LlamaTokenizer", added_tokens_decoder=_decoder_of(raw), **names)


def deepseek(folder: Path) -> None:
    parts = [pre_tokenizers.Split(Regex(r"[\r\n]"), "isolated"), pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated")]
    parts += [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    raw = _byte_level([bos, eos], pre_tokenizers.Sequence(parts), bos)
    names = {
        key: {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "rstrip": False}
        for key, text in (("bos_token", bos), ("eos_token", eos), ("pad_token", eos))
    }
    _write(folder, raw, "llama", tokenizer_class="LlamaTokenizerFast", add_bos_token=False, legacy=True, **names)


def gpt2(folder: Path, **options: Any) -> None:
    raw = _byte_level(["<|endoftext|>"], pre_tokenizers.ByteLevel(False))
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _write(
        folder, raw, "llama", **{"tokenizer_class": "GPT2TokenizerFast", **names, "add_prefix_space": False, **options}
    )


def falcon(folder: Path) -> None:
    parts = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(False), pre_tokenizers.Digits(False)]
    raw = _byte_level([">>TITLE<<", ">>ABSTRACT<<", "<|endoftext|>"], pre_tokenizers.Sequence(parts))
    special = {"eos_token": "<|endoftext|>", "additional_special_tokens": [">>TITLE<<", ">>ANSWER<<"]}
    _write(folder, raw, "llama", tokenizer_class="PreTrainedTokenizerFast", **special)


def unigram(folder: Path) -> None:
    """Write a tokenizer as of T5, whose text is cleaned up."""
    raw = tokenizers.Tokenizer(models.Unigram())
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    raw.decoder = decoders.Metaspace("▁", "always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>", show_progress=False)
    raw.train_from_iterator(WORDS, trainer)
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "clean_up_tokenization_spaces": True}
    extra = {"extra_special_tokens": {"image_token": "<image>"}}
    _write(folder, raw, "llama", tokenizer_class="PreTrainedTokenizerFast", **names, **extra)


def bert(folder: Path, **options: Any) -> None:
    raw = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece("##")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    raw.train_from_iterator(
        [*WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789"],
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    ids = [("[CLS]", raw.token_to_id("[CLS]")), ("[SEP]", raw.token_to_id("[SEP]"))]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    _write(folder, raw, "llama", tokenizer_class="BertTokenizer", clean_up_tokenization_spaces=True, **options)


def starcoder(folder: Path) -> None:
    parts = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    raw = _byte_level(["<|endoftext|>", "<fim_prefix>", "<fim_suffix>"], parts)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    special = {"additional_special_tokens": ["<|endoftext|>", "<fim_prefix>", "<fim_middle>"]}
    _write(folder, raw, "llama", tokenizer_class="GPT2Tokenizer", **names, **special)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "bert": bert,
    "bert cased": lambda folder: bert(folder, do_lower_case=False, tokenize_chinese_chars=False),
    "deepseek": deepseek,
    "falcon": falcon,
    "gemma": gemma,
    "gpt2": gpt2,
    "gpt2 with a space first": lambda folder: gpt2(folder, add_prefix_space=True),
    "gpt_neox": lambda folder: gpt2(folder, tokenizer_class="GPTNeoXTokenizerFast"),
    "llama2": llama2,
    "llama2 legacy": lambda folder: llama2(folder, legacy=True),
    "llama2 without a space first": lambda folder: llama2(folder, add_prefix_space=False),
    "code_llama": lambda folder: llama2(folder, tokenizer_class="CodeLlamaTokenizer"),
    "llama3": llama3,
    "mistral tekken": mistral_tekken,
    "phi3": phi3,
    "qwen": qwen,
    "starcoder": starcoder,
    "unigram": unigram,
}
"""Name of a family → a function that writes its files to a folder."""
