"""A chat in the terminal: answers are streamed, Ctrl-C stops an answer, Ctrl-D ends the program."""

import signal
from contextlib import closing, suppress

from mini_trainer.data.chat.conversation import ASSISTANT, Message
from mini_trainer.data.rows.prompts import Prompt
from mini_trainer.distributed.messages import make_visible, say
from mini_trainer.use.inference.engine import Engine

HELP = """/reset        start a new conversation
/system TEXT  start a new conversation with TEXT as the system message; without TEXT, with none
/help         show this help
/exit         quit (as does Ctrl-D)
Ctrl-C stops an answer; the part generated so far stays in the conversation."""
PROMPT = "> "


def chat(engine: Engine) -> None:
    """Reads and answers lines until /exit or the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and line editing
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in case this process was started with SIGINT ignored
    print("/help lists the commands; Ctrl-D quits.")
    messages: list[Message] = []
    while (line := read_line()) is not None:
        word, _, rest = line.strip().partition(" ")
        if word == "/exit":
            return
        if word == "/help":
            print(HELP)
        elif word == "/reset":
            messages = [message for message in messages if message["role"] == "system"]
            print("(a new conversation)")
        elif word == "/system":
            messages = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            print("(a new conversation, with these instructions)" if messages else "(a new conversation)")
        elif word.startswith("/"):
            say(f"{word} is not a command:\n{HELP}")
        elif word:
            messages = ask(engine, messages, line.strip())


def read_line() -> str | None:
    """Reads a line; None at the end of the input. Ctrl-C clears the line."""
    while True:
        try:
            return input(PROMPT)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit quits)")
        except EOFError:
            print()
            return None


def ask(engine: Engine, messages: list[Message], text: str) -> list[Message]:
    """Prints the answer as it streams; returns the conversation with it, or unchanged if there is none."""
    asked = [*messages, {"role": "user", "content": text}]
    pieces: list[str] = []
    try:
        with closing(engine.stream(make_prompt(asked))) as stream:
            for piece in stream:
                pieces.append(piece)
                print(make_visible(piece), end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" (interrupted)")
    except (ValueError, OSError) as error:
        say(f"error: {error}", is_error=True)
        return messages
    answer = "".join(pieces)
    return [*asked, {"role": ASSISTANT, "content": answer}] if answer.strip() else messages


def make_prompt(messages: list[Message]) -> Prompt:
    """A single message also works as plain text, for models without a chat template."""
    return Prompt(row={}, messages=messages, text=messages[0]["content"] if len(messages) == 1 else None)
