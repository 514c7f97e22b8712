"""The trace viewer in a browser: it shows the state of each step, and its keys and buttons work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minisgl.chapters.site.home import walk
from minisgl.chapters.site.sliders import page as sliders
from minisgl.testing.simulate import simulate
from minisgl.testing.small import job
from minisgl.trace.draw.pages import shown
from minisgl.trace.history import state_at, turns
from minisgl.trace.read import Trace
from minisgl.trace.tour import tour
from minisgl.trace.view import difference, frame, page

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


def run(policy: str, num_pages: int = 40) -> Trace:
    clients = [job(u, 14 + u % 3, 9, first=u % 2, arrive=2 * u) for u in range(1, 7)]
    options = {"page_size": 4, "num_pages": num_pages, "max_running_requests": 3, "max_prefill_tokens": 8}
    return simulate(clients, policy=policy, **options)


def open_page(browser: Chrome, path: Path, html: str) -> None:
    path.write_text(html, encoding="utf-8")
    browser.get(path.as_uri())


def text(browser: Chrome, ident: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0]).textContent", ident))


def data(browser: Chrome, name: str) -> list[dict[str, str]]:
    """Return the data attributes of all marks with the attribute ``data-<name>``."""
    script = "return [...document.querySelectorAll(`[data-${arguments[0]}]`)].map(e => ({...e.dataset}))"
    return browser.execute_script(script, name)  # type: ignore[no-any-return]


def expect_no_errors(browser: Chrome) -> None:
    """Check that the browser logged no error and no warning."""
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_viewer_shows_the_state_of_each_step(browser: Chrome, tmp_path: Path) -> None:
    trace = run("mixed")
    open_page(browser, tmp_path / "run.html", page([trace]))
    rows = {turn.step: {(r.uid, r.count) for r in turn.rows} for turn, _ in turns(trace)}
    script = "const s = document.getElementById('slider'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
    for step in (0, 9, len(rows) - 1, 4):  # forwards and back
        browser.execute_script(script, step)
        state = state_at(trace, step)
        assert [int(mark["owner"]) for mark in data(browser, "page")] == state.owner.tolist()
        nodes = {(mark["pages"], int(mark["users"])) for mark in data(browser, "pages")}
        assert nodes == {(" ".join(map(str, node.pages)), node.users) for node in state.tree.nodes()}
        current = [mark for mark in data(browser, "step") if mark["step"] == str(step)]
        assert {(int(mark["uid"]), int(mark["count"])) for mark in current} == rows[step]
    expect_no_errors(browser)


def test_page_map_of_large_pool_shows_used_pages(browser: Chrome, tmp_path: Path) -> None:
    trace = run("mixed", 5000)
    open_page(browser, tmp_path / "large.html", page([trace]))
    state = state_at(trace, 0)
    used = [int(mark["page"]) for mark in data(browser, "page")]
    assert 10 < len(used) < 200
    assert used == shown(trace)
    assert [int(mark["owner"]) for mark in data(browser, "page")] == state.owner[used].tolist()
    words = browser.execute_script("return document.querySelector('.pages svg').textContent")
    assert f"and {5000 - len(used):,} more pages, which this run never used" in words
    expect_no_errors(browser)


def test_keys_buttons_and_colours(browser: Chrome, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    one, other = run("mixed"), run("prefill_first")
    open_page(browser, tmp_path / "two.html", page([one, other]))
    differ = difference(one, other)
    assert differ is not None
    assert text(browser, "where").startswith(f"step {differ['step']} of")  # two runs open at their first difference
    assert differ["text"] in text(browser, "message")
    body = browser.find_element("tag name", "body")
    body.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert text(browser, "where").startswith("step 1 of")
    body.send_keys("d")
    assert text(browser, "where").startswith(f"step {differ['step']} of")
    browser.execute_script("document.querySelector('.timeline g.hit').dispatchEvent(new MouseEvent('click'))")
    assert browser.find_elements("css selector", ".pages .focus")
    body.send_keys(Keys.ESCAPE)
    assert not browser.find_elements("css selector", ".focus")
    colour = "return getComputedStyle(document.documentElement).backgroundColor"
    before = browser.execute_script(colour)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(colour) != before
    expect_no_errors(browser)


def test_page_opens_with_a_tour(browser: Chrome, tmp_path: Path) -> None:
    trace = walk()
    stops = tour(trace)
    open_page(browser, tmp_path / "walk.html", page([trace]))
    body = browser.find_element("tag name", "body")
    for number, stop in enumerate(stops, 1):
        assert text(browser, "where").startswith(f"step {stop.step} of")
        assert text(browser, "message") == f"{number} of {len(stops)}: {stop.text}"
        assert browser.find_elements("css selector", f".panel.{stop.panel}.spot")
        body.send_keys("t")
    assert text(browser, "message") == "" and not browser.find_elements("css selector", ".spot, .focus")
    browser.find_element("id", "tour").click()
    assert text(browser, "message").startswith("1 of")
    body.send_keys("\ue00c")  # Escape
    assert text(browser, "message") == ""
    expect_no_errors(browser)


def test_everything_can_be_reached_with_the_keyboard(browser: Chrome, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    open_page(browser, tmp_path / "walk.html", page([walk()]))
    order, outlines = [], []
    for _ in range(9):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        order.append(
            browser.execute_script("const e = document.activeElement; return e.id || e.dataset.key || e.tagName")
        )
        outlines.append(browser.execute_script("return getComputedStyle(document.activeElement).outlineWidth"))
    assert order[:6] == ["theme", "back", "play", "next", "slider", "tour"]
    assert order[6:] == ["0", "1", "2"]  # the requests of the timeline
    assert {width for width in outlines if float(width.removesuffix("px")) < 2} == set(), "the focus is visible"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert text(browser, "message").startswith("Following request 2")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "where").startswith("step 1 of")
    assert browser.execute_script("return document.activeElement.dataset.key") == "2", "a new step keeps the focus"
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    assert text(browser, "message") == ""
    expect_no_errors(browser)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_frame_has_the_colours_of_its_page(browser: Chrome, tmp_path: Path, scheme: str) -> None:
    html = f'<meta charset="utf-8"><link rel="icon" href="data:,"><body data-md-color-scheme="{scheme}">'
    open_page(browser, tmp_path / "frame.html", html + frame(page([run("mixed")])))
    browser.switch_to.frame(browser.find_element("tag name", "iframe"))
    browser.find_element("id", "next").click()
    assert text(browser, "where").startswith("step 1 of")
    colour: Any = browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert colour == {"default": "rgb(252, 251, 248)", "slate": "rgb(30, 33, 41)"}[scheme]
    browser.switch_to.default_content()
    expect_no_errors(browser)


def test_slider_changes_its_numbers(browser: Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "sliders.html", sliders())
    numbers = "return [...document.querySelectorAll('[data-kind=page] .mg-number')].map(e => e.textContent)"
    before = browser.execute_script(numbers)
    script = "const s = document.getElementById('mg-slider-page'); s.value = s.max; s.dispatchEvent(new Event('input'))"
    browser.execute_script(script)
    after = browser.execute_script(numbers)
    assert before[0] == "16" and after[0] == "4"
    assert before[1:] != after[1:]
    expect_no_errors(browser)
