"""A chat in the terminal: answers stream, Ctrl-C ends an answer and not the program, Ctrl-D ends it."""

import signal
from contextlib import closing, suppress

from chat.examples import ASSISTANT, Message
from inference.engine import Engine
from inference.prompts import Prompt
from ranks.messages import make_visible, say

HELP = """/reset        forget the conversation
/system TEXT  begin a new conversation with these instructions; without TEXT, with none
/help         this
/exit         end (so does Ctrl-D)
Ctrl-C ends an answer; what was said so far stays in the conversation."""
PROMPT = "> "


def chat(engine: Engine) -> None:
    """Reads lines and answers them until /exit or the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then has a history, and keys that move
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where this was started with Ctrl-C ignored
    print("/help says what there is; Ctrl-D ends.")
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
            say(f"{word} is no command:\n{HELP}")
        elif word:
            messages = ask(engine, messages, line.strip())


def read_line() -> str | None:
    """What was typed; None at the end. Ctrl-C empties the line."""
    while True:
        try:
            return input(PROMPT)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends)")
        except EOFError:
            print()
            return None


def ask(engine: Engine, messages: list[Message], text: str) -> list[Message]:
    """Prints the answer as it comes; returns the conversation with it, or as it was where there is none."""
    asked = [*messages, {"role": "user", "content": text}]
    pieces: list[str] = []
    try:
        # A conversation of one message can also be put to a model that knows no chats.
        prompt = Prompt(row={}, messages=asked, text=text if len(asked) == 1 else None)
        with closing(engine.stream(prompt)) as stream:
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
