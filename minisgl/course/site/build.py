"""mkdocs' hooks (``hooks:`` in mkdocs.yml): pulls the chapters in, fills in quotes, links terms.

What a page shows as output was made by running it while the site was built; so this also sees that such code finds
this interpreter's programs, computes on the CPU, and that a failure fails the build.
"""

from __future__ import annotations

import html
import logging
import os
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from minisgl.course.site import blocks, quotes, terms
from minisgl.course.site.__main__ import course

log = logging.getLogger("mkdocs.plugins.minisgl")  # a warning there fails a strict build
ROOT = Path(__file__).parents[3]
SUFFIXES = {".md", ".svg", ".png", ".html", ".json", ".js", ".css"}
"""What is taken over from a chapter's folder."""
START = "chapters/00_start/index.md"


def on_startup(**_: Any) -> None:
    """Where the pages' code runs."""
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "TQDM_DISABLE": "1"}
    os.environ["SHELLOPTS"] = "errexit:pipefail"  # a bash block fails with any of its commands, in a pipe too


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation of what grows: the course (its overview, then each chapter, its index first) and benchmarks."""
    measured = sorted((ROOT / "docs" / "benchmarks").glob("*.md"), key=lambda p: (p.name != "index.md", p.name))
    found = {
        "Course": ["course.md", *(page for page, _ in course(ROOT) if page != START)],
        "Benchmarks": [page.relative_to(ROOT / "docs").as_posix() for page in measured],
    }
    for entry in config.nav or []:
        for section in found.keys() & (entry if isinstance(entry, dict) else {}):
            entry[section] = found[section]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the chapters, and a page for each file that some page quotes."""
    for path in sorted((ROOT / "chapters").glob("*/**/*")):
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            files.append(_file(path.relative_to(ROOT).as_posix(), config))
    quoted: set[str] = set()
    for page in files.documentation_pages():
        quoted |= quotes.quoted_files(page.content_string)
    for name in sorted(quoted):
        if (ROOT / name).is_file():  # else the quote's own error says so
            files.append(File.generated(config, f"source/{name}.md", content=_listing(name)))
    return files


def _file(name: str, config: MkDocsConfig) -> File:
    return File(name, str(ROOT), config.site_dir, config.use_directory_urls)


def _listing(name: str) -> str:
    """A page with a whole file, to which quotes link: it is there offline too."""
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(Path(name).suffix, "text")
    text = (ROOT / name).read_text(encoding="utf-8")
    head = f"---\ntitle: {name}\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n# {name}\n\n"
    return f'{head}`````{language} linenums="1"\n{text}\n`````\n'


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in quotes, shows why a block is not run, and links terms that are defined here."""

    def link(quote: quotes.Quote) -> str:
        target = files.get_file_from_path(f"source/{quote.path}.md")
        assert target is not None
        address = get_relative_url(target.url, page.url)
        symbol = f"<code>{html.escape(quote.symbol)}</code> in " if quote.symbol else ""
        return f'\n<p class="quoted">{symbol}<a href="{address}#__codelineno-0-{quote.first}">{quote.path}</a></p>\n'

    def fill(block: blocks.Block) -> str:
        try:
            return quotes.expand(block, ROOT, link)
        except quotes.QuoteError as error:
            log.warning(f"{page.file.src_uri}, line {block.line}: {error}")
            return block.raw

    markdown = blocks.map_text(markdown, blocks.plain_pipes)
    markdown = blocks.map_blocks(blocks.map_blocks(markdown, fill), blocks.say_what_is_skipped)
    known = terms.glossary((Path(config.docs_dir) / "glossary.md").read_text(encoding="utf-8"))
    return terms.link_marks(markdown, known, os.path.relpath("glossary.md", Path(page.file.src_uri).parent))
