"""Tokenizer classes of transformers that build a tokenizer in their own way, from the vocabulary of ``tokenizer.json``.

``tokenizer_class`` in ``tokenizer_config.json`` names the class. Most classes take ``tokenizer.json`` as it is. Those
in `CLASSES` replace its normalizer, pre-tokenizer and decoder, some of them by the options ``add_prefix_space`` and
``legacy``. A model was trained, and is served elsewhere, with the tokens of its class. The classes are those of
transformers 5; a class that replaces parts and is not in `CLASSES` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from minisgl.config import ConfigError

# fmt: off
_REFUSED = frozenset({
    "Albert", "Bart", "Barthez", "BigBird", "Blenderbot", "CLIP", "Camembert", "CodeGen", "ConvBert",
    "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader", "Deberta", "DebertaV2", "Esmc", "FNet", "Funnel",
    "Herbert", "LED", "Lasr", "LayoutLMv2", "LayoutLMv3", "LayoutXLM", "Luke", "Lxmert", "MBart50", "MBart",
    "MLuke", "MPNet", "MarkupLM", "MobileBert", "Mvp", "Nllb", "Nougat", "OpenAIGPT", "Pegasus", "Qwen3_5",
    "Reformer", "RemBert", "RoFormer", "Roberta", "SeamlessM4T", "Siglip2", "Splinter", "T5", "Tipsv2", "Udop",
    "VideoPrism", "Whisper", "XGLM", "XLMRoberta", "XLNet"
})
# fmt: on
"""The other classes that replace parts of ``tokenizer.json``, without "Tokenizer" at the end of their names."""
_REGISTERED = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer", "mistral": ""}
"""``model_type`` in config.json → the tokenizer class that transformers expects; "" is ``tokenizer.json`` as it is."""
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Config = Mapping[str, Any]


@dataclass(frozen=True)
class TokenizerClass:
    """How a class builds its tokenizer.

    ``build(raw, config, names)`` sets the parts of ``raw``, which has the model and the post-processor of
    ``tokenizer.json`` and no added tokens. ``config`` is the content of ``tokenizer_config.json`` and ``names`` has the
    named special tokens. ``finish`` is called with the same arguments when the added tokens are there. ``tokens`` are
    the special tokens that the class names if the configuration does not.
    """

    build: Callable[[tokenizers.Tokenizer, Config, Mapping[str, str]], None]
    tokens: Mapping[str, str]
    model: str = "BPE"
    finish: Callable[[tokenizers.Tokenizer, Config, Mapping[str, str]], None] = lambda raw, config, names: None


def class_name(model: Config, config: Config, byte_level: bool) -> str:
    """Return the class that transformers uses for a model's tokenizer, or "" for ``tokenizer.json`` as it is.

    ``model`` is the content of ``config.json``, ``config`` that of ``tokenizer_config.json``. ``byte_level`` says
    whether a part of ``tokenizer.json`` is byte-level. Raise `ConfigError` for a class that is not supported.
    """
    given = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    kind = model.get("model_type")
    name, registered = given, _REGISTERED.get(kind) if isinstance(kind, str) else None
    if registered is not None and (not given or (given != registered and kind in ("qwen2", "mistral"))):
        name = registered
    elif given == "LlamaTokenizer" and byte_level:
        name = ""
    if name.removesuffix("Tokenizer") in _REFUSED:
        raise ConfigError(
            f"tokenizer_class is {given}, which replaces parts of tokenizer.json in a way that is not supported. To "
            "use tokenizer.json as it is, write PreTrainedTokenizerFast for it in tokenizer_config.json."
        )
    return name if name in CLASSES else ""


def rebuild(name: str, raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Return a tokenizer with the model of ``raw`` and the parts of the class ``name``, without added tokens.

    Raise `ConfigError` if the class needs another kind of model.
    """
    kind = type(raw.model).__name__
    if kind != CLASSES[name].model:
        raise ConfigError(f"tokenizer_class is {name}, which needs a {CLASSES[name].model} model, not {kind}.")
    built = tokenizers.Tokenizer(raw.model)
    if raw.post_processor is not None:
        built.post_processor = raw.post_processor
    CLASSES[name].build(built, config, names)
    return built


def _set_bpe(
    raw: tokenizers.Tokenizer, fuse_unk: bool = False, byte_fallback: bool = False, unk_token: str | None = None
) -> None:
    model: Any = raw.model
    model.dropout, model.ignore_merges = None, False
    model.continuing_subword_prefix = model.end_of_word_suffix = ""
    model.fuse_unk, model.byte_fallback, model.unk_token = fuse_unk, byte_fallback, unk_token


def _spaces(last: Any = None) -> Any:
    """Return the decoder of tokens with "▁" for a space and with byte tokens."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(parts if last is None else [*parts, last])


def _llama(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    given = config.get("add_prefix_space")
    prefix = given is None or bool(given)
    _set_bpe(raw, fuse_unk=True, byte_fallback=True)
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    raw.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    raw.decoder = _spaces(decoders.Strip(" ", 1) if prefix else None)


def _code_llama(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    _llama(raw, {**config, "legacy": False}, names)
    _set_bpe(raw, fuse_unk=True, byte_fallback=True, unk_token=names.get("unk_token"))
    raw.decoder = _spaces(decoders.Strip(" ", 1))


def _add_bos(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    bos = names.get("bos_token")
    special = [] if bos is None else [(bos, raw.token_to_id(bos))]
    raw.post_processor = processors.TemplateProcessing(
        single=[*(bos for bos, _ in special), "$A"], special_tokens=special
    )


def _gemma(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    _set_bpe(raw, fuse_unk=True, byte_fallback=True, unk_token=names.get("unk_token"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    raw.decoder = _spaces()


def _byte_level(config: Config, use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(bool(config.get("add_prefix_space")), use_regex=use_regex)


def _gpt2(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    _set_bpe(raw)
    raw.pre_tokenizer = _byte_level(config)
    raw.decoder = decoders.ByteLevel()


def _gpt_neox(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    _gpt2(raw, config, names)
    raw.normalizer = normalizers.NFC()
    raw.post_processor = processors.TemplateProcessing(single="$A")


def _cohere(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    _gpt2(raw, config, names)
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _byte_level(config)])


def _qwen2(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    _gpt2(raw, config, names)
    raw.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, _byte_level(config, use_regex=False)])


def _bert(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    model: Any = raw.model
    model.unk_token, model.continuing_subword_prefix = names.get("unk_token"), "##"
    model.max_input_chars_per_word = 100
    raw.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##")


def _add_cls_and_sep(raw: tokenizers.Tokenizer, config: Config, names: Mapping[str, str]) -> None:
    special = [(names[name], raw.token_to_id(names[name])) for name in ("cls_token", "sep_token")]
    raw.post_processor = processors.TemplateProcessing(
        single=[special[0][0], "$A", special[1][0]], special_tokens=special
    )


_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_INFILL = {"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>"}
_END = "<|endoftext|>"
_BERT = TokenizerClass(
    _bert,
    {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"},
    model="WordPiece",
    finish=_add_cls_and_sep,
)
CLASSES: Mapping[str, TokenizerClass] = MappingProxyType(
    {
        "BertTokenizer": _BERT,
        "CodeLlamaTokenizer": TokenizerClass(
            _code_llama, {**_LLAMA, **_INFILL, "fill_token": "<FILL_ME>"}, finish=_add_bos
        ),
        "CohereTokenizer": TokenizerClass(
            _cohere,
            {
                "unk_token": "<UNK>",
                "bos_token": "<BOS_TOKEN>",
                "eos_token": "<|END_OF_TURN_TOKEN|>",
                "pad_token": "<PAD>",
                "cls_token": "<CLS>",
                "sep_token": "<SEP>",
                "mask_token": "<MASK_TOKEN>",
            },
        ),
        "DistilBertTokenizer": _BERT,
        "GPT2Tokenizer": TokenizerClass(_gpt2, {"unk_token": _END, "bos_token": _END, "eos_token": _END}),
        "GPTNeoXTokenizer": TokenizerClass(
            _gpt_neox, {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": "<|padding|>"}
        ),
        "GemmaTokenizer": TokenizerClass(
            _gemma,
            {
                "unk_token": "<unk>",
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "mask_token": "<mask>",
            },
        ),
        "LlamaTokenizer": TokenizerClass(_llama, _LLAMA),
        "Qwen2Tokenizer": TokenizerClass(_qwen2, {"unk_token": _END, "eos_token": _END, "pad_token": _END}),
    }
)
"""Name of a class, without "Fast" at its end → how it builds its tokenizer."""
