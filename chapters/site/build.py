"""The hooks of mkdocs (``hooks:`` in mkdocs.yml): add the chapters, fill in quoted code, link terms.

Pages contain the output of their code (`rendered`), which the build shows. Only figures that move are made by the
build, which fails if their code fails.
"""

from __future__ import annotations

import html as markup
import logging
import os
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from minisgl.chapters.site import blocks, links, quotes, rendered, run, terms
from minisgl.chapters.site.__main__ import course

log = logging.getLogger("mkdocs.plugins.minisgl")  # a warning of this logger fails a strict build
ROOT = Path(__file__).parents[2]
SUFFIXES = {".md", ".svg", ".png", ".html", ".json", ".js", ".css"}
"""Suffixes of the files in a chapter's folder that become part of the site."""
START = "chapters/00_start/index.md"


def on_startup(**_: Any) -> None:
    """Set the working directory and the environment in which the code of the pages runs."""
    run.prepare()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections of the navigation that list files, and add the published address.

    The course begins with its overview; in each chapter, the index comes first. The environment's ``SITE_REPOSITORY``
    (``https://github.com/owner/name``) adds edit links, ``SITE_URL`` the menu of versions: a site on disk has neither.
    """
    if repository := os.environ.get("SITE_REPOSITORY"):
        config.repo_url, config.repo_name, config.edit_uri = repository, "Source", "edit/main/docs/"
        config.theme["features"] = [*config.theme["features"], "content.action.edit"]
        config.theme["icon"] = {**(config.theme.get("icon") or {}), "repo": "fontawesome/brands/git-alt"}
    if address := os.environ.get("SITE_URL"):
        config.site_url = address
        config.extra["version"] = {"provider": "mike"}
    benchmarks = sorted((ROOT / "docs" / "benchmarks").glob("*.md"), key=lambda p: (p.name != "index.md", p.name))
    sections = {
        "Course": ["course.md", *(page for page, _ in course(ROOT) if page != START)],
        "Benchmarks": [page.relative_to(ROOT / "docs").as_posix() for page in benchmarks],
    }
    for entry in config.nav or []:
        for section in sections.keys() & (entry if isinstance(entry, dict) else {}):
            entry[section] = sections[section]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the chapters, and one page for each quoted source file."""
    for path in sorted((ROOT / "chapters").glob("[0-9]*/**/*")):
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            files.append(_file(path.relative_to(ROOT).as_posix(), config))
    quoted: set[str] = set()
    for page in files.documentation_pages():
        quoted |= quotes.quoted_files(page.content_string)
    for name in sorted(quoted):
        if (ROOT / name).is_file() and not quotes.spoiler(name):  # otherwise `quotes.expand` reports the missing file
            files.append(File.generated(config, f"source/{name}.md", content=_listing(name)))
    return files


def _file(name: str, config: MkDocsConfig) -> File:
    file = File(name, str(ROOT), config.site_dir, config.use_directory_urls)
    file.edit_uri = f"../{name}"  # relative to docs/
    return file


def _listing(name: str) -> str:
    """Return a page that shows a complete source file. Quotes link to this page, so that links work offline."""
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(Path(name).suffix, "text")
    text = (ROOT / name).read_text(encoding="utf-8")
    head = f"---\ntitle: {name}\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n# {name}\n\n"
    return f'{head}`````{language} linenums="1"\n{text}\n`````\n'


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in quoted code, hide why the tests skip blocks, and link defined terms to the glossary."""

    def link(quote: quotes.Quote) -> str:
        if lab := quotes.spoiler(quote.path):
            place = f"<code>{markup.escape(quote.symbol)}</code> in {quote.path}"
            return f'\n<p class="quoted">{place}, which solves the lab <code>{lab}</code></p>\n'
        target = files.get_file_from_path(f"source/{quote.path}.md")
        assert target is not None
        address = get_relative_url(target.url, page.url)
        symbol = f"<code>{markup.escape(quote.symbol)}</code> in " if quote.symbol else ""
        return f'\n<p class="quoted">{symbol}<a href="{address}#__codelineno-0-{quote.first}">{quote.path}</a></p>\n'

    def fill(block: blocks.Block) -> str:
        try:
            return quotes.expand(block, ROOT, link)
        except quotes.QuoteError as error:
            log.warning(f"{page.file.src_uri}, line {block.line}: {error}")
            return block.raw

    markdown, pictures = rendered.for_site(links.for_site(markdown, page.file.src_uri))
    page.meta["pictures"] = {mark: _read(page, paths) for mark, paths in pictures.items()}
    markdown = blocks.map_text(markdown, blocks.plain_pipes)
    markdown = blocks.map_blocks(blocks.map_blocks(markdown, fill), blocks.hide_skip_reason)
    known = terms.glossary((Path(config.docs_dir) / "glossary.md").read_text(encoding="utf-8"))
    return terms.link_marks(markdown, known, os.path.relpath("glossary.md", Path(page.file.src_uri).parent))


def _read(page: Page, paths: list[str]) -> list[str]:
    """Return the SVG elements of a page's picture files, each with its version for narrow screens, if there is one."""
    folder = Path(page.file.abs_src_path or "").parent
    versions = [[folder / path, folder / rendered.narrow_name(path)] for path in paths]
    return [
        "".join(p.read_text(encoding="utf-8").strip() for p in some if p == some[0] or p.exists()) for some in versions
    ]


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Give the terms of the glossary their hover texts."""
    if page.file.src_uri == "glossary.md" or page.file.src_uri.startswith("source/"):
        return html
    known = terms.glossary((Path(config.docs_dir) / "glossary.md").read_text(encoding="utf-8"))
    return terms.hover(html, known, get_relative_url("glossary.html", page.url))


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Insert the pictures into the page, after the search index was made: it has no text of pictures."""
    for mark, pictures in page.meta.get("pictures", {}).items():
        output = rendered.inline(output, mark, pictures)
    return output
