"""A chat on a page in the browser, by gradio's chat interface, for this machine alone.

Answers are streamed as the model writes them, as plain text: also tags of tool calls and of reasoning are seen.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from mini_trainer.data.chat.conversation import Message
from mini_trainer.distributed.messages import say
from mini_trainer.use.inference.engine import Engine
from mini_trainer.use.inference.terminal import make_prompt

HOST = "127.0.0.1"
FONTS = ["ui-sans-serif", "system-ui", "sans-serif"]  # of the machine: gradio's own are loaded from the web


def serve_chat(engine: Engine, *, title: str, port: int) -> None:
    """Serves a chat with a system message and a temperature until Ctrl-C; OSError if the port is taken."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    def answer(text: str, history: list[Message], system: str, temperature: float) -> Iterator[str]:
        engine.sampling = replace(engine.sampling, temperature=temperature)
        earlier = [{"role": message["role"], "content": read_text(message["content"])} for message in history]
        start = [{"role": "system", "content": system.strip()}] if system.strip() else []
        messages = [*start, *earlier, {"role": "user", "content": text}]
        written = ""
        try:
            with closing(engine.stream(make_prompt(messages))) as stream:
                for piece in stream:
                    written += piece
                    yield written
        except (ValueError, OSError) as error:
            raise gradio.Error(str(error), duration=None) from None

    app = gradio.ChatInterface(
        answer,
        title=title,
        chatbot=gradio.Chatbot(show_label=False, render_markdown=False, buttons=["copy", "copy_all"], scale=1),
        additional_inputs=[
            gradio.Textbox(label="System message", lines=2),
            gradio.Slider(0, 2, value=engine.sampling.temperature, step=0.1, label="Temperature (0: likeliest words)"),
        ],
        additional_inputs_accordion="Settings",
        analytics_enabled=False,
    )
    theme = gradio.themes.Default(font=FONTS, font_mono=["ui-monospace", "monospace"])
    at = dict(server_name=HOST, server_port=port, share=False)
    _, url, _ = app.launch(**at, theme=theme, footer_links=[], quiet=True, prevent_thread_lock=True)
    say(f"chat with {title}: {url} (Ctrl-C ends it)")
    app.block_thread()


def read_text(content: Any) -> str:
    """A message's text; gradio divides it into parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
