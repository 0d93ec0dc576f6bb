"""One HTML file from a page's parts: it needs no network, and no script runs in it but its own."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def make_page(path: Path, parts: dict[str, str], *, title: str, library: str = "", policy: str = "") -> str:
    """The page at `path` (.html), its style and script beside it, and `parts` in the places of $NAMES$.

    Style and script come after those that all pages share. `parts` are HTML, `title` is text. The page's policy names
    each script by its hash, `library` among them, and allows nothing else but what `policy` adds.
    """
    style, script = (
        (FOLDER / f"page{suffix}").read_text(encoding="utf-8") + path.with_suffix(suffix).read_text(encoding="utf-8")
        for suffix in (".css", ".js")
    )
    hashes = " ".join(f"'{hash_script(text)}'" for text in (library, script) if text)
    parts = parts | {
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}{policy}",
        "TITLE": html.escape(title),
        "STYLE": style,
        "LIBRARY": library,
        "SCRIPT": script,
    }
    page = path.read_text(encoding="utf-8")
    return re.sub(r"\$([A-Z_]+)\$", lambda name: parts[name[1]], page)  # once, so that data cannot name a part


def hash_script(text: str) -> str:
    """As a policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def fold(text: str, limit: int) -> str:
    """A long text without its middle."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return f"{head} … ({len(text) - len(head) - len(tail):,} characters) … {tail}"


def escape_json(value: Any) -> str:
    """JSON in ASCII without the characters that HTML gives a meaning to."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
