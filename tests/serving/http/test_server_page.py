"""The chat page in a real browser (Debian's chromium, headless); skipped where there is none."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.fake_engine import FakeEngine, says
from tests.helpers.http_server import byte_tokenizer, serving, tiny_model

MAX_LEN = 800
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=900,1000",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, request):
    """(browser on the page, engine); the parameter is the server's settings and the template."""
    settings = dict(getattr(request, "param", {}))
    tokenizer = byte_tokenizer() if settings.pop("chat", True) else Tokenizer.byte_level()
    with (
        FakeEngine(max_len=MAX_LEN) as engine,
        serving(tiny_model(tokenizer), engine, **settings) as url,
    ):
        browser.get(url)
        yield browser, engine
        browser.get("about:blank")


def find(browser, id):
    return browser.find_element(By.ID, id)


def until(browser, condition):
    return WebDriverWait(browser, 60).until(lambda _: condition())


def said(browser) -> list[str]:
    script = "return [...document.querySelectorAll('#log .said')].map((e) => e.innerText)"
    return browser.execute_script(script)


def buttons(browser, title: str) -> list:
    found = browser.find_elements(By.CSS_SELECTOR, "#log .actions button")
    return [button for button in found if button.text == title]


def is_idle(browser) -> bool:
    return not find(browser, "stop").is_enabled() and find(browser, "send").is_enabled()


def console(browser) -> list[str]:
    """What went wrong on the page, but for failed requests, which tests cause."""
    entries = [entry["message"] for entry in browser.get_log("browser")]
    return [entry for entry in entries if "Failed to load resource" not in entry]


def test_a_conversation(page, tmp_path):
    browser, engine = page
    until(browser, lambda: f"tiny, {MAX_LEN} tokens" in find(browser, "model").text)
    find(browser, "input").send_keys("hello", Keys.SHIFT, Keys.ENTER, Keys.NULL, "there")
    find(browser, "input").send_keys(Keys.ENTER)
    until(browser, lambda: len(said(browser)) == 2 and is_idle(browser))
    question, answer = said(browser)
    assert question == "hello\nthere" and len(answer) > 10
    assert "41 tokens" in find(browser, "status").text
    assert browser.switch_to.active_element == find(browser, "input"), "ready for the next message"
    find(browser, "input").send_keys("more")
    find(browser, "send").click()
    until(browser, lambda: len(said(browser)) == 4 and is_idle(browser))
    asked = bytes(engine.requests[-1].prompt).decode()
    assert asked.startswith("<user>hello\nthere\n<assistant>")
    assert asked.endswith("\n<user>more\n<assistant>")
    assert browser.save_screenshot(str(tmp_path / "page.png"))
    before = said(browser)
    browser.refresh()
    until(browser, lambda: said(browser) == before)
    buttons(browser, "Regenerate")[-1].click()
    until(browser, lambda: len(engine.requests) == 3 and is_idle(browser))
    assert engine.requests[-1].prompt == engine.requests[-2].prompt and len(said(browser)) == 4
    buttons(browser, "Edit")[-1].click()
    assert said(browser) == before[:2] and find(browser, "input").get_attribute("value") == "more"
    find(browser, "reset").click()
    assert said(browser) == []
    assert console(browser) == []


def test_what_edit_and_new_conversation_remove_comes_back(page):
    """Also after a reload, which keeps the draft too; the next message makes it final."""
    browser, _ = page
    until(browser, lambda: "tiny" in find(browser, "model").text)
    for count, text in ((2, "one"), (4, "two")):
        find(browser, "input").send_keys(text, Keys.ENTER)
        until(browser, lambda count=count: len(said(browser)) == count and is_idle(browser))
    whole = said(browser)
    for remove in (lambda: buttons(browser, "Edit")[0], lambda: find(browser, "reset")):
        remove().click()
        assert said(browser) == []
        assert find(browser, "removed").text.startswith("4 messages removed")
        find(browser, "input").send_keys("!")
        draft = find(browser, "input").get_attribute("value")
        browser.refresh()
        until(browser, lambda: "tiny" in find(browser, "model").text)
        assert find(browser, "input").get_attribute("value") == draft
        find(browser, "undo").click()
        assert said(browser) == whole and not find(browser, "removed").is_displayed()
    find(browser, "reset").click()
    find(browser, "input").send_keys("three", Keys.ENTER)
    until(browser, lambda: len(said(browser)) == 2 and is_idle(browser))
    assert not find(browser, "undo").is_displayed()


LONG_NAME = "an-organisation/a-model-with-a-rather-long-name-70B-Instruct-2507-w4a16"


@pytest.mark.parametrize(("width", "height", "header"), [(1280, 800, 60), (390, 800, 100)])
def test_the_page_fits_wide_and_narrow(page, width, height, header, tmp_path):
    """The header stays low, the end of an answer and its buttons are in sight, load is shown."""
    browser, engine = page
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    try:
        until(browser, lambda: "tiny" in find(browser, "model").text)
        assert find(browser, "theme").text in ("Dark", "Light")
        was = find(browser, "theme").text
        find(browser, "theme").click()
        assert {was, find(browser, "theme").text} == {"Dark", "Light"}
        until(browser, lambda: find(browser, "load").text == "0 running, 0 waiting")
        engine.answer = says(byte_tokenizer(), "A line.\n\n" * 60)
        browser.execute_script("document.getElementById('max_tokens').value = 600")
        find(browser, "input").send_keys("hello", Keys.ENTER)
        until(browser, lambda: len(said(browser)) == 2 and is_idle(browser))
        name = "document.getElementById('model').textContent = arguments[0]"
        browser.execute_script(name, f"{LONG_NAME}, 131072 tokens of context")
        place = "return arguments[0].getBoundingClientRect().bottom"
        log = browser.execute_script(place, find(browser, "log"))
        assert browser.execute_script(place, buttons(browser, "Regenerate")[0]) <= log + 1
        assert find(browser, "send").rect["y"] < height, "the form is on the first screen"
        assert browser.find_element(By.TAG_NAME, "header").rect["height"] <= header
        assert browser.save_screenshot(str(tmp_path / f"page-{width}.png"))
        assert console(browser) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


MARKDOWN = """## A list

1. **bold** and `code`
2. [link](https://example.org) [bad](javascript:alert(1))

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>no</b>")
```

<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 1">
<form action="/"><button onclick="window.hacked = 1">x</button></form>
"""
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "utc"}}\n</tool_call>'


def test_markdown_is_shown_and_runs_nothing(page, tmp_path):
    browser, engine = page
    until(browser, lambda: "tiny" in find(browser, "model").text)
    engine.answer = says(byte_tokenizer(), MARKDOWN)
    browser.execute_script("document.getElementById('max_tokens').value = 600")
    find(browser, "input").send_keys("x", Keys.ENTER)
    until(browser, lambda: len(said(browser)) == 2 and is_idle(browser))
    answer = browser.find_element(By.CSS_SELECTOR, ".markdown")
    inside = answer.get_attribute("innerHTML")
    for part in ("<h2>A list", "<strong>bold", "<code>code", "<table>", "&lt;b&gt;no", "<li>"):
        assert part in inside, part
    for part in ("<script", "<img", "<form", "onerror", "javascript:"):
        assert part not in inside, part
    [link] = [a for a in answer.find_elements(By.TAG_NAME, "a") if a.get_attribute("href")]
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert browser.execute_script("return window.hacked") is None
    answer.find_element(By.CSS_SELECTOR, ".copy").click()
    until(browser, lambda: answer.find_element(By.CSS_SELECTOR, ".copy").text == "Copied")
    find(browser, "theme").click()
    assert browser.save_screenshot(str(tmp_path / "markdown.png"))
    assert console(browser) == []


def test_a_call_is_folded_and_its_result_is_the_next_message(page):
    browser, engine = page
    until(browser, lambda: "tiny" in find(browser, "model").text)
    engine.answer = says(byte_tokenizer(), CALL)
    tools = '[{"type": "function", "function": {"name": "now"}}]'
    browser.execute_script("document.getElementById('tools').value = arguments[0]", tools)
    find(browser, "input").send_keys("when?", Keys.ENTER)
    until(browser, lambda: "call's result" in find(browser, "status").text and is_idle(browser))
    call = browser.find_element(By.CSS_SELECTOR, "details.call")
    assert call.text == "Call of now" and not call.get_attribute("open")
    assert '{"zone": "utc"}' in call.get_attribute("textContent")
    find(browser, "input").send_keys("noon", Keys.ENTER)
    until(browser, lambda: len(engine.requests) == 2 and is_idle(browser))
    assert b"<tool>noon\n" in bytes(engine.requests[-1].prompt)


def test_stop(page):
    browser, engine = page
    until(browser, lambda: "tiny" in find(browser, "model").text)
    with engine.held():
        find(browser, "input").send_keys("hi", Keys.ENTER)
        assert engine.wait_for(lambda: len(engine.requests) == 1)
        until(browser, lambda: find(browser, "stop").is_enabled())
        assert find(browser, "log").get_attribute("aria-busy") == "true"
        find(browser, "stop").click()
        assert engine.wait_for(lambda: engine.cancelled == [engine.requests[0].id])
        until(browser, lambda: is_idle(browser))
    assert find(browser, "status").text == "stopped"
    assert said(browser) == [] and find(browser, "input").get_attribute("value") == "hi"
    with engine.held(5):
        find(browser, "input").send_keys(Keys.ENTER)
        until(browser, lambda: len(said(browser)) == 2 and len(said(browser)[1]) >= 2)
        find(browser, "input").send_keys(Keys.ESCAPE)
        until(browser, lambda: is_idle(browser))
    kept = browser.execute_script(
        "return JSON.parse(localStorage.getItem('jaxllama.conversation'))[1].content"
    )
    find(browser, "input").send_keys("on", Keys.ENTER)
    until(browser, lambda: len(said(browser)) == 4 and is_idle(browser))
    assert bytes(engine.requests[-1].prompt).decode() == (
        f"<user>hi\n<assistant>{kept}\n<user>on\n<assistant>"
    ), "what was written before the stop belongs to the conversation"


@pytest.mark.parametrize("page", [{"api_keys": ("secret",)}], indirect=True)
def test_settings_and_errors(page):
    browser, engine = page
    until(browser, lambda: "API key" in find(browser, "error").text)
    assert find(browser, "settings").get_attribute("open"), "where the key belongs"
    find(browser, "key").send_keys("secret", Keys.TAB)
    until(browser, lambda: "tiny" in find(browser, "model").text)
    for id, value in (("temperature", "0"), ("max_tokens", "7"), ("seed", "5"), ("system", "Be.")):
        find(browser, id).clear()
        find(browser, id).send_keys(value)
    find(browser, "input").send_keys("hi", Keys.ENTER)
    until(browser, lambda: len(said(browser)) == 2 and is_idle(browser))
    [request] = engine.requests
    assert bytes(request.prompt) == b"<system>Be.\n<user>hi\n<assistant>"
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, request.max_new_tokens) == (0, 5, 7)
    assert "cut at the limit" in find(browser, "status").text
    find(browser, "max_tokens").clear()
    find(browser, "max_tokens").send_keys("1000")
    find(browser, "input").send_keys("again", Keys.ENTER)
    until(browser, lambda: f"context is {MAX_LEN} tokens" in find(browser, "error").text)
    assert find(browser, "input").get_attribute("value") == "again" and len(said(browser)) == 2


@pytest.mark.parametrize("page", [{"chat": False}], indirect=True)
def test_a_model_without_a_template_continues_the_text(page):
    browser, engine = page
    until(browser, lambda: "no chat template" in find(browser, "model").text)
    find(browser, "input").send_keys("Once", Keys.ENTER)
    until(browser, lambda: len(said(browser)) == 2 and is_idle(browser))
    assert bytes(engine.requests[-1].prompt) == b"Once"


def test_it_can_be_used_without_seeing_it_or_a_mouse(page):
    browser, _ = page
    # The page takes the focus a moment after it has loaded.
    until(browser, lambda: browser.switch_to.active_element.get_attribute("id") == "input")
    order = []
    for _ in range(3):
        order.append(browser.switch_to.active_element.get_attribute("id"))
        browser.switch_to.active_element.send_keys(Keys.TAB)
    assert order == ["input", "send", ""], order  # "" is the settings' summary
    browser.execute_script("document.getElementById('settings').open = true")
    browser.execute_script("document.getElementById('removed').hidden = false")
    for field in browser.find_elements(By.CSS_SELECTOR, "input, textarea, button"):
        assert field.accessible_name, field.get_attribute("id")
    assert find(browser, "log").aria_role == "log"
    assert find(browser, "status").aria_role == "status"
    assert find(browser, "error").get_attribute("role") == "alert"
    assert browser.execute_script("return document.documentElement.lang") == "en"
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
