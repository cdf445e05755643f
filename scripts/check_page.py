"""Use the page of `kvant serve` in a real Chromium, as people do and as attackers would.

Usage: python -m pytest -n 0 scripts/check_page.py. It needs Chromium (Debian: apt-get install chromium), the
    package
playwright, and the extras cpu, serve and test. Each test has a browser profile of its own. KVANT_PICTURES
names a folder for a picture of each tab at its end.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Request, sync_playwright
from support.server import Started, started

from kvant.engine.load import find_model
from kvant.files import POCKET

STORY = "Tell me a story about a fox named Pip."
REACHED = "$('#reserved').textContent.includes('B')"
HELPERS = """
window.$ = (selector) => document.querySelector(selector);
window.$$ = (selector) => [...document.querySelectorAll(selector)];
window.count = (selector) => $$(selector).length;
window.active = () => document.activeElement;
window.fits = () => document.documentElement.scrollWidth <= innerWidth;
window.last = () => $$('.message.answer').at(-1);
window.text = () => last()?.querySelector(':scope > .body').textContent ?? '';
window.note = () => last()?.querySelector('.note').textContent ?? '';
window.retry = () => last().querySelectorAll('.actions > button')[1].click();
window.edit = () => $('.message.user .actions').lastChild.click();
window.choose = (words) => $$('#list .open').find((each) => each.textContent.includes(words)).click();
"""
DRAWN = "((canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, 60).data.join())($('#plot'))"
# What must stay text, or become nothing that acts.
ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1><iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](java\nscript:window.hit=1) "
    "[d](data:text/html,x)",
    "[e](\u0001javascript:window.hit=1) [f](//elsewhere.example/x) [g](/health) [h](file:///etc/hosts) "
    "<javascript:x>",
    "![tracker](https://elsewhere.example/pixel.png) <link rel=stylesheet "
    "href=https://elsewhere.example/x.css>",
    '[x](https://elsewhere.example/"onmouseover="window.hit=1) [**y**](https://elsewhere.example/<script>)',
    "| <b onclick=window.hit=1>a</b> | b |\n| --- | --- |\n| <script>window.hit=1</script> | [z](vbscript:x) "
    "|",
    "&lt;script&gt;window.hit=1&lt;/script&gt; &#x6A;avascript:",
    "> " * 300 + "deep",
    "".join(f"{'  ' * i}- deep\n" for i in range(200)),
    "*" * 3000 + "[" * 3000 + "`" * 2999 + "_a" * 3000,
    # a fence without an end
    '```"><script>window.hit=1</script>\n</code></pre><script>window.hit=1</script>',
]
MARKDOWN = """\
# One
Two *three* **four** `five <b>` ~~six~~ ***seven***
next [link](https://example.org/?a=1&b=2).

- a
- b
  1. c
     ```js
     let d = "<e>";
     ```
  2. f

  g
> h
> > i

| j | k |
|:--|--:|
| l | m\\|n |

***
~~~
o
```
~~~
p \\*q\\* r_s_t 2 * 3 * 4 http://example.org/u_v_w.
"""


# Markdown, written so many characters at a time: the tree it becomes, and what is spoken.
WRITTEN = """(async (text, step) => {
const { Markdown } = await import('./page/markdown.js');
const root = document.createElement('div'), spoken = [], shown = new Markdown(root, (block) => spoken.push(block));
for (let end = step; end < text.length; end += step) shown.update(text.slice(0, end));
shown.update(text, true);
root.normalize();
const tree = (node) => node.nodeType === 3 ? node.data
  : [node.localName + (node.href ?? ''), ...[...node.childNodes].map(tree)];
return { tree: tree(root), spoken }; })(%s, %d)"""
LIST = [
    "ol",
    ["li", "c", ["div", ["div", "js", ["button", "Copy"]], ["pre", ["code", 'let d = "<e>";']]]],
    ["li", "f"],
]
TREE = [
    ["h3", "One"],
    [
        "p", "Two ", ["em", "three"], " ", ["strong", "four"], " ", ["code", "five <b>"], " ", ["del", "six"], " ",
        ["strong", ["em", "seven"]], ["br"], "next ", ["ahttps://example.org/?a=1&b=2", "link"], ".",
    ],
    ["ul", ["li", "a"], ["li", "b", LIST, ["p", "g"]]],
    ["blockquote", ["p", "h"], ["blockquote", ["p", "i"]]],
    ["div", ["table", ["thead", ["tr", ["th", "j"], ["th", "k"]]], ["tbody", ["tr", ["td", "l"], ["td", "m|n"]]]]],
    ["hr"],
    ["div", ["div", "code", ["button", "Copy"]], ["pre", ["code", "o\n```"]]],
    ["p", "p *q* r_s_t 2 * 3 * 4 ", ["ahttp://example.org/u_v_w", "http://example.org/u_v_w"], "."],
]  # fmt: skip
SPOKEN = """One Two three four five <b> six seven next link. a b c let d = "<e>"; f g h i j, k, l, m|n, o ``` p *q*
r_s_t 2 * 3 * 4 http://example.org/u_v_w."""
TAGS = (
    "article div p h3 h4 h5 h6 ul ol li blockquote pre code a strong em del br hr table thead tbody tr th td"
)
ATTRIBUTES = "class hidden type href rel target referrerpolicy tabindex role start title"


class Tab:
    """A page in a browser: every address that it asked for and what it sent, and its console's errors and
    warnings.
    """

    def __init__(self, context: BrowserContext, url: str, reached: bool) -> None:
        self.url = url
        self.requests: list[Request] = []
        self.problems: list[str] = []
        self.page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note)
        self.run, self.press, self.type = (
            self.page.evaluate,
            self.page.keyboard.press,
            self.page.keyboard.insert_text,
        )
        self.reload, self.front = self.page.reload, self.page.bring_to_front
        self.page.goto(url)
        if reached:
            self.wait(REACHED)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"{message.text} {message.location.get('url', '')}")

    def close(self) -> None:
        """Close it, and look at what it asked for and complained of."""
        if not self.page.is_closed():
            assert [each.url for each in self.requests if not each.url.startswith((self.url, "about:"))] == []
            assert self.problems == []
            if folder := os.environ.get("KVANT_PICTURES"):
                name = os.environ["PYTEST_CURRENT_TEST"].split("::test_")[-1].split()[0]
                self.page.screenshot(path=f"{folder}/{name}.png")
            self.page.close()

    def wait(self, expression: str, seconds: float = 20) -> Any:
        """Wait until an expression is true. Returns its value. The page's policy forbids Playwright's own
        way.
        """
        end = time.monotonic() + seconds
        while not (found := self.run(expression)):
            assert time.monotonic() < end, (expression, self.run("document.body.innerText.slice(0, 2000)"))
            self.page.wait_for_timeout(30)
        return found

    def click(self, selector: str) -> None:
        """Click what a selector finds first, which must be shown."""
        self.page.locator(selector).first.click(timeout=1000)

    def send(self, text: str, beyond: int | None = None) -> None:
        """Type where the cursor is, and Enter; wait until the answer is longer than ``beyond``."""
        self.type(text)
        self.press("Enter")
        if beyond is not None:
            self.wait(f"$('.growing') && text().length > {beyond}")

    def ended(self) -> str:
        """Wait for the answer's end; its note."""
        return str(self.wait("note()", 60))

    def ask(self, text: str) -> str:
        """Ask, and wait for the answer's end."""
        before = self.run("count('.message.answer')")
        self.run("$('#text').focus()")
        self.send(text)
        self.wait(f"count('.message.answer') === {before + 1} && note()", 60)
        return str(self.run("text()"))

    def sent(self) -> Any:
        """The last question's body."""
        return [each.post_data_json for each in self.requests if each.post_data][-1]

    def canned(self, text: str, thinking: str = "") -> None:
        """Ask, with an answer that is made here. A lone one, of several pieces."""
        pieces = [{"delta": {"reasoning_content": thinking}}] if thinking else []
        pieces += [{"delta": {"content": text[i : i + 7]}} for i in range(0, len(text), 7)]
        events: list[Any] = [
            {"choices": [piece]} for piece in [*pieces, {"delta": {}, "finish_reason": "stop"}]
        ]
        events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}})
        body = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), "[DONE]"])
        answer = {"status": 200, "content_type": "text/event-stream", "body": body}
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
        self.click("#new")
        self.ask("Go on.")
        self.page.unroute("**/v1/chat/completions")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Started]]:
    """A function that starts a server on pocket with these arguments."""
    return partial(started, tmp_path_factory.mktemp("home"), "--sequences", "4", "--max-kv-size", "1024")


@pytest.fixture(scope="module")
def server(serve: Any) -> Iterator[httpx2.Client]:
    with serve() as (process, client, _):
        yield client
        stop(process)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


@pytest.fixture
def visit(browser: Browser, server: httpx2.Client) -> Iterator[Callable[..., Tab]]:
    """A function that opens a tab, with Playwright's words for its screen and what its user prefers.

    ``beside``: a tab whose profile it has, in place of one of its own. ``at``: another server.
    """
    tabs: list[Tab] = []

    def visit(
        at: httpx2.Client = server, *, beside: Tab | None = None, reached: bool = True, **screen: Any
    ) -> Tab:
        if beside is None:
            context = browser.new_context(**{"viewport": {"width": 1360, "height": 860}} | screen)
            context.add_init_script(HELPERS)
        else:
            context = beside.page.context
        tabs.append(Tab(context, f"{at.base_url}/", reached))
        return tabs[-1]

    yield visit
    for tab in tabs:
        tab.close()


def stop(process: subprocess.Popen[str]) -> None:
    """End a server. It must end well, and soon although a page listens."""
    process.terminate()
    assert process.wait(10) == 0


def wait_until_idle(server: httpx2.Client, seconds: float) -> None:
    """Wait until no answer is under way."""
    end = time.monotonic() + seconds
    while (health := server.get("/health").json())["running"] or health["waiting"]:
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.05)


def test_that_it_streams(visit: Any) -> None:
    tab = visit()
    tab.send(STORY, beyond=40)
    early = tab.run("text()")
    assert tab.run("$('#stop').checkVisibility()")
    tab.wait("count('#sequences li') === 1")
    assert tab.run("parseFloat($('#held').textContent)") > 0
    note, whole = tab.ended(), tab.run("text()")
    assert whole.startswith(early), (early, whole)
    assert len(whole) > len(early)
    assert "Pip" in whole
    assert "a second" in note, note
    tab.wait("parseFloat($('#median').textContent) > 0")
    assert "tokens: median" in tab.run("$('#plot').getAttribute('aria-label')")
    assert "Of 32 pages " in tab.run("$('.pages').getAttribute('aria-label')")
    assert tab.run("[...$('#plot').getContext('2d').getImageData(0, 0, 300, 90).data].some(Boolean)")
    # For those who hear it: the whole answer, once.
    tab.wait("$('#spoken').textContent.trim() === text()")
    # The second turn finds the pages of the first one's long question.
    tab.click("#new")
    for question, found in (("There was a fox named Pip. " * 25, False), ("Who helped Pip?", True)):
        tab.ask(question)
        assert ("prompt tokens cached" in tab.ended()) == found, tab.ended()
    # No answer runs: what the memory holds is said to be cached, and not to be nothing.
    tab.wait("$('#held').textContent === 'No answer is running'")
    assert re.match(r"[1-9][0-9.]* [kM]B cached for reuse", tab.run("$('#cached').textContent"))
    assert re.fullmatch(r"[1-9][0-9.]* [kM]B", tab.run("$('#reserved').textContent"))


def test_many_answers(visit: Any, server: httpx2.Client) -> None:
    """The panel shows the answers of all clients, and the page can have several under way itself."""
    tab = visit()
    tab.ask(STORY)
    text = "There was a bear named Clara, who had a boat. She met a hare and a fox. " * 12
    for number, words in enumerate((text, f"{text} And then?", "A duck wants to fly.")):
        # Another client's question, whose answer is long.
        body = {
            "model": "pocket",
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 650 + 20 * number,
        }
        body |= {"ignore_eos": True, "seed": number}
        ask = partial(server.post, "/v1/chat/completions", json=body, timeout=None)
        threading.Thread(target=ask).start()
        time.sleep(0.3)
    tab.send("Tell me a story about a hare who could not sleep.", beyond=5)
    first = tab.run("location.hash")
    tab.click("#new")
    tab.send("A story about a mouse, please.")
    tab.wait("count('#sequences li') === 4 && parseInt($('#waiting').textContent) === 1")
    assert tab.run("new Set($$('#sequences .cell').map((e) => e.style.background)).size") == 4
    said = tab.run("$('.pages').getAttribute('aria-label')")
    assert " 0 are shared" not in said, said
    tab.run("choose('Pip')")
    assert tab.run("location.hash") == first
    tab.wait("count('.message') === 4")
    tab.wait("text().length > 250", 60)
    tab.ended()
    wait_until_idle(server, 60)


def test_stop(visit: Any, server: httpx2.Client) -> None:
    tab = visit()
    box = tab.page.locator("#send").bounding_box()  # where the button is that stops
    assert box is not None
    for stop in (lambda: tab.page.mouse.click(box["x"] + 9, box["y"] + 9), lambda: tab.press("Escape")):
        tab.run("$('#text').focus()")
        tab.send(STORY, beyond=20)
        stop()
        tab.wait("note() === 'Stopped.'")
        kept = tab.run("text()")
        wait_until_idle(server, 5)
        assert tab.run("text()") == kept
        assert len(kept) > 20
        assert tab.run("active().id") == "text"


def test_edit_and_retry(visit: Any) -> None:
    tab = visit()
    tab.click("#options > summary")
    for name, value in (("system", "Be brief."), ("seed", "7"), ("max_tokens", "12"), ("temperature", "0.9")):
        tab.run(f"$('#{name}').focus()")
        tab.type(value)
    tab.click("#options > summary")
    first = tab.ask(STORY)
    sent = tab.sent()
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": STORY},
    ]
    assert (sent["seed"], sent["max_tokens"], sent["temperature"]) == (7, 12, 0.9)
    assert "limit of tokens" in tab.ended()
    # With its seed the same answer comes again.
    tab.run("window.old = last(); retry()")
    tab.wait("last() !== window.old && note()")
    assert tab.run("text()") == first
    tab.ask("And then?")
    tab.run("edit()")
    assert tab.run("active().value") == STORY
    tab.press("Escape")
    assert tab.run("count('.message')") == 4
    tab.run("edit(); active().select()")
    tab.send("Who is Clara?")
    tab.wait("count('.message') === 2 && note()")
    assert tab.run("$('.own').textContent") == tab.sent()["messages"][-1]["content"] == "Who is Clara?"
    assert tab.run("count('#list li')") == 1


def test_an_impossible_number(visit: Any) -> None:
    """It is marked, it is not sent, and the keyboard goes where its user wants."""
    tab = visit()
    tab.click("#options > summary")
    for name, value in (("temperature", "9"), ("seed", "7"), ("system", "Be brief.")):
        tab.click(f"#{name}")
        tab.type(value)
    assert tab.run("active().id") == "system"
    assert tab.run("$('#system').value") == "Be brief."
    tab.click("#text")
    assert tab.run("active().id") == "text"
    assert tab.run("$$('[aria-invalid=true]').map((each) => each.id)") == ["temperature"]
    red = "getComputedStyle($('#%s')).borderColor"
    assert tab.run(red % "temperature") != tab.run(red % "seed")
    assert tab.run("$('#wrong').textContent").startswith("Temperature is not used: ")
    tab.ask(STORY)
    sent = tab.sent()
    assert "temperature" not in sent
    assert sent["seed"] == 7
    tab.click("#temperature")
    tab.run("active().select()")
    tab.type("0.5")
    tab.click("#seed")
    assert not tab.run("count('[aria-invalid=true]')")
    assert tab.run("$('#wrong').textContent") == ""


def test_examples(visit: Any) -> None:
    tab = visit()
    words = tab.run("$('#starters button').textContent")
    tab.click("#starters button")
    tab.ended()
    assert tab.run("$('.own').textContent") == words
    assert not tab.run("$('#welcome').checkVisibility()")
    tab.click("#new")
    assert tab.run("$('#starters').checkVisibility()")


def test_rename(visit: Any) -> None:
    tab = visit()
    tab.ask(STORY)
    for key, shown in (("Escape", STORY), ("Enter", "My fox")):
        tab.click("#list .actions >> text=Rename")
        assert tab.run("active().value") == STORY
        tab.run("active().select()")
        tab.type("My fox")
        tab.press(key)
        assert tab.run("$('#list .open').textContent") == shown
        assert tab.run("active().textContent") == "Rename"
    tab.reload()
    tab.wait("$('#list .open')?.textContent === 'My fox'")
    # A title of one's own stays when the first message is edited, and while an answer comes.
    tab.run("edit(); active().select()")
    tab.send("Who is Clara?", beyond=5)
    tab.click("#list .actions >> text=Rename")
    tab.type("!")
    tab.ended()
    assert tab.run("active().value") == "!"
    tab.press("Enter")
    assert tab.run("$('#list .open').textContent") == "!"
    # Changing to another conversation ends the renaming.
    tab.click("#list .actions >> text=Rename")
    tab.type("Lost")
    tab.click("#new")
    assert tab.run("$('#list .open').textContent") == "!"


def test_export(visit: Any) -> None:
    tab = visit()
    tab.click("#options > summary")
    tab.run("$('#system').focus()")
    tab.type("Be brief.")
    answer = "# Code\n\n```js\nlet a = '<b>';\n```"
    tab.canned(answer, thinking="Hm.")
    files = {}
    for words in ("Markdown", "JSON"):
        with tab.page.expect_download() as download:
            tab.click(f"#list .actions >> text={words}")
        files[download.value.suggested_filename] = Path(download.value.path()).read_text()
    assert list(files) == ["Go-on.md", "Go-on.json"]
    expected = f"# Go on.\n\n## System prompt\n\nBe brief.\n\n## You\n\nGo on.\n\n## Answer\n\n{answer}\n"
    assert files["Go-on.md"] == expected
    record = json.loads(files["Go-on.json"])
    assert set(record) == {"title", "updated", "system", "sampling", "messages"}
    assert record["messages"][0] == {"role": "user", "content": "Go on."}
    assert record["messages"][1]["content"] == answer
    assert record["messages"][1]["thinking"] == "Hm."


def test_versions_of_an_answer(visit: Any) -> None:
    """Retry keeps the answer that was there, with what followed it."""
    tab = visit()
    first = tab.ask(STORY)
    assert not tab.run("count('.versions')")
    more = tab.ask("And then?")
    again = "$('.message.answer').querySelectorAll('.actions > button')[1].click()"
    tab.run(f"window.old = last(); {again}")
    tab.wait("count('.message') === 2 && last() !== window.old && note()")
    second = tab.run("text()")
    assert tab.run("$('.versions span').textContent") == "2 of 2"
    assert tab.sent()["messages"] == [{"role": "user", "content": STORY}]
    tab.click(".versions button")
    assert tab.run("$('.answer > .body').textContent") == first
    assert (tab.run("count('.message')"), tab.run("text()")) == (4, more)
    assert tab.run("active().getAttribute('aria-label')") == "Next version"
    tab.reload()
    tab.wait("count('.message') === 4 && $('.versions span')?.textContent === '1 of 2'")
    tab.ask("Why?")
    told = [message["content"].strip() for message in tab.sent()["messages"]]
    assert told[1::2] == [first.strip(), more.strip()]
    tab.run("$('.versions').lastChild.click()")
    assert (tab.run("count('.message')"), tab.run("text()")) == (2, second)
    # A version that is given up while its answer grows is one, too.
    tab.run("window.old = last(); retry()")
    tab.press("Escape")
    tab.wait("last() !== window.old && note()")
    assert tab.run("$('.versions span').textContent") == "3 of 3"
    tab.click(".versions button")
    assert tab.run("text()") == second


def test_theme(visit: Any) -> None:
    tab = visit(color_scheme="light")
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    for chosen, system, dark in (("dark", "light", True), ("light", "dark", False), ("system", "dark", True)):
        tab.page.emulate_media(color_scheme=system)
        tab.page.select_option("#theme", chosen)
        assert (tab.run(lightness) < 150) == dark, chosen
        tab.reload()
        tab.wait(REACHED)
        assert (tab.run(lightness) < 150) == dark, chosen
        assert tab.run("$('#theme').value") == chosen
        line = "47,58,67" if dark else "220,218,210"
        assert tab.run(DRAWN).count(f"{line},255,") > 100, chosen
    assert tab.run("localStorage.length") == 0


def test_reload(visit: Any) -> None:
    tab = visit()
    whole = tab.ask(STORY)
    tab.reload()
    assert tab.wait("text()") == whole
    tab.send("Another one.", beyond=30)
    tab.reload()
    kept = tab.wait("count('.message') === 4 && text()")
    assert len(kept) > 30
    assert tab.run("count('#list li')") == 1
    # What somebody else wrote there is no conversation, and harms nothing.
    for text in ("{", "null", '{"messages": 5}', '{"title": {}, "messages": [{"role": "system"}]}', '"' * 99):
        tab.run(f"localStorage.setItem('kvant.conversation.x' + Math.random(), {json.dumps(text)})")
    tab.reload()
    assert tab.wait("text()") == kept
    assert tab.run("count('#list li')") == 1
    tab.click("#list .remove")
    tab.wait("count('#list li') === 0 && count('.message') === 0")
    tab.click("#notice button")
    assert tab.wait("count('#list li') === 1 && text()") == kept


def test_two_tabs(visit: Any) -> None:
    one = visit()
    other = visit(beside=one)
    for tab, text in ((one, STORY), (other, "Who is Clara?")):
        tab.front()
        tab.send(text)
        tab.wait("text().length > 5")
    for tab in (one, other):
        tab.front()
        tab.ended()
        tab.wait("count('#list li') === 2")
    # The same conversation in both: an answer in one is seen in the other.
    one.front()
    one.run("choose('Who')")
    one.wait("$('.own').textContent === 'Who is Clara?'")
    one.ask("And who is Pip?")
    other.front()
    other.wait("count('.message') === 4")
    # Both ask at once: neither is lost.
    for tab, text in ((one, "Mine."), (other, "Yours.")):
        tab.run(f"$('#text').value = '{text}'; $('#compose').requestSubmit()")
    for tab in (one, other):
        tab.front()
        tab.ended()
    kept = "Object.values({...localStorage}).map((text) => JSON.parse(text).messages)"
    ends = f"{kept}.map((messages) => messages.slice(-2).map((message) => message.content.trim()))"
    for tab, text in ((one, "Mine."), (other, "Yours.")):
        shown = json.dumps([text, tab.run("text()")])
        tab.wait(f"{ends}.some((found) => String(found) === String({shown}))")


def test_key(visit: Any, serve: Any, tmp_path: Path) -> None:
    key = "s3cret-of-the-page"
    (tmp_path / "keys").write_text(f"{key}\n")
    with serve("--api-key-file", str(tmp_path / "keys")) as (process, client, _):
        tab = visit(client, reached=False)
        tab.wait("$('#key-dialog').open")
        tab.send("wrong")
        tab.wait("$('#key-error').textContent.includes('refused')")
        tab.send(key)
        tab.wait(REACHED)
        assert not tab.run("$('#key-dialog').open")
        assert tab.ask(STORY)
        tab.reload()
        tab.wait(REACHED)
        assert not tab.run("$('#key-dialog').open")
        assert key not in tab.run("JSON.stringify({...localStorage}) + document.cookie + location.href")
        again = visit(client, beside=tab, reached=False)  # another tab has to ask
        again.wait("$('#key-dialog').open")
        for each in (tab, again):
            assert all("401" in problem for problem in each.problems), each.problems
            each.problems.clear()
            each.close()
        stop(process)


def test_several_models(visit: Any, serve: Any, tmp_path: Path) -> None:
    """The second one is loaded when it is asked for; the choice outlives the page."""
    (tmp_path / "second").symlink_to(find_model(POCKET))
    with serve("--model", POCKET, "--model", str(tmp_path / "second")) as (process, client, _):
        tab = visit(client)
        assert tab.run("$$('#model-choice option').map((each) => each.textContent)") == [POCKET, "second"]
        assert tab.run("$('#model').hidden")
        assert tab.ask(STORY)
        tab.page.select_option("#model-choice", "second")
        tab.wait("$('#reserved').textContent === 'Not loaded'")
        assert client.get("/health").json()["loaded"] == [POCKET]
        assert tab.ask(STORY)
        assert tab.sent()["model"] == "second"
        tab.wait("note().includes('second')")
        assert client.get("/health").json()["loaded"] == [POCKET, "second"]
        tab.wait(REACHED)
        tab.reload()
        tab.wait(REACHED)
        assert tab.run("$('#model-choice').value") == "second"
        assert tab.run("document.title") == "second · kvant"
        phone = visit(client, viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True)
        phone.wait(REACHED)
        assert phone.run("fits()")
        for each in (tab, phone):
            each.close()
        stop(process)


def test_server_gone_and_back(visit: Any, serve: Any) -> None:
    with serve() as (process, client, _):
        tab = visit(client)
        whole = tab.ask(STORY)
        tab.send("Another one.", beyond=5)
        process.kill()
        process.wait()
        tab.wait("last().querySelector('.note.error')?.textContent")
        tab.wait("$('#connection').textContent.includes('No connection')")
        assert not any(figure.isdigit() for figure in tab.run("$('#held').textContent"))
        tab.ask("Are you there?")
        assert "does not answer" in tab.ended(), tab.ended()
    with serve("--port", str(client.base_url.port)) as (process, _, _):
        tab.wait("$('#connection').textContent === ''", 30)
        tab.wait(REACHED)
        tab.run("retry()")
        tab.wait("note() && text().length > 5")
        assert tab.run("$('.answer > .body').textContent") == whole
        stop(process)  # a page that listens does not hold it up
        tab.problems.clear()  # connections that were refused
        tab.close()


def test_attacks(visit: Any) -> None:
    tab = visit()
    for attack in ATTACKS:
        tab.canned(attack, thinking=attack)
        harmless(tab)
    tab.click("#new")
    tab.ask(ATTACKS[1])  # one's own message, and the title made of it
    harmless(tab)
    assert tab.run("$('.own').textContent") == ATTACKS[1]
    # Whatever a mistake lets through, the policy stops.
    replaced = (
        "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } })()"
    )
    assert tab.run(replaced) == "TypeError"
    assert tab.run("fetch('https://elsewhere.example/').then(() => 'sent', () => 'stopped')") == "stopped"
    tab.run(
        "document.head.append(Object.assign(document.createElement('style'), {textContent: '*{color:red}'}))"
    )
    assert tab.run("getComputedStyle($('h1')).color") != "rgb(255, 0, 0)"
    assert tab.problems, "the policy said nothing"
    tab.problems.clear()
    tab.requests = [each for each in tab.requests if each.url != "https://elsewhere.example/"]


def harmless(tab: Tab) -> None:
    """Nothing of an attack acts."""
    assert tab.run("window.hit") is None
    tags = tab.run("[...new Set($$('#messages *').map((each) => each.localName))]")
    assert set(tags) <= {*TAGS.split(), "button", "details", "summary", "i"}, tags
    names = tab.run("$$('#messages *, #list *').flatMap((each) => each.getAttributeNames())")
    others = {name for name in names if not name.startswith(("aria-", "data-before"))}
    assert others <= set(ATTRIBUTES.split()), others
    for address, relation in tab.run("$$('#messages a').map((each) => [each.href, each.rel])"):
        assert address.startswith(("http://", "https://")), address
        assert "noopener" in relation, address


def test_markdown(visit: Any) -> None:
    """Written piece by piece it becomes the same as all at once, and what it should."""
    tab = visit()

    def written(text: str, step: int = 10**6) -> Any:
        return tab.run(WRITTEN % (json.dumps(text), step))

    for text in (MARKDOWN, *ATTACKS):
        whole = written(text)
        for step in (1, 3, 17) if len(text) < 1000 else (501,):
            assert written(text, step) == whole, (text, step)
    found = written(MARKDOWN)
    for seen, expected in zip(found["tree"][1:], TREE, strict=True):
        assert seen == expected, seen
    assert " ".join(found["spoken"]).split() == SPOKEN.split(), found["spoken"]
    for hostile in [each * (60_000 // len(each)) for each in ("*a ", "[", "`a``", "_", "|", "- ", ">")]:
        begun = time.monotonic()
        written(hostile)
        assert time.monotonic() - begun < 10, hostile[:10]
    code = "x = 'a long line of code' + " * 30 + "\n" * 40
    tab.canned(f"{MARKDOWN}```python\n{code}```", "Let me *think*.")
    assert not tab.run("last().querySelector('.thinking').open")
    tab.run("$('#scroll').scrollTop = 0")
    assert tab.run("fits()")
    tab.page.set_viewport_size({"width": 360, "height": 740})
    tab.page.emulate_media(color_scheme="dark")
    assert tab.run("fits()")


def test_keyboard(visit: Any) -> None:
    """Everything without a mouse: each control is reached, has a name, and does what it says."""
    tab = visit()
    assert tab.run("active().id") == "text"
    tab.type("One\n")
    tab.press("Shift+Enter")
    tab.type("two")
    assert tab.run("$('#text').value.split('\\n').length") >= 2
    assert tab.run("count('.message')") == 0
    tab.press("Enter")
    tab.ended()
    tab.run("active().blur()")
    reached = set()
    for _ in range(40):
        tab.press("Tab")
        reached.add(tab.run("active().id || active().textContent.trim().slice(0, 30)"))
        assert tab.run("active() === document.body || active().matches(':focus-visible')")
    assert reached >= {"To the message field", "new", "Copy", "Edit", "Retry", "text", "send"}, reached
    assert any(name.startswith("System prompt") for name in reached)
    for control, then in ((".skip", "true"), ("#new", "count('.message') === 0")):
        tab.run(f"$('{control}').focus()")
        tab.press("Enter")
        tab.wait(f"{then} && active().id === 'text'")
    # Names and roles, as a screen reader gets them.
    found = tab.page.locator("body").aria_snapshot()
    for role in ("button", "textbox", "spinbutton", "link", "img"):
        assert not re.search(rf"- {role}(:|$)", found, re.M), found
    assert {"main", "navigation", "log", "status", "heading"} <= {*re.findall(r"- ([a-z]+)", found)}, found


def test_phone(visit: Any) -> None:
    tab = visit(viewport={"width": 360, "height": 640}, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert not tab.run("$('#live').open")
    assert not tab.run("$('#conversations').open")
    tab.ask(STORY)
    assert tab.run("fits()")
    box = tab.run("$('#send').getBoundingClientRect().toJSON()")
    assert (box["bottom"] <= 640, box["right"] <= 360, box["height"] >= 40) == (True, True, True), box
    # Closed, the two bars take one line, and nothing of them is cut.
    tops = tab.run("$$('.side > summary').map((each) => each.getBoundingClientRect().top)")
    assert tops[0] == tops[1]
    assert tab.run("$$('.side > summary').every((each) => each.scrollWidth <= each.clientWidth)")
    assert "B" in tab.run("$('#brief').textContent")
    tab.click("#live > summary")
    tab.wait("$('.pages').checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})")
    assert tab.run("fits()")
    tab.click("#live > summary")
    tab.click("#conversations > summary")
    tab.click("#new")
    tab.wait("!$('#conversations').open")


def test_what_users_prefer(visit: Any) -> None:
    tab = visit(color_scheme="dark", reduced_motion="reduce")
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    assert tab.run(lightness) < 150
    tab.send(STORY)
    tab.wait("$('.growing') !== null")
    assert tab.run("document.getAnimations().length") == 0
    tab.ended()
    tab.page.emulate_media(color_scheme="light")
    assert tab.run(lightness) > 600


def test_full_storage(visit: Any) -> None:
    tab = visit()
    filled = "try { localStorage.setItem('f' + Math.random(), 'x'.repeat(size)) } catch { size >>= 1 }"
    tab.run(f"(() => {{ for (let size = 2 ** 22; size >= 1;) {{ {filled} }} }})()")
    whole = tab.ask(STORY)
    assert "no room" in tab.run("$('#notice').textContent")
    tab.click("#new")
    tab.click("#list .open")  # it is still there, in this tab
    assert tab.wait("text()") == whole


def test_many_conversations(visit: Any) -> None:
    """The hundred newest stay."""
    tab = visit()
    made = (
        "JSON.stringify({title: 't' + i, updated: i, system: '', sampling: {}, revision: 'r', messages: []})"
    )
    tab.run(f"for (let i = 0; i < 105; i++) localStorage.setItem('kvant.conversation.' + i, {made})")
    tab.reload()
    tab.ask(STORY)
    assert tab.run("count('#list li')") == 100
    kept = tab.run("Object.keys(localStorage)")
    assert (len(kept), "kvant.conversation.5" in kept, "kvant.conversation.6" in kept) == (100, False, True)
