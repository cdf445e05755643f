"""Use the page of `kvant serve` in a real Chromium, as people do and as attackers would.

Usage: python scripts/check_page.py [--pictures FOLDER]. It needs Chromium (Debian: apt-get install chromium), the
package playwright, and the extras cpu and serve. Each check has a browser profile of its own. The first that fails
ends the program.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright
from playwright.sync_api import Error as BrowserError

SOON = 20.0  # seconds within which what is waited for must come
STORY = "Tell me a story about a fox named Pip."
KEY = "s3cret-of-the-page"
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
# What must stay text, or become nothing that acts.
ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1><iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](java\nscript:window.hit=1) [d](data:text/html,x)",
    "[e](\u0001javascript:window.hit=1) [f](//elsewhere.example/x) [g](/health) [h](file:///etc/hosts) <javascript:x>",
    "![tracker](https://elsewhere.example/pixel.png) <link rel=stylesheet href=https://elsewhere.example/x.css>",
    '[x](https://elsewhere.example/"onmouseover="window.hit=1) [**y**](https://elsewhere.example/<script>)',
    "| <b onclick=window.hit=1>a</b> | b |\n| --- | --- |\n| <script>window.hit=1</script> | [z](vbscript:x) |",
    "&lt;script&gt;window.hit=1&lt;/script&gt; &#x6A;avascript:",
    "> " * 300 + "deep",
    "".join(f"{'  ' * i}- deep\n" for i in range(200)),
    "*" * 3000 + "[" * 3000 + "`" * 2999 + "_a" * 3000,
    '```"><script>window.hit=1</script>\n</code></pre><script>window.hit=1</script>',  # a fence without an end
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
LIST = ["ol", ["li", "c", ["div", ["div", "js", ["button", "Copy"]], ["pre", ["code", 'let d = "<e>";']]]], ["li", "f"]]
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
TAGS = "article div p h3 h4 h5 h6 ul ol li blockquote pre code a strong em del br hr table thead tbody tr th td"
ATTRIBUTES = "class hidden type href rel target referrerpolicy tabindex role start title"


class Server:
    """`kvant serve` on pocket."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvant", "serve", "pocket", "--port", "0", "--max-kv-size", "1024"]
        self.process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if line.startswith("kvant serve: http"):
                self.url = line.split()[2]
                self.port = self.url.rpartition(":")[2].strip("/")
                return
        sys.exit(f"kvant serve did not start:\n{said}")

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no answer is under way."""
        end = time.monotonic() + seconds
        while True:
            with urllib.request.urlopen(f"{self.url}/health") as response:
                health = json.load(response)
            if not health["running"] and not health["waiting"]:
                return
            assert time.monotonic() < end, "the server goes on"
            time.sleep(0.05)

    def close(self) -> None:
        """End it. It must end well, and soon although a page listens."""
        begun = time.monotonic()
        self.process.terminate()
        code = self.process.wait(20)
        assert code == 0, f"exit code {code}"
        assert time.monotonic() - begun < 10, "it waits for the page"


class Tab:
    """A page in a browser.

    Attributes:
        requests, bodies: every address that was asked for, and what was sent to it.
        problems: errors and warnings of the page, as its console has them.
    """

    def __init__(self, context: BrowserContext, url: str, pictures: Path) -> None:
        self.requests: list[str] = []
        self.bodies: list[str] = []
        self.problems: list[str] = []
        self._pictures = pictures
        self.page: Page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("request", lambda request: self.bodies.append(request.post_data or ""))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note)
        self.run, self.press, self.type = self.page.evaluate, self.page.keyboard.press, self.page.keyboard.insert_text
        self.reload, self.front = self.page.reload, self.page.bring_to_front
        self.page.goto(url)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"{message.text} {message.location.get('url', '')}")

    def wait(self, expression: str, seconds: float = SOON) -> Any:
        """Wait until an expression is true. Returns its value. The page's policy forbids Playwright's own way."""
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
        return json.loads([body for body in self.bodies if body][-1])

    def canned(self, text: str, thinking: str = "") -> None:
        """Ask, with an answer that is made here. A lone one, of several pieces."""
        pieces = [{"delta": {"reasoning_content": thinking}}] if thinking else []
        pieces += [{"delta": {"content": text[i : i + 7]}} for i in range(0, len(text), 7)]
        events: list[Any] = [{"choices": [piece]} for piece in [*pieces, {"delta": {}, "finish_reason": "stop"}]]
        events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}})
        body = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), "[DONE]"])
        answer = {"status": 200, "content_type": "text/event-stream", "body": body}
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
        self.click("#new")
        self.ask("Go on.")
        self.page.unroute("**/v1/chat/completions")

    def picture(self, name: str) -> None:
        """What it shows, as a file."""
        self.page.screenshot(path=self._pictures / f"{name}.png")


class Checks:
    """The checks, each with the browser and a server, in the order in which they are written."""

    def __init__(self, browser: Browser, server: Server, pictures: Path) -> None:
        self.browser, self.server, self.pictures = browser, server, pictures
        self.tabs: list[Tab] = []

    def all(self) -> list[Callable[[], None]]:
        """Those whose names begin with check."""
        return [getattr(self, name) for name in vars(type(self)) if name.startswith("check_")]

    def context(self, **screen: Any) -> BrowserContext:
        """A profile of its own, with Playwright's words for its screen and what its user prefers."""
        made = self.browser.new_context(**{"viewport": {"width": 1360, "height": 860}} | screen)
        made.add_init_script(HELPERS)
        return made

    def open(self, context: BrowserContext | None = None, *, reached: bool = True, **screen: Any) -> Tab:
        """A tab, of a new profile unless one is given."""
        tab = Tab(context or self.context(**screen), f"{self.server.url}/", self.pictures)
        self.tabs.append(tab)
        if reached:
            tab.wait(REACHED)
        return tab

    def close_tabs(self) -> None:
        """Close all, and look at what they asked for and complained of."""
        for tab in self.tabs:
            for address in tab.requests:
                assert address.startswith((f"{self.server.url}/", "about:")), f"asked for {address}"
            assert not tab.problems, tab.problems
            tab.page.close()
        self.tabs.clear()

    @contextmanager
    def another_server(self, *arguments: str) -> Iterator[Server]:
        """A server for a while, or one in its place; tabs are closed before it."""
        plain, self.server = self.server, Server(*arguments)
        try:
            yield self.server
            self.close_tabs()
        finally:
            server, self.server = self.server, plain
            server.close()

    def check_that_it_streams(self) -> None:
        tab = self.open()
        tab.send(STORY, beyond=40)
        early = tab.run("text()")
        assert tab.run("$('#stop').checkVisibility()")
        tab.wait("count('#sequences li') === 1")
        assert tab.run("parseFloat($('#held').textContent)") > 0
        tab.picture("streaming")
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
            assert ("prompt tokens were there" in tab.ended()) == found, tab.ended()

    def check_many_answers(self) -> None:
        """The panel shows the answers of all clients, and the page can have several under way itself."""
        tab = self.open()
        tab.ask(STORY)
        text = "There was a bear named Clara, who had a boat. She met a hare and a fox. " * 12
        for number, words in enumerate((text, f"{text} And then?", "A duck wants to fly.")):
            self.ask_beside(words, number)
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
        tab.picture("many")
        tab.ended()
        self.server.wait_until_idle(60)

    def ask_beside(self, text: str, seed: int) -> None:
        """Another client's question, whose answer is long; in a thread."""
        body = {"model": "pocket", "messages": [{"role": "user", "content": text}], "max_tokens": 650 + 20 * seed}
        data = json.dumps({**body, "ignore_eos": True, "seed": seed}).encode()
        url, headers = f"{self.server.url}/v1/chat/completions", {"Content-Type": "application/json"}
        question = urllib.request.Request(url, data, headers)
        threading.Thread(target=lambda: urllib.request.urlopen(question).read()).start()

    def check_stop(self) -> None:
        tab = self.open()
        box = tab.page.locator("#send").bounding_box()  # where the button is that stops
        assert box is not None
        for stop in (lambda: tab.page.mouse.click(box["x"] + 9, box["y"] + 9), lambda: tab.press("Escape")):
            tab.run("$('#text').focus()")
            tab.send(STORY, beyond=20)
            stop()
            tab.wait("note() === 'Stopped.'")
            kept = tab.run("text()")
            self.server.wait_until_idle(5)
            assert tab.run("text()") == kept
            assert len(kept) > 20
            assert tab.run("active().id") == "text"

    def check_edit_and_retry(self) -> None:
        tab = self.open()
        tab.click("#options > summary")
        for name, value in (("system", "Be brief."), ("seed", "7"), ("max_tokens", "12"), ("temperature", "0.9")):
            tab.run(f"$('#{name}').focus()")
            tab.type(value)
        tab.click("#options > summary")
        first = tab.ask(STORY)
        sent = tab.sent()
        assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
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

    def check_reload(self) -> None:
        tab = self.open()
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

    def check_two_tabs(self) -> None:
        context = self.context()
        one, other = self.open(context), self.open(context)
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

    def check_key(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
            file.write(KEY + "\n")
            file.flush()
            with self.another_server("--api-key-file", file.name):
                context = self.context()
                tab = self.open(context, reached=False)
                tab.wait("$('#key-dialog').open")
                tab.send("wrong")
                tab.wait("$('#key-error').textContent.includes('refused')")
                tab.picture("key")
                tab.send(KEY)
                tab.wait(REACHED)
                assert not tab.run("$('#key-dialog').open")
                assert tab.ask(STORY)
                tab.reload()
                tab.wait(REACHED)
                assert not tab.run("$('#key-dialog').open")
                assert KEY not in tab.run("JSON.stringify({...localStorage}) + document.cookie + location.href")
                again = self.open(context, reached=False)  # another tab has to ask
                again.wait("$('#key-dialog').open")
                for each in (tab, again):
                    assert all("401" in problem for problem in each.problems), each.problems
                    each.problems.clear()

    def check_server_gone_and_back(self) -> None:
        gone = Server()
        plain, self.server = self.server, gone
        tab = self.open()
        whole = tab.ask(STORY)
        tab.send("Another one.", beyond=5)
        gone.process.kill()
        gone.process.wait()
        tab.wait("last().querySelector('.note.error')?.textContent")
        tab.wait("$('#connection').textContent.includes('No connection')")
        assert not any(figure.isdigit() for figure in tab.run("$('#held').textContent"))
        tab.picture("gone")
        tab.ask("Are you there?")
        assert "does not answer" in tab.ended(), tab.ended()
        self.server = plain
        with self.another_server("--port", gone.port) as back:
            tab.wait("$('#connection').textContent === ''", 30)
            tab.wait(REACHED)
            tab.run("retry()")
            tab.wait("note() && text().length > 5")
            assert tab.run("$('.answer > .body').textContent") == whole
            back.close()  # a page that listens does not hold it up
            tab.problems.clear()  # connections that were refused

    def check_attacks(self) -> None:
        tab = self.open()
        for attack in ATTACKS:
            tab.canned(attack, thinking=attack)
            self.harmless(tab)
        tab.click("#new")
        tab.ask(ATTACKS[1])  # one's own message, and the title made of it
        self.harmless(tab)
        assert tab.run("$('.own').textContent") == ATTACKS[1]
        # Whatever a mistake lets through, the policy stops.
        replaced = "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } })()"
        assert tab.run(replaced) == "TypeError"
        assert tab.run("fetch('https://elsewhere.example/').then(() => 'sent', () => 'stopped')") == "stopped"
        tab.run("document.head.append(Object.assign(document.createElement('style'), {textContent: '*{color:red}'}))")
        assert tab.run("getComputedStyle($('h1')).color") != "rgb(255, 0, 0)"
        assert tab.problems, "the policy said nothing"
        tab.problems.clear()
        tab.requests = [address for address in tab.requests if address != "https://elsewhere.example/"]

    def harmless(self, tab: Tab) -> None:
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

    def check_markdown(self) -> None:
        """Written piece by piece it becomes the same as all at once, and what it should."""
        tab = self.open()

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
            assert time.monotonic() - begun < 2, hostile[:10]
        code = "x = 'a long line of code' + " * 30 + "\n" * 40
        tab.canned(f"{MARKDOWN}```python\n{code}```", "Let me *think*.")
        assert not tab.run("last().querySelector('.thinking').open")
        tab.run("$('#scroll').scrollTop = 0")
        tab.picture("markdown")
        assert tab.run("fits()")
        tab.page.set_viewport_size({"width": 360, "height": 740})
        tab.page.emulate_media(color_scheme="dark")
        assert tab.run("fits()")
        tab.picture("markdown-phone")

    def check_keyboard(self) -> None:
        """Everything without a mouse: each control is reached, has a name, and does what it says."""
        tab = self.open()
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
        for control, then in (
            (".skip", "active().id === 'text'"),
            ("#new", "count('.message') === 0 && active().id === 'text'"),
        ):
            tab.run(f"$('{control}').focus()")
            tab.press("Enter")
            tab.wait(then)
        # Names and roles, as a screen reader gets them.
        found = tab.page.locator("body").aria_snapshot()
        for role in ("button", "textbox", "spinbutton", "link", "img"):
            assert not re.search(rf"- {role}(:|$)", found, re.M), found
        assert {"main", "navigation", "log", "status", "heading"} <= {*re.findall(r"- ([a-z]+)", found)}, found

    def check_phone(self) -> None:
        tab = self.open(viewport={"width": 360, "height": 640}, device_scale_factor=2, is_mobile=True, has_touch=True)
        assert not tab.run("$('#live').open")
        assert not tab.run("$('#conversations').open")
        tab.ask(STORY)
        assert tab.run("fits()")
        bottom, right, height = tab.run(
            "(({bottom, right, height}) => [bottom, right, height])($('#send').getBoundingClientRect())"
        )
        assert bottom <= 640, bottom
        assert right <= 360, right
        assert height >= 40, height
        tab.click("#live > summary")
        tab.wait("$('.pages').checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})")
        tab.picture("phone")
        assert tab.run("fits()")
        tab.click("#live > summary")
        tab.click("#conversations > summary")
        tab.click("#new")
        tab.wait("!$('#conversations').open")

    def check_what_users_prefer(self) -> None:
        tab = self.open(color_scheme="dark", reduced_motion="reduce")
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
        assert tab.run(lightness) < 150
        tab.send(STORY)
        tab.wait("$('.growing') !== null")
        assert tab.run("document.getAnimations().length") == 0
        tab.ended()
        tab.picture("dark")
        tab.page.emulate_media(color_scheme="light")
        assert tab.run(lightness) > 600

    def check_full_storage(self) -> None:
        tab = self.open()
        tab.run(
            "(() => { for (let size = 2 ** 22; size >= 1;) { try { localStorage.setItem('f' + Math.random(), "
            "'x'.repeat(size)) } catch { size >>= 1 } } })()"
        )
        whole = tab.ask(STORY)
        assert "no room" in tab.run("$('#notice').textContent")
        tab.click("#new")
        tab.click("#list .open")  # it is still there, in this tab
        assert tab.wait("text()") == whole

    def check_many_conversations(self) -> None:
        """The hundred newest stay."""
        tab = self.open()
        made = "JSON.stringify({title: 't' + i, updated: i, system: '', sampling: {}, revision: 'r', messages: []})"
        tab.run(f"for (let i = 0; i < 105; i++) localStorage.setItem('kvant.conversation.' + i, {made})")
        tab.reload()
        tab.ask(STORY)
        assert tab.run("count('#list li')") == 100
        assert tab.run("Object.keys(localStorage).length") == 100
        assert tab.run("localStorage.getItem('kvant.conversation.5')") is None
        assert tab.run("localStorage.getItem('kvant.conversation.6')") is not None


def main() -> None:
    """Every check, and how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="keep pictures of the page in this folder")
    parser.add_argument("--only", default="", help="checks with this in their name")
    given = parser.parse_args()
    server = Server()
    try:
        with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
            pictures = given.pictures or Path(scratch)
            pictures.mkdir(parents=True, exist_ok=True)
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            checks = Checks(browser, server, pictures)
            chosen = [check for check in checks.all() if given.only in check.__name__]
            for check in chosen:
                begun, name = time.monotonic(), check.__name__.removeprefix("check_").replace("_", " ")
                try:
                    check()
                    checks.close_tabs()
                except (AssertionError, BrowserError):
                    traceback.print_exc(limit=4)
                    sys.exit(f"{name} failed; the page complained of {[tab.problems for tab in checks.tabs]}")
                print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    finally:
        server.process.terminate()
        server.process.wait(20)
    assert chosen, "no such check"
    print(f"the page passed {len(chosen)} checks in Chromium")


if __name__ == "__main__":
    main()
