"""Tests of the built site: links, network access, descriptions of pictures, and the layout in a browser.

The layout is tested on wide and narrow screens, light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from minisgl.chapters.site.__main__ import course

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.xdist_group("test_site")  # one process: no process waits for the build of another
ROOT = Path(__file__).resolve().parents[2]
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


MIN_FONT_PIXELS, MIN_CONTRAST = 11, 4.5
"""Smallest size of text, and smallest contrast with what is below it (WCAG 2, level AA)."""
READABLE = (Path(__file__).parent / "readable.js").read_text(encoding="utf-8")
WIDE = ("mg-ladder", "3,000 requests of Mooncake")
"""Pictures that a phone shows in a box that scrolls, because they have no narrow version."""


class Element(NamedTuple):
    """One HTML element."""

    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]  # tags and classes of the enclosing elements


class Page(HTMLParser):
    """One page of the site, parsed into its elements."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        inside = tuple(word for name, classes in self._open for word in (name, *classes.split()))
        self.elements.append(Element(tag, attributes, inside))
        if tag not in VOID:
            self._open.append((tag, attributes.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    @property
    def anchors(self) -> set[str]:
        """Anchors to which a link can point."""
        return {e.attributes[key] for e in self.elements for key in ("id", "name") if key in e.attributes}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.glob("**/*.html"))}


def test_site_has_all_pages(site: Path, pages: dict[Path, Page]) -> None:
    found = {path.relative_to(site).as_posix() for path in pages}
    chapters = {path.replace(".md", ".html") for path, _ in course(ROOT)}
    assert chapters | {"index.html", "glossary.html", "reference/api.html", "benchmarks/stages.html"} <= found
    assert len(chapters) >= 8


def test_internal_links_are_valid(site: Path, pages: dict[Path, Page]) -> None:
    wrong = []
    for path, page in pages.items():
        for element in page.elements:
            for key in ("href", "src"):
                address = element.attributes.get(key, "")
                parts = urlsplit(address)
                if not address or parts.scheme or address.startswith(("//", "data:")) or path.name == "404.html":
                    continue
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                known = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
                if not target.exists() or not known:
                    wrong.append(f"{path.relative_to(site)}: {address}")
    assert wrong == []


def test_site_needs_no_network(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for element in page.elements:
            if element.tag in ("script", "img", "iframe", "source", "video", "audio", "link"):
                address = element.attributes.get("src") or element.attributes.get("href", "")
                fetched = urlsplit(address).scheme in ("http", "https") and element.attributes.get("rel") != "canonical"
                assert not fetched, f"{path}: {address}"


def test_pictures_have_descriptions(pages: dict[Path, Page]) -> None:
    pictures = 0
    for path, page in pages.items():
        for element in page.elements:
            if "article" not in element.inside or "svg" in element.inside:
                continue
            if element.tag == "img":
                assert len(element.attributes.get("alt", "")) > 10, f"{path}: {element}"
            elif element.tag == "svg" and not {"md-icon", "md-button", "twemoji"} & set(element.inside):
                assert element.attributes.get("role") == "img", f"{path}: {element}"
                ids = element.attributes.get("aria-labelledby", "").split()
                labelled = len(element.attributes.get("aria-label", "")) > 20
                assert labelled or (ids and set(ids) <= page.anchors), f"{path}: {element}"
            else:
                continue
            pictures += 1
    assert pictures >= 6


def test_search_index_has_no_text_of_pictures(site: Path) -> None:
    """Numbers of pictures would be found as if the page said something about them."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = "\n".join(doc["text"] for doc in index["docs"])
    assert len(text) > 100_000
    for words in (
        "<svg",
        "better than the stage before",
        "prompts or answers: the worst gap",
        "var(--mg-",
        "aria-labelledby",
    ):
        assert words not in text, words


def test_terms_have_hover_texts(pages: dict[Path, Page]) -> None:
    terms = [
        e for page in pages.values() for e in page.elements if e.tag == "a" and e.attributes.get("class") == "term"
    ]
    assert len(terms) > 300
    assert all(len(term.attributes["title"]) > 10 and "glossary.html#" in term.attributes["href"] for term in terms)


# ---- in a browser -------------------------------------------------------------------------------------


def set_screen(browser: Chrome, width: int, scheme: str) -> None:
    """Set the width of the screen in pixels and the colour scheme that the reader prefers."""
    phone = width < 600
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def open_page(browser: Chrome, path: Path, width: int, scheme: str) -> None:
    """Open a page with this screen width in pixels and this colour scheme."""
    set_screen(browser, width, scheme)
    browser.get(path.as_uri())


def layout_problems(browser: Chrome, width: int) -> Iterator[str]:
    """Yield the problems of the open page."""
    for entry in browser.get_log("browser"):
        if entry["level"] in ("SEVERE", "WARNING"):
            yield f"console: {entry['message']}"
    yield from browser.execute_script(
        "return [...document.images].filter(i => i.loading != 'lazy' && !(i.complete && i.naturalWidth))"
        ".map(i => 'picture not loaded: ' + i.src)"
    )
    still = "document.head.insertAdjacentHTML('beforeend', '<style>* { transition: none !important }</style>')"
    browser.execute_script(still)  # a colour that changes slowly would be read too early
    for theme in ("default", "slate") if width < 600 else ("slate", "default"):
        browser.execute_script("document.body.dataset.mdColorScheme = arguments[0]", theme)
        for problem in browser.execute_script(READABLE, MIN_CONTRAST, MIN_FONT_PIXELS):
            if not (problem.startswith("wide picture") and any(kind in problem for kind in WIDE)):
                yield f"{theme}: {problem}"
    without_shadow = browser.execute_script(  # the theme's tabs have their own fade and arrow
        "return [...document.querySelectorAll('article *:not(.tabbed-labels)')].filter(e =>"
        "  e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) &&"
        "  !getComputedStyle(e).backgroundAttachment.startsWith('local, local, scroll, scroll'))"
        ".map(e => `${e.tagName} ${e.className}`)"
    )
    yield from (f"scrolls sideways without a shadow: {name}" for name in without_shadow)
    if width >= 1280:
        yield from browser.execute_script(
            "return [...document.querySelectorAll('article pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1)"
            ".map(e => 'code wider than its box: ' + e.textContent.trim().slice(0, 60))"
        )
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    if wide > width:
        yield f"{wide - width} pixels wider than the screen"


SCREENS = [(1400, "light"), (390, "dark")]


def background_problems(browser: Chrome, scheme: str) -> Iterator[str]:
    """Yield what is wrong with the background of the open page for a reader who prefers ``scheme``."""
    body = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    bright = sum(int(n) for n in body[body.index("(") + 1 : body.index(")")].split(",")[:3]) > 384
    if bright != (scheme == "light"):
        yield f"the background is {body}"


def test_layout_of_every_page(site: Path, browser: Chrome) -> None:
    """Each page is loaded for one of the screens, and then gets the other: loading takes longer than all checks."""
    browser.get((site / "index.html").as_uri())
    wrong = []
    for number, path in enumerate(sorted(site.glob("**/*.html"))):
        if path.name == "404.html":  # its links only work on a server
            continue
        listing = path.is_relative_to(site / "source")
        if listing and path.name[0] > "c":
            continue  # listings of source files are all alike: some on one screen are enough
        screens = SCREENS[1:] if listing else SCREENS[:: 1 if number % 2 else -1]
        for loaded, (width, scheme) in enumerate(screens):
            if loaded == 0:
                set_screen(browser, width, scheme)
                for _ in range(3):  # the page before stores its scheme, also after this has forgotten it
                    browser.execute_script("localStorage.clear()")
                    browser.get(path.as_uri())
                    if not (found := list(background_problems(browser, scheme))):
                        break
            else:
                set_screen(browser, width, scheme)
                found = []
            found += layout_problems(browser, width)
            wrong += [f"{path.relative_to(site)}, {width} pixels: {problem}" for problem in found]
    assert wrong == []


def test_search_works_without_server(site: Path, browser: Chrome) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    open_page(browser, site / "reference" / "options.html", 1280, "light")
    box = "[data-md-component=search-query]"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return !document.querySelector('.md-search').hidden"))
    browser.execute_script(f"document.querySelector('{box}').focus()")
    browser.find_element("css selector", box).send_keys("radix")
    results = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.getAttribute('href'))"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(results))
    assert any("glossary.html" in address for address in browser.execute_script(results))
