"""What only the tokenizer of ``tokenizer=auto`` does: it refuses, and it decodes with every decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError
from minisgl.plugins.tokenizer.exact.template import CheckedTemplate
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

from ...tokenizer.conftest import save, sentencepiece_like
from ...tokenizer.test_text_stream import texts_of
from ...tokenizer.test_tokenizer import BLOCKS, MESSAGES


def test_unused_template_input_is_refused() -> None:
    """A variable or a message field that the template never reads is refused, and the error names it."""
    template = CheckedTemplate(BLOCKS)
    with pytest.raises(InvalidRequestError, match="no variable 'thinking'") as refused:
        template.render(MESSAGES, chat_template_kwargs={"thinking": True})
    assert refused.value.field == "chat_template_kwargs"
    with pytest.raises(InvalidRequestError, match="does not use the message field 'tool_calls'"):
        template.render([{"role": "assistant", "content": None, "tool_calls": [{}]}])


def test_a_decoder_that_strips_the_end_is_refused(tmp_path: Path) -> None:
    """The library panics when it decodes a text that is shorter than what it strips."""
    raw = sentencepiece_like()
    raw.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(ConfigError, match="strips the end"):
        ExactTokenizer.from_dir(save(raw, tmp_path))


# Decoders as in published tokenizers, and with the parts in other orders.
DECODERS = {
    "none": None,
    "wordpiece": decoders.WordPiece(prefix="##", cleanup=True),
    "wordpiece without cleanup": decoders.WordPiece(prefix="##", cleanup=False),
    "metaspace": decoders.Metaspace(),
    "metaspace without a space first": decoders.Metaspace(prepend_scheme="never"),
    "bpe": decoders.BPEDecoder(suffix="</w>"),
    "ctc": decoders.CTC(pad_token="<pad>", word_delimiter_token="▁"),
    "replace and fuse": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    "two spaces are stripped": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "replace after fuse": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("ab", "X")]),
    "bytes and strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("clean_up_spaces", [False, True])
def test_pieces_of_every_decoder(name: str, clean_up_spaces: bool) -> None:
    words = [
        "<unk>",
        "a",
        "b",
        "▁",
        "▁a",
        "##b",
        ".",
        "▁.",
        " ",
        "▁n't",
        "'",
        "\ufffd",
        "Ġ",
        "Ã",
        "©",
        "<pad>",
        "ab",
        "'s",
        "b</w>",
        "</w>",
    ]
    words += [f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xC3, 0xA9, 0xE2, 0x96, 0x81)]
    raw = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    if (decoder := DECODERS[name]) is not None:
        raw.decoder = decoder
    raw.add_special_tokens(["<|s|>"])
    tokenizer = ExactTokenizer(raw, clean_up_spaces=clean_up_spaces)

    @settings(deadline=None)
    @given(st.lists(st.integers(0, len(words) + 2), max_size=30), st.booleans())
    @example([22, 20, 3], False)  # a space after bytes that are no character
    def check(tokens: list[int], skip: bool) -> None:
        assert "".join(texts_of(tokenizer, tokens, skip)) == tokenizer.decode(tokens, skip)

    check()
