"""The built site: it needs no network, its links lead somewhere, its pictures can be told in words, and it looks right
in a browser, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from minisgl.course.site.__main__ import course

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parents[2]
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


LEGIBLE = 8.9
"""Pixels of a font; wide pictures keep it on a phone, where they scroll in their box."""


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]  # tags and classes of what holds it


class Page(HTMLParser):
    """The elements of one page."""

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
        return {e.attributes[key] for e in self.elements for key in ("id", "name") if key in e.attributes}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.glob("**/*.html"))}


def test_the_site_is_whole(site: Path, pages: dict[Path, Page]) -> None:
    there = {path.relative_to(site).as_posix() for path in pages}
    chapters = {path.replace(".md", ".html") for path, _ in course(ROOT)}
    assert chapters | {"index.html", "glossary.html", "reference/api.html", "benchmarks/stages.html"} <= there
    assert len(chapters) >= 8


def test_every_internal_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
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


def test_nothing_is_fetched_from_anywhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for element in page.elements:
            if element.tag in ("script", "img", "iframe", "source", "video", "audio", "link"):
                address = element.attributes.get("src") or element.attributes.get("href", "")
                fetched = urlsplit(address).scheme in ("http", "https") and element.attributes.get("rel") != "canonical"
                assert not fetched, f"{path}: {address}"


def test_every_picture_can_be_told_in_words(pages: dict[Path, Page]) -> None:
    pictures = 0
    for path, page in pages.items():
        for element in page.elements:
            if "article" not in element.inside or "svg" in element.inside:
                continue
            if element.tag == "img":
                assert len(element.attributes.get("alt", "")) > 10, f"{path}: {element}"
            elif element.tag == "svg" and not {"md-icon", "md-button", "twemoji"} & set(element.inside):
                assert element.attributes.get("role") == "img", f"{path}: {element}"
                named = element.attributes.get("aria-labelledby", "").split()
                told = len(element.attributes.get("aria-label", "")) > 20
                assert told or (named and set(named) <= page.anchors), f"{path}: {element}"
            else:
                continue
            pictures += 1
    assert pictures >= 6


# ---- in a browser -------------------------------------------------------------------------------------


def look(browser: Chrome, path: Path, width: int, scheme: str) -> None:
    phone = width < 600
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(path.as_uri())


def found_wrong(browser: Chrome, width: int) -> Iterator[str]:
    for entry in browser.get_log("browser"):
        if entry["level"] in ("SEVERE", "WARNING"):
            yield f"console: {entry['message']}"
    yield from browser.execute_script(
        "return [...document.images].filter(i => i.loading != 'lazy' && !(i.complete && i.naturalWidth))"
        ".map(i => 'picture not loaded: ' + i.src)"
    )
    smallest = browser.execute_script(
        "return [...document.querySelectorAll('article svg[viewBox]')].filter(s => s.querySelector('text')).map(s =>"
        "  s.getBoundingClientRect().width / s.viewBox.baseVal.width *"
        "  Math.min(...[...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize))))"
    )
    yield from (f"words {size:.1f} pixels high in a picture" for size in smallest if size < LEGIBLE)
    bare = browser.execute_script(  # the theme's tabs have a fade and an arrow of their own
        "return [...document.querySelectorAll('article *:not(.tabbed-labels)')].filter(e =>"
        "  e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) &&"
        "  !getComputedStyle(e).backgroundAttachment.startsWith('local, local, scroll, scroll'))"
        ".map(e => `${e.tagName} ${e.className}`)"
    )
    yield from (f"scrolls sideways, and no shadow says so: {what}" for what in bare)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    if wide > width:
        yield f"{wide - width} pixels wider than the screen"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_every_page_looks_right(site: Path, browser: Chrome, width: int, scheme: str) -> None:
    look(browser, site / "index.html", width, scheme)
    browser.execute_script("localStorage.clear()")  # the scheme of an earlier visit
    wrong = []
    for path in sorted(site.glob("**/*.html")):
        if path.name == "404.html":  # its addresses are the server's
            continue
        if path.is_relative_to(site / "source") and (width, scheme) != (380, "dark"):
            continue  # listings of files: all made alike, so looked at once
        look(browser, path, width, scheme)
        wrong += [f"{path.relative_to(site)}: {what}" for what in found_wrong(browser, width)]
        body = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        bright = sum(int(n) for n in body[body.index("(") + 1 : body.index(")")].split(",")[:3]) > 384
        if bright != (scheme == "light"):
            wrong.append(f"{path.relative_to(site)}: the background is {body}")
    assert wrong == []


def test_the_search_works_from_the_disk(site: Path, browser: Chrome) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    look(browser, site / "reference" / "options.html", 1280, "light")
    box = "[data-md-component=search-query]"
    WebDriverWait(browser, 10).until(lambda b: b.execute_script("return !document.querySelector('.md-search').hidden"))
    browser.execute_script(f"document.querySelector('{box}').focus()")
    browser.find_element("css selector", box).send_keys("radix")
    results = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.getAttribute('href'))"
    WebDriverWait(browser, 10).until(lambda b: b.execute_script(results))
    assert any("glossary.html" in address for address in browser.execute_script(results))
