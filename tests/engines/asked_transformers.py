"""Runs in the environment of transformers 4: reads a JSON request on stdin, and writes the answer to a file, in JSON.

In: {"output": FILE} with "configs" whose rotary frequencies to list, or "model": DIR, with "rows" to score, or "chats",
"dtype" and "adapter" (a directory or null) for greedy answers; with "pictures" each chat is about an image.
"""

import json
import sys
from dataclasses import asdict

from engine_table import describe_pictures, expect, list_frequencies, score


def main() -> None:
    asked = json.load(sys.stdin)
    model = asked.get("model")
    if "configs" in asked:
        said = list(map(try_frequencies, asked["configs"]))
    elif "rows" in asked:
        said = score(model, asked["rows"]).tolist()
    elif "pictures" in asked:
        said = describe_pictures(model, asked["chats"], asked["pictures"])
    else:
        said = [asdict(one) for one in expect(model, asked["chats"], dtype=asked["dtype"], adapter=asked["adapter"])]
    with open(asked["output"], "w") as file:
        json.dump(said, file)


def try_frequencies(values: dict) -> list[list[float]] | str:
    try:
        return list_frequencies(values)
    except Exception as error:  # what a class refuses, and how, is its own
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
