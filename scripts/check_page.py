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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright
from playwright.sync_api import Error as BrowserError

SOON = 20.0  # seconds within which what is waited for must come
STORY = "Tell me a story about a fox named Pip."
KEY = "s3cret-of-the-page"
LAST = "$$('.message.answer').at(-1)"
TEXT = f"{LAST}.querySelector(':scope > .body').textContent"
ENDED = f"({LAST}?.querySelector('.note').textContent)"
LISTED = "$$('#list li').length"
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


class Server:
    """`kvant serve` on pocket."""

    def __init__(self, port: int = 0, arguments: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "kvant", "serve", "pocket", "--port", str(port), "--max-kv-size", "1024"]
        self._process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.said = ""
        for line in self._process.stderr:
            self.said += line
            if line.startswith("kvant serve: http"):
                self.url = line.split()[2]
                return
        sys.exit(f"kvant serve did not start:\n{self.said}")

    @property
    def port(self) -> int:
        """Where it listens."""
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def health(self) -> dict[str, Any]:
        """What it says of itself."""
        with urllib.request.urlopen(f"{self.url}/health") as response:
            found: dict[str, Any] = json.load(response)
            return found

    def close(self) -> None:
        """End it. It must end well, and soon although a page listens."""
        self._process.terminate()
        begun = time.monotonic()
        code = self._process.wait(20)
        assert code == 0, f"exit code {code}"
        assert time.monotonic() - begun < 10, "it waits for the page"


HELPERS = """
window.$ = (selector) => document.querySelector(selector);
window.$$ = (selector) => [...document.querySelectorAll(selector)];
window.active = () => document.activeElement;
"""


class Tab:
    """A page in a browser.

    Attributes:
        requests, bodies: every address that was asked for, and what was sent to it.
        problems: errors and warnings of the page, as its console has them.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.requests: list[str] = []
        self.bodies: list[str] = []
        self.problems: list[str] = []
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


class Checks:
    """The checks, each with the browser and a server, in the order in which they are written."""

    def __init__(self, browser: Browser, server: Server, pictures: Path) -> None:
        self.browser, self.server, self.pictures = browser, server, pictures
        self.tabs: list[Tab] = []

    def all(self) -> list[Callable[[], None]]:
        """Those whose names begin with check."""
        return [getattr(self, name) for name in vars(type(self)) if name.startswith("check_")]

    def context(
        self, width: int = 1360, height: int = 860, dark: bool = False, calm: bool = False, phone: bool = False
    ) -> BrowserContext:
        """A profile of its own, its screen in CSS pixels, and what its user prefers."""
        made = self.browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=2 if phone else 1,
            is_mobile=phone,
            has_touch=phone,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if calm else "no-preference",
        )
        made.add_init_script(HELPERS)
        return made

    def open(self, context: BrowserContext | None = None, url: str | None = None, **emulation: Any) -> Tab:
        """A tab, of a new profile unless one is given, that has reached the server."""
        tab = Tab(context or self.context(**emulation), url or f"{self.server.url}/")
        self.tabs.append(tab)
        if url is None:
            tab.wait("$('#reserved').textContent.includes('B')")
        return tab

    def close_tabs(self) -> None:
        """Close all, and look at what they asked for and complained of."""
        for tab in self.tabs:
            for address in tab.requests:
                assert address.startswith((f"{self.server.url}/", "about:")), f"asked for {address}"
            assert not tab.problems, tab.problems
            tab.page.close()
        self.tabs.clear()

    def picture(self, tab: Tab, name: str) -> None:
        """What a tab shows, as a file."""
        tab.page.screenshot(path=self.pictures / f"{name}.png")

    def ask(self, tab: Tab, text: str) -> str:
        """Ask, and wait for the answer's end."""
        before = tab.run("$$('.message.answer').length")
        tab.run("$('#text').focus()")
        tab.type(text)
        tab.press("Enter")
        tab.wait(f"$$('.message.answer').length === {before + 1} && {ENDED}", 60)
        return str(tab.run(TEXT))

    def canned(self, tab: Tab, text: str, thinking: str = "") -> str:
        """As ask, with an answer that is made here. A lone one, of several pieces."""
        pieces = [{"delta": {"reasoning_content": thinking}}] if thinking else []
        pieces += [{"delta": {"content": text[i : i + 7]}} for i in range(0, len(text), 7)]
        pieces += [{"delta": {}, "finish_reason": "stop"}]
        events = [f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces]
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}
        body = "".join(events) + f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n"
        with_body = {"status": 200, "content_type": "text/event-stream", "body": body}
        tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(**with_body))
        try:
            tab.click("#new")
            return self.ask(tab, "Go on.")
        finally:
            tab.page.unroute("**/v1/chat/completions")

    def check_that_it_streams(self) -> None:
        tab = self.open()
        tab.type(STORY)
        tab.press("Enter")
        tab.wait(f"{LAST} && {TEXT}.length > 40")
        early = tab.run(TEXT)
        assert tab.run("$('#stop').checkVisibility()")
        tab.wait("$$('#sequences li').length === 1")
        assert tab.run("parseFloat($('#held').textContent)") > 0
        self.picture(tab, "streaming")
        tab.wait(ENDED, 60)
        whole = tab.run(TEXT)
        assert whole.startswith(early), (early, whole)
        assert len(whole) > len(early)
        assert "Pip" in whole
        note = tab.run(ENDED)
        assert "a second" in note, note
        tab.wait("parseFloat($('#median').textContent) > 0")
        assert "tokens: median" in tab.run("$('#plot').getAttribute('aria-label')")
        assert "Of 32 pages " in tab.run("$('.pages').getAttribute('aria-label')")
        painted = "[...$('#plot').getContext('2d').getImageData(0, 0, 300, 90).data].some(Boolean)"
        assert tab.run(painted)
        # For those who hear it: the whole answer, once.
        tab.wait(f"$('#spoken').textContent.trim() === {TEXT}")
        # The second turn finds the pages of the first one's long question.
        tab.click("#new")
        self.ask(tab, "There was a fox named Pip. " * 25)
        assert "prompt tokens were there" not in tab.run(ENDED), tab.run(ENDED)
        self.ask(tab, "Who helped Pip?")
        assert "prompt tokens were there" in tab.run(ENDED), tab.run(ENDED)

    def check_many_answers(self) -> None:
        """The panel shows the answers of all clients, and the page can have several under way itself."""
        tab = self.open()
        self.ask(tab, STORY)
        text = "There was a bear named Clara, who had a boat. She met a hare and a fox. " * 12
        for number, words in enumerate((text, f"{text} And then?", "A duck wants to fly.")):
            self.ask_beside(words, number)
            time.sleep(0.3)
        tab.type("Tell me a story about a hare who could not sleep.")
        tab.press("Enter")
        tab.wait(f"$('.growing') && {TEXT}.length > 5")
        first = tab.run("location.hash")
        tab.click("#new")
        tab.type("A story about a mouse, please.")
        tab.press("Enter")
        tab.wait("$$('#sequences li').length === 4")
        tab.wait("parseInt($('#waiting').textContent) === 1")
        assert tab.run("new Set($$('#sequences .cell').map((e) => e.style.background)).size") == 4
        said = tab.run("$('.pages').getAttribute('aria-label')")
        assert " 0 are shared" not in said, said
        tab.run("$$('#list .open').find((e) => e.textContent.includes('Pip')).click()")
        assert tab.run("location.hash") == first
        tab.wait("$$('.message').length === 4")
        tab.wait(f"{TEXT}.length > 250", 60)
        self.picture(tab, "many")
        tab.wait(ENDED, 60)
        end = time.monotonic() + 60
        while (health := self.server.health())["running"] or health["waiting"]:
            assert time.monotonic() < end
            time.sleep(0.1)

    def ask_beside(self, text: str, seed: int) -> None:
        """Another client's question, whose answer is long; in a thread."""
        body = {"model": "pocket", "messages": [{"role": "user", "content": text}], "max_tokens": 650 + 20 * seed}
        data = json.dumps({**body, "ignore_eos": True, "seed": seed}).encode()
        url, headers = f"{self.server.url}/v1/chat/completions", {"Content-Type": "application/json"}
        question = urllib.request.Request(url, data, headers)
        threading.Thread(target=lambda: urllib.request.urlopen(question).read()).start()

    def check_stop(self) -> None:
        tab = self.open()
        for how in ("click", "Escape"):
            tab.run("$('#text').focus()")
            tab.type(STORY)
            tab.press("Enter")
            tab.wait(f"$('.growing') && {TEXT}.length > 20")
            if how == "click":
                tab.click("#stop")
            else:
                tab.press("Escape")
            tab.wait(f"{ENDED} === 'Stopped.'")
            kept = tab.run(TEXT)
            end = time.monotonic() + 5
            while self.server.health()["running"]:
                assert time.monotonic() < end, "the server goes on"
                time.sleep(0.05)
            assert tab.run(TEXT) == kept
            assert len(kept) > 20
            assert tab.run("active().id") == "text"

    def check_edit_and_retry(self) -> None:
        tab = self.open()
        tab.click("#options > summary")
        for name, value in (("system", "Be brief."), ("seed", "7"), ("max_tokens", "12"), ("temperature", "0.9")):
            tab.run(f"$('#{name}').focus()")
            tab.type(value)
        tab.click("#options > summary")
        first = self.ask(tab, STORY)
        sent = json.loads([body for body in tab.bodies if body][-1])
        assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
        assert (sent["seed"], sent["max_tokens"], sent["temperature"]) == (7, 12, 0.9)
        assert "limit of tokens" in tab.run(ENDED)
        # With its seed the same answer comes again.
        tab.run(f"window.old = {LAST}; old.querySelectorAll('.actions > button')[1].click()")
        tab.wait(f"{LAST} !== window.old && {ENDED}")
        assert tab.run(TEXT) == first
        self.ask(tab, "And then?")
        tab.run("$('.message.user .actions').lastChild.click()")
        assert tab.run("active().value") == STORY
        tab.press("Escape")
        assert tab.run("$$('.message').length") == 4
        tab.run("$('.message.user .actions').lastChild.click()")
        tab.run("active().select()")
        tab.type("Who is Clara?")
        tab.press("Enter")
        tab.wait(f"$$('.message').length === 2 && {ENDED}")
        assert tab.run("$('.own').textContent") == "Who is Clara?"
        assert json.loads([body for body in tab.bodies if body][-1])["messages"][-1]["content"] == "Who is Clara?"
        assert tab.run(LISTED) == 1

    def check_reload(self) -> None:
        tab = self.open()
        whole = self.ask(tab, STORY)
        tab.reload()
        assert tab.wait(f"{LAST} && {TEXT}") == whole
        tab.type("Another one.")
        tab.press("Enter")
        tab.wait(f"$('.growing') && {TEXT}.length > 30")
        tab.reload()
        kept = tab.wait(f"$$('.message').length === 4 && {TEXT}")
        assert len(kept) > 30
        assert tab.run(LISTED) == 1
        # What somebody else wrote there is no conversation, and harms nothing.
        for text in ("{", "null", '{"messages": 5}', '{"title": {}, "messages": [{"role": "system"}]}', '"' * 99):
            tab.run(f"localStorage.setItem('kvant.conversation.x' + Math.random(), {json.dumps(text)})")
        tab.reload()
        assert tab.wait(f"{LAST} && {TEXT}") == kept
        assert tab.run(LISTED) == 1
        tab.click("#list .remove")
        tab.wait(f"{LISTED} === 0 && $$('.message').length === 0")
        tab.click("#notice button")
        assert tab.wait(f"{LISTED} === 1 && {TEXT}") == kept

    def check_two_tabs(self) -> None:
        context = self.context()
        one, other = self.open(context), self.open(context)
        one.front()
        for tab, text in ((one, STORY), (other, "Who is Clara?")):
            tab.front()
            tab.type(text)
            tab.press("Enter")
            tab.wait(f"{LAST} && {TEXT}.length > 5")
        for tab in (one, other):
            tab.front()
            tab.wait(ENDED, 60)
            tab.wait(f"{LISTED} === 2")
        # The same conversation in both: an answer in one is seen in the other.
        one.front()
        one.run("$$('#list .open').find((each) => each.textContent[0] === 'W').click()")
        one.wait("$('.own').textContent === 'Who is Clara?'")
        self.ask(one, "And who is Pip?")
        other.front()
        other.wait("$$('.message').length === 4")
        # Both ask at once: neither is lost.
        ask = "$('#text').value = %s; $('#compose').requestSubmit()"
        one.run(ask % "'Mine.'")
        other.run(ask % "'Yours.'")
        for tab in (one, other):
            tab.front()
            tab.wait(ENDED, 60)
        kept = "Object.values({...localStorage}).map((text) => JSON.parse(text).messages)"
        for tab, text in ((one, "Mine."), (other, "Yours.")):
            shown = [text, tab.run(TEXT)]
            end = f"{kept}.map((messages) => messages.slice(-2).map((message) => message.content.trim()))"
            tab.wait(f"{end}.some((found) => String(found) === String({json.dumps(shown)}))")

    def check_key(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
            file.write(KEY + "\n")
            file.flush()
            server, plain = Server(arguments=["--api-key-file", file.name]), self.server
            self.server = server
            try:
                context = self.context()
                tab = self.open(context, server.url)
                tab.wait("$('#key-dialog').open")
                tab.type("wrong")
                tab.press("Enter")
                tab.wait("$('#key-error').textContent.includes('refused')")
                self.picture(tab, "key")
                tab.type(KEY)
                tab.press("Enter")
                tab.wait("$('#reserved').textContent.includes('B')")
                assert not tab.run("$('#key-dialog').open")
                assert self.ask(tab, STORY)
                tab.reload()
                tab.wait("$('#reserved').textContent.includes('B')")
                assert not tab.run("$('#key-dialog').open")
                assert KEY not in tab.run("JSON.stringify({...localStorage}) + document.cookie + location.href")
                again = self.open(context, server.url)  # another tab has to ask
                again.wait("$('#key-dialog').open")
                for each in (tab, again):
                    assert all("401" in problem for problem in each.problems), each.problems
                    each.problems.clear()
                self.close_tabs()
            finally:
                self.server = plain
                server.close()

    def check_server_gone_and_back(self) -> None:
        server, plain = Server(), self.server
        self.server = server
        tab = self.open()
        whole = self.ask(tab, STORY)
        tab.type("Another one.")
        tab.press("Enter")
        tab.wait(f"$('.growing') && {TEXT}.length > 5")
        server._process.kill()
        server._process.wait()
        tab.wait(f"{LAST}.querySelector('.note.error')?.textContent")
        tab.wait("$('#connection').textContent.includes('No connection')")
        assert not any(figure.isdigit() for figure in tab.run("$('#held').textContent"))
        self.picture(tab, "gone")
        self.ask(tab, "Are you there?")
        assert "does not answer" in tab.run(ENDED), tab.run(ENDED)
        self.server = Server(server.port)
        tab.wait("$('#connection').textContent === ''", 30)
        tab.wait("$('#reserved').textContent.includes('B')")
        tab.run(f"{LAST}.querySelectorAll('.actions > button')[1].click()")
        tab.wait(f"{ENDED} && {TEXT}.length > 5")
        assert tab.run("$('.answer > .body').textContent") == whole
        self.server.close()  # a page that listens does not hold it up
        tab.problems.clear()  # connections that were refused
        self.close_tabs()
        self.server = plain

    def check_attacks(self) -> None:
        tab = self.open()
        for attack in ATTACKS:
            self.canned(tab, attack, thinking=attack)
            self.harmless(tab)
        tab.click("#new")
        tab.run("$('#text').focus()")
        tab.type(ATTACKS[1])  # one's own message, and the title made of it
        tab.press("Enter")
        tab.wait(ENDED, 60)
        self.harmless(tab)
        assert tab.run("$('.own').textContent") == ATTACKS[1]
        # Whatever a mistake lets through, the policy stops.
        assert (
            tab.run("(() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } })()")
            == "TypeError"
        )
        assert tab.run("fetch('https://elsewhere.example/').then(() => 'sent', () => 'stopped')") == "stopped"
        tab.run("document.head.append(Object.assign(document.createElement('style'), {textContent: '*{color:red}'}))")
        assert tab.run("getComputedStyle($('h1')).color") != "rgb(255, 0, 0)"
        assert tab.problems, "the policy said nothing"
        tab.problems.clear()
        tab.requests.remove("https://elsewhere.example/") if "https://elsewhere.example/" in tab.requests else None

    def harmless(self, tab: Tab) -> None:
        """Nothing of an attack acts."""
        assert tab.run("window.hit") is None
        tags = tab.run("[...new Set($$('#messages *').map((each) => each.localName))]")
        known = (
            "article div p h3 h4 h5 h6 ul ol li blockquote pre code a b strong em del br hr table thead tbody tr th td"
        )
        assert set(tags) <= {*known.split(), "button", "details", "summary", "i"} - {"b"}, tags
        names = tab.run("$$('#messages *, #list *').flatMap((each) => each.getAttributeNames())")
        allowed = "class hidden type href rel target referrerpolicy tabindex role start title"
        others = {name for name in names if not name.startswith(("aria-", "data-before"))}
        assert others <= set(allowed.split()), others
        for link in tab.run("$$('#messages a').map((each) => [each.href, each.rel])"):
            assert link[0].startswith(("http://", "https://")), link
            assert "noopener" in link[1], link

    def check_markdown(self) -> None:
        """Written piece by piece it becomes the same as all at once, and what it should."""
        tab = self.open()
        shape = (
            "(async (text, step) => { const { Markdown } = await import('./page/markdown.js');"
            "const root = document.createElement('div'); const spoken = [];"
            "const shown = new Markdown(root, (block) => spoken.push(block));"
            "for (let end = step; end < text.length; end += step) shown.update(text.slice(0, end));"
            "shown.update(text, true); const tree = (node) => node.nodeType === 3 ? node.data : "
            "[node.localName + (node.href ?? ''), ...[...node.childNodes].map(tree)]; root.normalize();"
            "return { tree: tree(root), spoken }; })(%s, %d)"
        )
        for text in (MARKDOWN, *ATTACKS):
            whole = tab.run(shape % (json.dumps(text), 10**6))
            for step in (1, 3, 17) if len(text) < 1000 else (501,):
                assert tab.run(shape % (json.dumps(text), step)) == whole, (text, step)
        found = tab.run(shape % (json.dumps(MARKDOWN), 1))
        link, seen = ["ahttps://example.org/?a=1&b=2", "link"], found["tree"][1:]
        assert seen[0] == ["h3", "One"]
        assert seen[1] == [
            "p", "Two ", ["em", "three"], " ", ["strong", "four"], " ", ["code", "five <b>"], " ", ["del", "six"], " ",
            ["strong", ["em", "seven"]], ["br"], "next ", link, ".",
        ]  # fmt: skip
        code = ["div", ["div", "js", ["button", "Copy"]], ["pre", ["code", 'let d = "<e>";']]]
        assert seen[2] == ["ul", ["li", "a"], ["li", "b", ["ol", ["li", "c", code], ["li", "f"]], ["p", "g"]]]
        assert seen[3] == ["blockquote", ["p", "h"], ["blockquote", ["p", "i"]]]
        head, body = ["thead", ["tr", ["th", "j"], ["th", "k"]]], ["tbody", ["tr", ["td", "l"], ["td", "m|n"]]]
        assert seen[4] == ["div", ["table", head, body]]
        assert seen[5] == ["hr"]
        assert seen[6] == ["div", ["div", "code", ["button", "Copy"]], ["pre", ["code", "o\n```"]]]
        address = "http://example.org/u_v_w"
        assert seen[7] == ["p", "p *q* r_s_t 2 * 3 * 4 ", [f"a{address}", address], "."], seen[7]
        said = (
            'One Two three four five <b> six seven next link. a b c let d = "<e>"; f g h i j, k, l, m|n, '
            f"o ``` p *q* r_s_t 2 * 3 * 4 {address}."
        )
        assert " ".join(found["spoken"]).split() == said.split(), found["spoken"]
        for hostile in [each * (60_000 // len(each)) for each in ("*a ", "[", "`a``", "_", "|", "- ", ">")]:
            begun = time.monotonic()
            tab.run(shape % (json.dumps(hostile), 10**6))
            assert time.monotonic() - begun < 2, hostile[:10]
        self.canned(
            tab, MARKDOWN + "```python\n" + "x = 'a long line of code' + " * 30 + "\n" * 40 + "```", "Let me *think*."
        )
        assert not tab.run(f"{LAST}.querySelector('.thinking').open")
        tab.run("$('#scroll').scrollTop = 0")
        self.picture(tab, "markdown")
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert tab.run(wide)
        tab.page.set_viewport_size({"width": 360, "height": 740})
        tab.page.emulate_media(color_scheme="dark")
        assert tab.run(wide)
        self.picture(tab, "markdown-phone")

    def check_keyboard(self) -> None:
        """Everything without a mouse: each control is reached, has a name, and does what it says."""
        tab = self.open()
        assert tab.run("active().id") == "text"
        tab.type("One\n")
        tab.press("Shift+Enter")
        tab.type("two")
        assert tab.run("$('#text').value.split('\\n').length") >= 2
        assert tab.run("$$('.message').length") == 0
        tab.press("Enter")
        tab.wait(ENDED, 60)
        tab.run("active().blur()")
        reached = set()
        for _ in range(40):
            tab.press("Tab")
            name = tab.run("active().id || active().textContent.trim().slice(0, 30)")
            reached.add(name)
            assert tab.run("active() === document.body || active().matches(':focus-visible')")
        assert reached >= {"To the message field", "new", "Copy", "Edit", "Retry", "text", "send"}, reached
        assert any(name.startswith("System prompt") for name in reached)
        tab.run("$('.skip').focus()")
        tab.press("Enter")
        assert tab.run("active().id") == "text"
        tab.run("$('#new').focus()")
        tab.press("Enter")
        tab.wait("$$('.message').length === 0 && active().id === 'text'")
        # Names and roles, as a screen reader gets them.
        found = tab.page.locator("body").aria_snapshot()
        roles = dict(re.findall(r"- ([a-z]+)( \"|:| )?", found))
        for role in ("button", "textbox", "spinbutton", "link", "img"):
            assert not re.search(rf"- {role}(:|$)", found, re.M), found
        assert {"main", "navigation", "log", "status", "heading"} <= roles.keys(), found

    def check_phone(self) -> None:
        tab = self.open(width=360, height=640, phone=True)
        shown = "$('%s').checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})"
        assert not tab.run("$('#live').open")
        assert not tab.run("$('#conversations').open")
        self.ask(tab, STORY)
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        box = tab.run("(({bottom, right}) => [bottom, right])($('#send').getBoundingClientRect())")
        assert box[0] <= 640, box
        assert box[1] <= 360, box
        assert tab.run("$('#send').getBoundingClientRect().height") >= 40
        tab.click("#live > summary")
        tab.wait(shown % ".pages")
        self.picture(tab, "phone")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        tab.click("#live > summary")
        tab.click("#conversations > summary")
        tab.click("#new")
        tab.wait("!$('#conversations').open")

    def check_what_users_prefer(self) -> None:
        tab = self.open(dark=True, calm=True)
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
        assert tab.run(lightness) < 150
        tab.type(STORY)
        tab.press("Enter")
        tab.wait("$('.growing') !== null")
        assert tab.run("document.getAnimations().length") == 0
        tab.wait(ENDED, 60)
        self.picture(tab, "dark")
        tab.page.emulate_media(color_scheme="light")
        assert tab.run(lightness) > 600

    def check_full_storage(self) -> None:
        tab = self.open()
        tab.run(
            "(() => { for (let size = 2 ** 22; size >= 1;) { try { localStorage.setItem('f' + Math.random(), "
            "'x'.repeat(size)) } catch { size >>= 1 } } })()"
        )
        whole = self.ask(tab, STORY)
        assert "no room" in tab.run("$('#notice').textContent")
        tab.click("#new")
        tab.click("#list .open")  # it is still there, in this tab
        assert tab.wait(TEXT) == whole

    def check_many_conversations(self) -> None:
        """The hundred newest stay."""
        tab = self.open()
        made = "{title: 't' + i, updated: i, system: '', sampling: {}, revision: 'r', messages: []}"
        tab.run(
            f"for (let i = 0; i < 105; i++) localStorage.setItem('kvant.conversation.' + i, JSON.stringify({made}))"
        )
        tab.reload()
        self.ask(tab, STORY)
        assert tab.run(LISTED) == 100
        assert tab.run("Object.keys(localStorage).length") == 100
        assert tab.run("localStorage.getItem('kvant.conversation.5')") is None
        assert tab.run("localStorage.getItem('kvant.conversation.6')") is not None


def main() -> None:
    """Every check, and how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="keep pictures of the page in this folder")
    parser.add_argument("--only", default="", help="checks with this in their name")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pictures = given.pictures or Path(scratch)
        pictures.mkdir(parents=True, exist_ok=True)
        server = Server()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                checks = Checks(browser, server, pictures)
                chosen = [check for check in checks.all() if given.only in check.__name__]
                for check in chosen:
                    begun = time.monotonic()
                    try:
                        check()
                        checks.close_tabs()
                    except (AssertionError, BrowserError):
                        traceback.print_exc(limit=4)
                        sys.exit(
                            f"{check.__name__} failed; the page complained of {[tab.problems for tab in checks.tabs]}"
                        )
                    print(
                        f"{check.__name__.removeprefix('check_').replace('_', ' ')}: {time.monotonic() - begun:.1f} s",
                        flush=True,
                    )
        finally:
            server._process.terminate()
            server._process.wait(20)
    assert chosen, "no such check"
    print(f"the page passed {len(chosen)} checks in Chromium")


if __name__ == "__main__":
    main()
