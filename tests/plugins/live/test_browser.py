"""The page of the live view in headless Chromium, against a real server."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minisgl.testing.serving import Server, patient_timeout

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars
"""
LONG = "Please explain in one sentence how the pages of a prompt are shared between requests, and why. "


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("Chromium or its driver is not installed (Debian: apt-get install chromium chromium-driver)")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS.split():
        options.add_argument(flag)
    driven = Chrome(options=options, service=Service(driver))
    driven.set_script_timeout(patient_timeout(60))
    yield driven
    driven.quit()


@pytest.fixture(scope="module")
def server(browser: Chrome) -> Iterator[Server]:
    """Start a server; without a browser, none."""
    with Server("model=tutor", "num_pages=8192") as started:  # more than a page can fill
        yield started


@pytest.fixture
def page(browser: Chrome, server: Server) -> Iterator[Chrome]:
    """Open the page; afterwards, the browser's console must be empty."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(server.url)
    wait(browser, "document.getElementById('status').textContent === 'watching' && window.minisglLive.model.header")
    yield browser
    assert browser.get_log("browser") == []


def wait(browser: Chrome, condition: str) -> Any:
    """Wait until a JavaScript expression is true, and return its value."""
    until = time.monotonic() + patient_timeout(30)
    while not (value := browser.execute_script(f"return {condition}")):
        assert time.monotonic() < until, f"{condition}\n{browser.find_element('css selector', 'body').text}"
        time.sleep(0.05)
    return value


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def send(browser: Chrome, text: str, answers: int) -> None:
    """Send a message, and wait for the end of the answer, which is the chat's answer number ``answers``."""
    browser.execute_script("document.getElementById('prompt').value = arguments[0]", text)
    browser.find_element("id", "send").click()
    wait(browser, f"window.minisglLive.chat.turns.length === {answers} && !window.minisglLive.chat.control")
    wait(browser, "!window.minisglLive.model.open.size")


def test_chat_streams_and_shows_its_cached_prefix(page: Chrome) -> None:
    """The follow-up finds the first turn in the cache; a token shows its step as it was; HTML stays text."""
    send(page, LONG + "<script>alert(1)</script><img src=x onerror=alert(2)>", 1)
    assert page.find_elements("css selector", "#turns script, #turns img, #board script") == []
    assert "<script>alert(1)</script>" in page.find_element("css selector", ".turn.user").text
    send(page, "Why?", 2)
    prompts = page.find_elements("css selector", ".turn .prompt summary")
    assert ", 0 from the cache" in prompts[0].text
    cached = wait(page, "[...window.minisglLive.model.requests.values()].at(-1).hit")
    assert cached >= 32
    assert f"{cached} from the cache" in prompts[1].text
    kinds = page.execute_script(
        "return [...document.querySelectorAll('.turn.user')].at(-1).querySelectorAll('.tok.cached').length"
    )
    assert kinds == cached
    tokens = page.find_elements("css selector", ".turn.assistant .tok.decoded")
    tokens[2].click()
    step = wait(
        page, "document.querySelector('.column.chosen') && document.querySelector('.column.chosen').dataset.step"
    )
    uid, made = page.execute_script(
        "const { chat, model } = window.minisglLive, uid = chat.uidOf(chat.turns[0]);"
        "return [uid, model.requests.get(uid).made[2]]"
    )
    assert int(step) == made
    assert page.find_element("css selector", f".column.chosen [data-uid='{uid}']")
    words = page.find_element("css selector", ".panel.step").text
    assert f"Step {made}" in words
    assert f"Request {uid}: " in words
    assert page.find_elements("css selector", ".pages rect.focus")
    assert "log " in page.find_element("id", "token").text
    assert f"as they were when step {made} was launched" in page.find_element("id", "past").text
    heads = "[...document.querySelectorAll('.panel.past h2')].map((head) => head.textContent)"
    tree, pages, requests = page.execute_script(f"return {heads}")
    assert f"Radix tree at step {made}: " in tree
    assert f"Page map at step {made}: " in pages
    assert requests == f"Requests at step {made}: 1 running, 0 waiting"
    assert page.find_element("css selector", f".queue .chip[aria-label='Request {uid}']")
    page.find_element("id", "follow").click()
    wait(page, "document.getElementById('past').hidden && !document.querySelector('.panel.past')")
    assert "0 running" in wait(page, "document.getElementById('panel-queue').textContent")
    page.execute_script(  # as if the step had been long ago
        "const { model, history } = window.minisglLive; history.parts = []; history.last = null;"
        "model.stepAt.delete(arguments[0])", made,
    )  # fmt: skip
    tokens[2].click()
    wait(page, "!document.getElementById('past').hidden")
    assert "no longer kept" in page.find_element("id", "past").text
    assert f"no longer has step {made}" in page.find_element("css selector", ".panel.step").text


def test_two_tabs_share_a_batch(page: Chrome, server: Server) -> None:
    """The rows of another client's request are in the same steps, and its text is not here."""
    page.execute_script("document.getElementById('max-tokens').value = 60")
    page.execute_async_script(
        "fetch('live/pace', {method: 'POST', headers: {'Content-Type': 'application/json'}, "
        'body: \'{"do": "pause"}\'}).then(arguments[0])'
    )
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    page.get(server.url)
    wait(page, "document.getElementById('status').textContent === 'watching' && window.minisglLive.model.pace.paused")
    page.execute_script("document.getElementById('prompt').value = 'Count from 1 to 9.'")
    page.find_element("id", "send").click()
    wait(page, "window.minisglLive.model.open.size === 1")
    page.switch_to.window(first)
    page.execute_script("document.getElementById('prompt').value = 'What is a page?'")
    page.find_element("id", "send").click()
    wait(page, "window.minisglLive.model.open.size === 2")
    before = page.execute_script("return window.minisglLive.model.lastLaunched")
    page.find_element("id", "one-step").click()
    wait(page, f"window.minisglLive.model.lastLaunched === {before + 1}")
    page.find_element("id", "one-step").click()
    wait(page, f"window.minisglLive.model.lastLaunched === {before + 2}")
    assert page.find_element("id", "pause").text == "Resume"
    rows = page.execute_script("return window.minisglLive.model.steps.at(-1).rows.map((row) => row.uid)")
    assert len(rows) == 2
    column = f".column[data-step='{before + 2}'] rect[data-uid]"
    assert wait(page, f'document.querySelectorAll("{column}").length') == 2
    assert "2 requests computed their next token together" in wait(
        page, "document.getElementById('explain').textContent"
    )
    page.find_element("id", "pause").click()
    wait(page, "!window.minisglLive.model.open.size")
    assert "Count from 1" not in page.find_element("css selector", "body").text
    page.switch_to.window(page.window_handles[-1])
    page.close()
    page.switch_to.window(first)


def test_saved_page_replays_itself(page: Chrome, tmp_path: Any) -> None:
    """The saved page needs no server, and shows the same last step."""
    send(page, "Hello", 1)
    page.execute_script(
        "window.saved = null;"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#'; }"
    )
    page.find_element("id", "save-page").click()
    html = wait(page, "window.saved")
    last = page.execute_script("return window.minisglLive.model.steps.at(-1).s")
    page.find_element("id", "save-trace").click()
    lines = wait(page, "window.saved && window.saved.startsWith('{') && window.saved").splitlines()
    assert json.loads(lines[0])["event"] == "header"
    file = tmp_path / "live.html"
    file.write_text(html, encoding="utf-8")
    page.get(file.as_uri())
    assert (
        wait(page, "document.querySelector('output') && document.querySelector('output').textContent") == f"step {last}"
    )
    assert "Hello" in page.find_element("id", "replayed-chat").text
    page.find_element("css selector", "[aria-label='Previous step']").click()
    assert (
        wait(page, "document.querySelector('output') && document.querySelector('output').textContent")
        == f"step {last - 1}"
    )


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_contrast_and_width(page: Chrome, scheme: str) -> None:
    """Text has a contrast of at least 4.5:1 in both themes, and a phone needs no sideways scrolling."""
    page.execute_script("document.documentElement.dataset.mdColorScheme = arguments[0]", scheme)
    grounds = [("on", each) for each in ("q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7", "cache", "decode")]
    pairs = [*grounds, ("ink", "paper"), ("ink", "well"), ("soft", "paper"), ("soft", "well"), ("bad", "paper")]
    look = "return getComputedStyle(document.documentElement).getPropertyValue('--mg-' + arguments[0]).trim()"
    low = [pair for pair in pairs if contrast(*(page.execute_script(look, name) for name in pair)) < 4.5]
    assert low == []
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wait(page, "document.documentElement.scrollWidth <= 390")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_keyboard(page: Chrome) -> None:
    """Tokens and steps are reached without a mouse."""
    from selenium.webdriver import ActionChains, Keys

    send(page, "Hello", 1)
    page.execute_script("document.querySelector('.turn.assistant .tokens').focus()")
    ActionChains(page).send_keys(Keys.RIGHT, Keys.RIGHT, Keys.ENTER).perform()
    step = int(
        wait(page, "document.querySelector('.column.chosen') && document.querySelector('.column.chosen').dataset.step")
    )
    page.execute_script("document.activeElement.blur()")
    ActionChains(page).send_keys(Keys.RIGHT).perform()
    wait(page, f"document.querySelector('.column.chosen').dataset.step === '{step + 1}'")
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    wait(page, "!document.querySelector('.column.chosen')")


def test_what_if(page: Chrome) -> None:
    """Two futures side by side: the same options give the same steps; else the first difference is framed."""
    send(page, LONG, 1)
    send(page, "Why?", 2)
    page.find_element("css selector", "#what-if summary").click()
    asks = "const form = document.querySelector('#what-if form'); form.cache.value = arguments[0]; form.requestSubmit()"
    page.execute_script(asks, "")
    wait(page, "document.querySelectorAll('#what-if .sides svg').length === 2")
    words = page.find_element("id", "what-if").text
    assert "The steps are the same." in words, words
    page.execute_script(asks, "naive")
    wait(page, "document.querySelectorAll('#what-if .sides .column.chosen').length === 2")
    words = page.find_element("id", "what-if").text
    assert "cache=naive" in words
    assert "is the first that differs" in words
    page.execute_script("document.querySelector('#what-if form').at.value = 999999; " + asks, "")
    wait(page, "document.querySelector('#what-if .bad')")
    assert "has the steps" in page.find_element("css selector", "#what-if .bad").text


def test_guide(page: Chrome) -> None:
    """Each step says what happened in it, and the timeline keeps it. A later message changes none of the sentences."""
    text = "document.getElementById('{}').textContent"
    page.find_element("id", "guide-second").click()
    assert "Press the first button" in page.find_element("id", "guide-note").text
    page.find_element("id", "guide-first").click()
    first = wait(page, text.format("found-first"))
    assert "computed all" in first, first
    summary = page.find_element("css selector", ".turn .prompt summary").text
    assert "0 from the cache (only whole pages of 16 tokens are kept" in summary
    marked = "document.querySelector('.column.marked')"
    made = int(wait(page, f"{marked} && {marked}.dataset.step"))
    assert f"Step {made} computed all" in first
    assert page.find_element("css selector", ".panel.step h2").text.startswith(f"Step {made}")
    page.find_element("id", "guide-second").click()
    second = wait(page, text.format("found-turn"))
    assert "tokens came from the cache (only whole pages of 16 tokens are kept)" in second
    send(page, "Why?", 3)
    assert page.execute_script("return " + text.format("found-turn")) == second
    wait(page, f"!{marked}")  # the timeline follows the newest steps again
    note = page.execute_async_script(  # in the page itself, before the short answer ends
        "const click = (id) => document.getElementById(id).click(), done = arguments[0];"
        "const wait = () => { if (!window.minisglLive.chat.control) return setTimeout(wait, 1);"
        " click('guide-second'); done(document.getElementById('guide-note').textContent); };"
        "click('guide-first'); wait();"
    )
    assert "still being written" in note
    wait(page, text.format("found-first"))


def test_paused_is_said(page: Chrome) -> None:
    """A question that waits because of a pause says so. The theme is kept when the page is loaded again."""
    page.find_element("id", "pause").click()
    wait(page, "window.minisglLive.model.pace.paused")
    page.execute_script("document.getElementById('prompt').value = 'Hello'")
    page.find_element("id", "send").click()
    wait(page, "!document.getElementById('paused').hidden")
    assert "The server is paused, and 1 request waits" in page.find_element("id", "paused").text
    page.find_element("id", "pause").click()
    wait(page, "document.getElementById('paused').hidden && !window.minisglLive.model.open.size")
    page.find_element("id", "theme").click()
    chosen = page.execute_script("return document.documentElement.dataset.mdColorScheme")
    page.refresh()
    wait(page, f"document.documentElement.dataset.mdColorScheme === '{chosen}'")
    wait(page, "document.getElementById('status').textContent === 'watching'")
    page.find_element("id", "theme").click()


def test_workloads(page: Chrome) -> None:
    """A whole class is in one batch, and no cache would be slower. A what-if makes a pool too large to fill small."""
    page.find_element("id", "guide-class").click()
    words = wait(page, "document.getElementById('found-class').textContent")
    assert "The first two readers computed their handbooks" in words
    assert "prompt tokens came from the cache" in words
    assert page.execute_script("return Math.max(...window.minisglLive.model.steps.map((step) => step.rows.length))") > 8
    tree = page.find_element("css selector", ".panel.tree").text
    assert [tree.count(f"system: The {kind} handbook.") for kind in ("cooking", "sailing")] == [1, 1], tree
    page.find_element("id", "what-if-naive").click()
    found = wait(page, "document.getElementById('found-what-if').textContent")
    computed, _, without, had, would = (int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*", found)[:5])
    assert computed < without, found
    assert had < would, found  # not on a loaded machine either: both are simulated
    page.find_element("css selector", "[data-workload=pool]").click()
    assert "more than a page can fill" in page.find_element("id", "message").text
    row = "[...document.querySelectorAll('.futures tr')].find((row) => row.cells[0].textContent === 'retractions')"
    wait(page, f"document.querySelector('.futures').textContent.includes('num_pages=') && {row}")
    was, would = page.execute_script(f"const row = {row}; return [row.cells[1].textContent, row.cells[2].textContent]")
    assert int(was) == 0 < int(would)
    assert "Retracted: a running request needs a page, and none is free" in page.find_element("id", "what-if").text
    assert page.find_elements("css selector", "#what-if .column.chosen path.retracted")
    sides = page.find_elements("css selector", "#what-if .sides p")
    assert ["retracted before it" in side.text for side in sides] == [False, True]
