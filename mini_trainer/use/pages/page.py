"""Makes one HTML file from a page's parts: it needs no network, and runs only its own scripts."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

from mini_trainer.options.reading import read_text

FOLDER = Path(__file__).parent


def make_page(path: Path, parts: dict[str, str], *, title: str, library: str = "", policy: str = "") -> str:
    """The page at `path` (.html) with the style and script next to it, and $NAMES$ replaced by `parts`. Style and
    script come after the common ones of all pages. `parts` are HTML, `title` is text. The page's policy allows only its
    scripts, including `library`, by their hashes, and the additions in `policy`."""
    style, script = (read_text(FOLDER / f"page{end}") + read_text(path.with_suffix(end)) for end in (".css", ".js"))
    digests = [hashlib.sha256(text.encode()).digest() for text in (library, script) if text]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    parts = parts | {
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}{policy}",
        "TITLE": html.escape(title),
        "STYLE": style,
        "LIBRARY": library,
        "SCRIPT": script,
    }
    page = read_text(path)
    return re.sub(r"\$([A-Z_]+)\$", lambda name: parts[name[1]], page)  # once, so that data cannot name a part


def fold(text: str, limit: int) -> str:
    """`text`, without its middle if longer than `limit`."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return f"{head} … ({len(text) - len(head) - len(tail):,} characters) … {tail}"


def escape_json(value: Any) -> str:
    """JSON in ASCII with the special characters of HTML escaped."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
