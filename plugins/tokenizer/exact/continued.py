"""``continue_final_message``: a prompt that ends within its last message, which the answer continues.

A tag shows where the chat template writes the end of the message. The text is that of ``apply_chat_template`` in
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.plugins.tokenizer.exact.template import RenderedChat, computed_with_special_tokens
from minisgl.tokenizer.chat import Message, refuse, strings_of


def with_tag(messages: Sequence[Message]) -> tuple[list[Message], str, str]:
    """Return messages whose last text ends with a tag, this text, and the tag, which is in no text of the messages.

    The tag shows where a chat template writes the end of the content. Raise `InvalidRequestError` if there is no text.
    """
    *others, last = messages
    content, tag = last.get("content"), "CONTINUE_FINAL_MESSAGE_TAG"
    text, parts = content, None
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        text, parts = content[-1].get("text"), content
    if not isinstance(text, str) or not text:
        refuse(len(others), "it has no text at its end that an answer could continue")
    while any(tag in text for text in strings_of(messages)):
        tag += "_"
    tagged = f"{text}{tag} "
    new = tagged if parts is None else [*parts[:-1], {**parts[-1], "text": tagged}]
    return [*others, {**last, "content": new}], text, tag


def cut_at_tag(chat: RenderedChat, text: str, tag: str, message: int) -> RenderedChat:
    """Return a chat of `with_tag` up to the tag. Raise `InvalidRequestError` if the template did not write ``text``.

    A template may write the content without the spaces at its end. Then the result has none either.
    """
    at = chat.text.rfind(tag)
    if at < 0 or text.strip() not in chat.text:
        refuse(message, "the model's chat template changes or drops its text, so an answer can't continue it")
    if chat.text[at + len(tag) : at + len(tag) + 1] != " ":
        at = len(chat.text[:at].rstrip())
    found = chat.cut(at)
    if chat.marked is not None and found.marked is None:
        raise computed_with_special_tokens()
    return found
