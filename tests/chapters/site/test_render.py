"""Rendered pages: what is run, what is compared, what the site gets, and what a check of the text catches."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.chapters.site import render, rendered
from minisgl.chapters.site.blocks import blocks
from minisgl.chapters.site.render import Renderer, differences, mask
from minisgl.chapters.site.run import PageError, PageRunner, numbers, text_of

PAGE = """# A page

Six times seven is 42.

```python exec="on" source="above" result="text" session="a"
x = 6 * 7
print(x, "in 12 ms")
```

<!--
```python check="on" session="a"
says("times seven is {}", x)
assert numbers(r"^(\\\\d+)", printed) == [42]
```
-->

<!--
```bash exec="on" result="text"
echo hidden
```
-->

<!--
```python exec="on" html="on" session="p" picture="dot"
print('<figure><svg role="img" aria-label="a dot in the middle"><circle/></svg></figure>')
```
-->

<details>
<summary>Why <code>x</code>?</summary>

Because.

```python quote="Makefile" lines="1-1"
```

</details>
""".replace("\\\\d", "\\d")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a page in a repository of its own."""
    monkeypatch.setattr(render, "ROOT", tmp_path)
    (tmp_path / "Makefile").write_text("# first\n# second\n")
    (tmp_path / "docs").mkdir()
    path = tmp_path / "docs" / "a.md"
    path.write_text(PAGE)
    return path


def rewrite(page: Path) -> Renderer:
    """Render a page as the command does; return its renderer."""
    renderer = Renderer(page)
    page.write_text(renderer.render())
    for path, svg in renderer.pictures.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
    return renderer


def test_page_gets_the_output_of_its_code(page: Path) -> None:
    rewrite(page)
    text = page.read_text()
    assert "```\n\n<!-- output -->\n```text\n42 in 12 ms\n```\n<!-- /output -->\n" in text
    assert "-->\n\n<!-- output -->\n```text\nhidden\n```" in text
    assert "![a dot in the middle](pictures/dot.svg)" in text
    assert (page.parent / "pictures" / "dot.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "# first\n```\n\n<!-- output -->\n[Makefile](../Makefile)\n" in text
    again = Renderer(page)
    assert differences(again, again.render()) == ""


def test_changed_output_is_found_but_not_another_time(page: Path) -> None:
    rewrite(page)
    page.write_text(page.read_text().replace("42 in 12 ms\n```\n<!-- /", "42 in   3.4 ms\n```\n<!-- /"))
    again = Renderer(page)
    assert differences(again, again.render()) == ""
    page.write_text(page.read_text().replace("\nhidden\n", "\nother\n"))
    (page.parent / "pictures" / "dot.svg").unlink()
    again = Renderer(page)
    found = differences(again, again.render())
    assert "-other\n+hidden\n" in found
    assert "docs/pictures/dot.svg is out of date" in found


def test_text_that_disagrees_with_the_code_is_found(page: Path) -> None:
    page.write_text(PAGE.replace("is 42.", "is 43."))
    with pytest.raises(PageError, match="line 11: AssertionError: the text does not say 'times seven is 42'"):
        Renderer(page).render()


def test_failing_code_is_reported_with_its_line(page: Path) -> None:
    page.write_text(PAGE.replace("x = 6 * 7", "x = 6 / 0"))
    with pytest.raises(PageError, match="line 5: ZeroDivisionError"):
        Renderer(page).render()
    (block,) = blocks("```bash\nfalse\n```\n")
    with pytest.raises(PageError, match="CalledProcessError"):
        PageRunner("a", "").run(block)


def test_quotes_need_no_code_to_run(page: Path) -> None:
    page.write_text(PAGE.replace("x = 6 * 7", "x = 6 / 0"))
    assert "# first\n```\n\n<!-- output -->" in Renderer(page).render(run=False)


def test_site_shows_the_committed_output(page: Path) -> None:
    rewrite(page)
    shown, pictures = rendered.for_site(page.read_text())
    assert '```python\nx = 6 * 7\nprint(x, "in 12 ms")\n```\n\n```{ .text .result }\n42 in 12 ms\n```' in shown
    assert "echo" not in shown
    assert "says" not in shown
    assert "<!--" not in shown
    assert pictures == {"picture-0": ["pictures/dot.svg"]}
    assert rendered.inline(shown, "picture-0", ['<svg width="9"></svg>']).count("<figure") == 1
    assert "flex" in rendered.inline(shown, "picture-0", ["<svg></svg>", "<svg></svg>"])
    assert '??? question "Why <code>x</code>?"\n\n    Because.\n' in shown
    assert '    ```python quote="Makefile" lines="1-1"' in shown  # the build fills it in


def test_block_without_output_is_left_to_the_build() -> None:
    live = '```python exec="on" html="on"\nprint(1)\n```\n'
    assert rendered.for_site(f"<!--\n{live}-->\n")[0] == live
    assert rendered.for_site(live)[0] == live


def test_code_in_a_comment_must_not_end_it() -> None:
    (unit,) = rendered.units("```python exec=\"on\"\nprint('-->')\n```\n")
    with pytest.raises(ValueError, match="must not contain"):
        rendered.write(unit._replace(hidden=True))


def test_mask_and_numbers() -> None:
    assert mask("took 3.4 ms, 1,204 µs, off by 2.4e-07") == mask("took 12 ms, 7 µs,  off by 1.3e-15")
    assert mask("4 rows") != mask("5 rows")
    assert mask("port 80", r"port \d+") == mask("port 81", r"port \d+")
    assert numbers(r"gap +([\d,]+)", "gap 1,604, gap 7.") == [1604, 7]
    with pytest.raises(ValueError, match="matches nothing"):
        numbers(r"(\d)", "none")
    assert text_of("One\ntwo <!-- no --> `x`.\n```\nno\n```\n") == "One two `x`."


def test_picture_file_becomes_part_of_the_page() -> None:
    """It follows the page's colours, and scrolls in a figure on a narrow screen; one in a line of text stays."""
    markdown = "Text.\n\n![Two\nlines.](a/b.svg)\n\nSee ![a dot](dot.svg) here.\n\n```text\n![x](y.svg)\n```\n"
    shown, pictures = rendered.for_site(markdown)
    assert pictures == {"picture-0": ["a/b.svg"]}
    assert shown == markdown.replace("![Two\nlines.](a/b.svg)", '<div id="picture-0"></div>')
    assert 'style="min-width:100px"' in rendered.inline(shown, "picture-0", ['<svg width="100"></svg>'])
