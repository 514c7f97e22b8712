"""The glossary: hover texts for its terms, and the rule that no page uses a term before a page defines it.

A page defines a term with ``**<dfn>prefill</dfn>**``. Pages are in the order of the navigation. An earlier page may use
the term only if it links to the term in the glossary. This module does not depend on mkdocs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from minisgl.chapters.site.blocks import map_text, prose, without_blocks

MARK = re.compile(r"\*\*<dfn>(?P<name>[^<\n]+)</dfn>\*\*")
_HEADING = re.compile(r"^### (?P<name>[^\n]+?)[ ]*$", re.MULTILINE)
_ALSO = re.compile(r"^\*also: (.+)\*$", re.MULTILINE)
_EVERYDAY = "<!-- everyday -->"
MAX_HOVER = 260
"""Length of the longest hover text: as many sentences of the paragraph as fit, at least one."""
_TAG = re.compile(r"(<!--.*?-->|<[^>]+>)", re.DOTALL)
_NO_TERMS = {
    "a",
    "abbr",
    "button",
    "code",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "pre",
    "script",
    "style",
    "summary",
    "svg",
}
"""Elements in whose text no term is linked."""
_VOID = {"br", "hr", "img", "input", "wbr"}


class Term(NamedTuple):
    """One entry of the glossary.

    ``names`` are the name and its aliases, in lower case. The use of an ``everyday`` word is not checked, because the
    word has other meanings too.
    """

    name: str
    anchor: str
    names: tuple[str, ...]
    everyday: bool
    text: str


def glossary(markdown: str) -> list[Term]:
    """Return the entries of docs/glossary.md: ``### name``, an optional line ``*also: other, names*``, a paragraph.

    The comment ``<!-- everyday -->`` marks an everyday word.
    """
    found = []
    heads = list(_HEADING.finditer(markdown))
    for head, after in zip(heads, [*heads[1:], None], strict=False):
        text = markdown[head.end() : after.start() if after else len(markdown)]
        also = _ALSO.search(text)
        others = [name.strip() for name in also[1].split(",")] if also else []
        names = tuple(name.lower() for name in (head["name"], *others))
        paragraph = _ALSO.sub("", text).replace(_EVERYDAY, "").strip()
        found.append(Term(head["name"], anchor(head["name"]), names, _EVERYDAY in text, paragraph))
    return found


def anchor(name: str) -> str:
    """Return the anchor that Markdown gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", name).strip().lower())


def look_up(terms: Sequence[Term], name: str) -> Term | None:
    """Return the term with this name, alias or plural, or None."""
    wanted = name.lower()
    for term in terms:
        if wanted in term.names or wanted in {f"{each}s" for each in term.names}:
            return term
    return None


def link_marks(markdown: str, terms: Sequence[Term], address: str) -> str:
    """Return the page with each definition linked to the glossary. ``address`` is the relative URL of the glossary."""

    def link(match: re.Match[str]) -> str:
        term = look_up(terms, match["name"])
        return f"**[{match['name']}]({address}#{term.anchor})**{{ .term }}" if term else match[0]

    return map_text(markdown, lambda text: MARK.sub(link, text))


def hover_text(term: Term) -> str:
    """Return the first sentences of a term's paragraph as plain text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", term.text)
    text = " ".join(re.sub(r"[`*]", "", text).split())
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    shown = sentences[0]
    for sentence in sentences[1:]:
        if len(shown) + len(sentence) >= MAX_HOVER:
            break
        shown += " " + sentence
    return shown


def hover(page: str, terms: Sequence[Term], address: str) -> str:
    """Return an HTML page in which terms are links to the glossary with a hover text, once in each section.

    ``address`` is the relative URL of the glossary. Everyday words, headings and code are left alone; links to the
    glossary that the page already has get the hover text too.
    """
    known = {name: term for term in terms if not term.everyday for name in term.names}
    anchors = {term.anchor: term for term in terms}
    names = "|".join(_pattern(name) for name in sorted(known, key=len, reverse=True))
    found = re.compile(rf"(?<![\w-])({names})(?![\w-])", re.IGNORECASE)
    inside: list[str] = []
    seen: set[str] = set()

    def link(match: re.Match[str]) -> str:
        term = look_up(list(known.values()), " ".join(match[0].split()))
        if term is None or term.name in seen:
            return match[0]
        seen.add(term.name)
        return f'<a class="term" href="{address}#{term.anchor}" title="{escape(hover_text(term))}">{match[0]}</a>'

    out = []
    for i, part in enumerate(_TAG.split(page)):
        if i % 2 == 0:
            out.append(part if _NO_TERMS & set(inside) else found.sub(link, part))
            continue
        name = (re.match(r"</?([\w-]+)", part) or [""])[1] if not part.startswith("<!--") else ""
        if name == "h2":
            seen.clear()
        if part.startswith("</"):
            while inside and inside.pop() != name:
                pass
        elif name and name not in _VOID and not part.endswith("/>"):
            inside.append(name)
            target = re.search(rf'href="{re.escape(address)}#([\w-]+)"', part)
            if name == "a" and target and target[1] in anchors and " title=" not in part:
                seen.add(anchors[target[1]].name)
                part = f'{part[:-1]} title="{escape(hover_text(anchors[target[1]]))}">'
        out.append(part)
    return "".join(out)


def check(pages: Sequence[tuple[str, str]], terms: Sequence[Term]) -> list[str]:
    """Return the violations of the rule. ``pages`` are (path, Markdown) in reading order."""
    problems = []
    defined: dict[str, int] = {}
    for i, (path, text) in enumerate(pages):
        for match in MARK.finditer(without_blocks(text)):
            term = look_up(terms, match["name"])
            if term is None:
                problems.append(f"{path} defines {match['name']!r}, but docs/glossary.md has no such term")
            elif defined.setdefault(term.name, i) != i:
                first = pages[defined[term.name]][0]
                problems.append(f"{path} defines {term.name!r} again; {first} defines it first")
    for i, (path, text) in enumerate(pages):
        prose_text = prose(text)
        linked = set(re.findall(r"glossary\.md#([\w-]+)", text))
        for term in terms:
            if term.everyday or term.anchor in linked or defined.get(term.name, len(pages)) <= i:
                continue
            used = _use(term).search(prose_text)
            if used:
                place = f"{pages[defined[term.name]][0]} defines it" if term.name in defined else "no page defines it"
                problems.append(
                    f"{path} uses {used[0]!r}, but {place}: define it, or link to glossary.md#{term.anchor}"
                )
    return problems


def check_glossary(terms: Sequence[Term]) -> list[str]:
    """Return the problems of the glossary itself: missing paragraphs, wrong order, ambiguous names."""
    names = [term.name.lower() for term in terms]
    problems = [f"{term.name!r} has no paragraph" for term in terms if not term.text]
    problems += [f"{term.name!r} has more than one paragraph" for term in terms if "\n\n" in term.text]
    problems += [f"{b!r} must come before {a!r}" for a, b in pairwise(names) if b < a]
    all_names = [name for term in terms for name in term.names]
    return problems + [
        f"{name!r} is a name of two terms" for name in sorted({n for n in all_names if all_names.count(n) > 1})
    ]


def _use(term: Term) -> re.Pattern[str]:
    """Return a pattern for the names of a term as complete words."""
    names = "|".join(_pattern(name) for name in term.names)
    return re.compile(rf"(?<![\w-])(?:{names})(?![\w-])", re.IGNORECASE)


def _pattern(name: str) -> str:
    """Return a pattern for a name, singular or plural, also across line breaks."""
    return re.escape(name).replace(r"\ ", r"\s+") + "(?:s|es)?"
