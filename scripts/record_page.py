"""Take the picture of the chat page in README: SmolLM2 answers a conversation while three other clients are
answered.

Usage: python scripts/record_page.py. It writes docs/data/server-page.png, and needs `kvant pull
    smollm2-135m-q4`, the
extras cpu and serve, playwright and Debian's chromium.
"""

import threading
from pathlib import Path

import httpx2
from playwright.sync_api import Page, sync_playwright
from real_model import MODEL, QUESTION, serving

PICTURE = Path(__file__).parents[1] / "docs" / "data" / "server-page.png"
CONVERSATION = [QUESTION, "And of Italy?", "Write a haiku about the sea."]
OTHERS = [
    "Give me three tips for better sleep.",
    "Write a letter to a friend.",
    "Explain how a bicycle stays upright.",
]
SIZE = {"width": 1360, "height": 860}


def ask(url: str, question: str) -> None:
    """Let the server answer beside the page."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 300,
        "temperature": 0,
    }
    httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=600)


def send(page: Page, text: str) -> None:
    page.locator("textarea").first.fill(text)
    page.keyboard.press("Enter")


def main() -> None:
    with serving("--sequences", "4", "--max-kv-size", "1024") as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.wait_for_timeout(1500)
        others = [threading.Thread(target=ask, args=(url, question), daemon=True) for question in OTHERS]
        for number, text in enumerate(CONVERSATION):
            send(page, text)
            if number == len(CONVERSATION) - 1:
                for thread in others:
                    thread.start()
                page.wait_for_timeout(6000)
                page.screenshot(path=PICTURE)
            else:
                page.wait_for_timeout(6000)
        browser.close()


if __name__ == "__main__":
    main()
