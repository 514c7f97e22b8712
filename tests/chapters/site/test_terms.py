"""The check for terms that are used before their definition; the course and the glossary pass it."""

from __future__ import annotations

from pathlib import Path

from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.terms import check, check_glossary, glossary, hover, hover_text, link_marks

ROOT = Path(__file__).resolve().parents[3]
GLOSSARY = """# Glossary

### KV cache

*also: key-value cache*

What is kept.

### page

<!-- everyday -->

A piece of memory.

### radix tree

A tree.
"""
TERMS = glossary(GLOSSARY)


def test_glossary_is_parsed() -> None:
    assert [(t.name, t.anchor, t.names, t.everyday, t.text) for t in TERMS] == [
        ("KV cache", "kv-cache", ("kv cache", "key-value cache"), False, "What is kept."),
        ("page", "page", ("page",), True, "A piece of memory."),
        ("radix tree", "radix-tree", ("radix tree",), False, "A tree."),
    ]
    assert check_glossary(TERMS) == []
    assert check_glossary(TERMS[::-1]) == ["'page' must come before 'radix tree'", "'kv cache' must come before 'page'"]
    assert check_glossary([*TERMS, TERMS[-1]]) == ["'radix tree' is a name of two terms"]


def test_term_used_before_its_definition_is_found() -> None:
    early, late = ("1.md", "A KV\ncache helps."), ("2.md", "The **<dfn>KV cache</dfn>** helps.")
    (problem,) = check([early, late], TERMS)
    assert problem.startswith("1.md uses 'KV\\ncache', but 2.md defines it")
    assert check([late, early], TERMS) == []
    assert check([("0.md", "Key-value caches."), late], TERMS) != []
    assert check([("0.md", "A [KV cache](../../glossary.md#kv-cache)."), late], TERMS) == []
    assert (
        check([("0.md", "`KV cache`, <!-- KV cache --> a radix-treeish thing\n```\nKV cache\n```\n"), late], TERMS)
        == []
    )
    assert "no page defines it" in check([("0.md", "Radix trees.")], TERMS)[0]
    assert check([("0.md", "Turn the page.")], TERMS) == []


def test_definitions_are_checked() -> None:
    assert "has no such term" in check([("1.md", "**<dfn>paging</dfn>**")], TERMS)[0]
    twice = [("1.md", "**<dfn>KV cache</dfn>**"), ("2.md", "**<dfn>KV caches</dfn>**")]
    assert check(twice, TERMS) == ["2.md defines 'KV cache' again; 1.md defines it first"]


def test_definitions_link_to_the_glossary() -> None:
    page = "The **<dfn>KV caches</dfn>**.\n\n```text\n**<dfn>KV cache</dfn>**\n```\n"
    shown = link_marks(page, TERMS, "../glossary.md")
    assert "**[KV caches](../glossary.md#kv-cache)**{ .term }" in shown
    assert "```text\n**<dfn>KV cache</dfn>**" in shown


def test_course_defines_terms_before_use() -> None:
    terms = glossary((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert len(terms) > 50
    assert check_glossary(terms) + check(course(ROOT), terms) == []


def test_terms_have_hover_texts() -> None:
    page = "<h2>A KV cache</h2><p>The KV\ncache, a page and <code>KV cache</code>; KV caches.</p>"
    page += "<h2>B</h2><p>A radix tree</p>"
    found = hover(page, TERMS, "../glossary.html")
    link = '<a class="term" href="../glossary.html#kv-cache" title="What is kept.">KV\ncache</a>'
    assert found == page.replace("The KV\ncache", f"The {link}").replace(
        "radix tree", '<a class="term" href="../glossary.html#radix-tree" title="A tree.">radix tree</a>'
    )


def test_link_to_the_glossary_has_the_hover_text() -> None:
    page = '<p><a href="g.html#page">these</a> and <a href="x.html">KV cache</a></p>'
    assert hover(page, TERMS, "g.html") == page.replace('#page"', '#page" title="A piece of memory."')


def test_every_term_has_a_short_hover_text() -> None:
    for term in glossary((ROOT / "docs/glossary.md").read_text(encoding="utf-8")):
        text = hover_text(term)
        assert 10 < len(text) <= 400 and text.endswith((".", "?")) and not set("[]`*") & set(text), (term.name, text)
