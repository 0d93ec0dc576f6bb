"""The chat on a page, in a real browser, with an engine that writes slowly until it is stopped."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from browser import Browser, needs_browser
from processes import is_listening

from mini_trainer.data.rows.prompts import Prompt
from mini_trainer.options.tools import GenerateOptions, SamplingOptions
from mini_trainer.use.inference.browser import serve_chat

pytestmark = [needs_browser]
ANSWER = "<tool_call>{}</tool_call> **one**\n" + "word " * 2000


class Slow:
    """Notes what it is asked, and whether its answer was read to the end."""

    def __init__(self) -> None:
        self.sampling, self.asked, self.ends = SamplingOptions(), [], []

    def stream(self, prompt: Prompt) -> Iterator[str]:
        self.asked.append((prompt, self.sampling.temperature))
        if prompt.messages[-1]["content"] == "refuse":
            raise ValueError("the prompt is too long")
        pieces, is_whole = ANSWER.split(" ") if prompt.messages[-1]["content"] == "long" else ["short", "answer"], False
        try:
            for piece in pieces:
                time.sleep(0.01)
                yield f"{piece} "
            is_whole = True
        finally:
            self.ends.append(is_whole)


@pytest.fixture
def page(tmp_path):
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = Slow()
    threading.Thread(target=serve_chat, args=(engine,), kwargs=dict(title="a model", port=port), daemon=True).start()
    browser = Browser(tmp_path / "profile")
    deadline = time.monotonic() + 60
    while not is_listening(port) and time.monotonic() < deadline:
        time.sleep(0.1)
    browser.open(f"http://127.0.0.1:{port}/", width=390)
    browser.wait_until("document.querySelector('textarea') !== null && document.body.innerText.includes('a model')")
    yield engine, browser
    browser.close()


def say(browser: Browser, text: str) -> None:
    browser.wait_until("document.querySelector('textarea:not(:disabled)') && !document.querySelector('.stop-button')")
    time.sleep(1)  # gradio empties the field once more after an answer
    browser.ask("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text=text)
    for kind, written in (("keyDown", "\r"), ("keyUp", "")):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text=written
        )


def test_a_chat_streams_stops_and_shows_what_the_model_writes(page):
    engine, browser = page
    say(browser, "hello")
    browser.wait_until("document.body.innerText.includes('short answer')")
    say(browser, "long")
    browser.wait_until(
        "document.body.innerText.includes('<tool_call>{}</tool_call> **one**')"
    )  # before its end, as text
    browser.ask("document.querySelector('.stop-button').click()")
    deadline = time.monotonic() + 30
    while len(engine.ends) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engine.ends == [True, False], "the engine still writes after stop"
    say(browser, "refuse")
    browser.wait_until("document.body.innerText.includes('the prompt is too long')")
    first, second, _ = [[(m["role"], m["content"]) for m in prompt.messages] for prompt, _ in engine.asked]
    assert first == [("user", "hello")] and engine.asked[0][0].text == "hello"
    assert [role for role, _ in second] == ["user", "assistant", "user"] and second[1][1].strip() == "short answer"
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    requested = [
        e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"
    ]
    assert requested and all(url.startswith(("http://127.0.0.1", "data:", "blob:")) for url in requested)


def test_the_system_message_and_the_temperature_of_the_page_are_used(page):
    engine, browser = page
    fill = "(at, value) => {{ at.value = value; at.dispatchEvent(new Event('input', {{bubbles: true}})) }}"
    browser.ask(f"({fill.format()})([...document.querySelectorAll('textarea')].at(-1), 'Be brief.')")
    browser.ask(f"({fill.format()})(document.querySelector('input[type=number]'), '0.5')")
    say(browser, "hello")
    browser.wait_until("document.body.innerText.includes('short answer')")
    ((prompt, temperature),) = engine.asked
    assert [message["content"] for message in prompt.messages] == ["Be brief.", "hello"] and temperature == 0.5


def test_prompts_and_a_page_are_refused_together():
    from mini_trainer.options.problems.finding import find_problems

    options = GenerateOptions(model="M", prompts=("a.jsonl",), output="b.jsonl", browser=True)
    assert find_problems(options) == ["--prompts and --browser: answer prompts, or chat; give only one"]
    assert find_problems(replace(options, prompts=(), output=None)) == []
