"""How families of models write tool calls: the group ``tool_parser`` and its interface, `ToolParser`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from minisgl.plugins.http.apis.answer import AnswerReader

__all__ = ["ToolParser"]


class ToolParser(Protocol):
    """What a plugin of the group ``tool_parser`` builds.

    ``special`` are the special tokens that ``reader`` must find in the text: they are not skipped while there are
    tools. A parser whose attribute ``reads_all`` is true reads the answers of chats without tools, too.
    """

    special: Sequence[str]

    def reader(self, tools: Mapping[str, Any], most: int | None, forced: bool) -> AnswerReader:
        """Return a reader of one answer. A call of another tool than those named in ``tools`` is content.

        ``tools`` has the JSON schema of the arguments of each.
        Only the first ``most`` calls count; None: all. ``forced``: the answer follows the grammar of `frame`.
        """

    def frame(self, tools: Sequence[tuple[str, Any]], most: int | None) -> Any:
        """Return the frame (`minisgl.plugins.grammar.frame`) of answers that call tools, at least one.

        ``tools`` are names, and JSON schemas of their arguments. There are at most ``most`` calls; None: any number.
        Raise `InvalidRequestError` for a schema that the form can't have.
        """
