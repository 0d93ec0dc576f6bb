"""Converts Arrow's values to those of JSON, by their types, and refuses the others where they are read.

| Arrow                             | becomes                                                                    |
|-----------------------------------|----------------------------------------------------------------------------|
| struct                            | an object without the keys that are null: each row has the keys of all     |
| date, time, timestamp             | its ISO 8601 text                                                          |
| JSON text (arrow.json, or `Json`  | the value; its nulls stay                                                  |
| of the datasets library)          |                                                                            |
| decimal, bytes, NaN, duration,    | itself, which `refuse_non_json` refuses in messages and tools: a number or |
| ... (a map is `Unreadable`)       | text in its place would not be the row's value                             |

Reads the messages of rows whose values may be missing or text: tool calls as OpenAI's API and tables have them.

Arguments of calls become objects, also those that are given as JSON text; how the chat template takes them is decided
where it renders (data/chat/rendering.py). Keys that are null or hold no calls are left out, as they mean the same.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mini_trainer.data.stores.json_lines import Unreadable, parse_json, quote, read_embedded_json

# Objects in which a null can mean something: a column of tools, whose parameters have defaults, and, anywhere below a
# column, the arguments of a call.
COLUMN, KEY = "tools", "arguments"
DATES = (pa.types.is_date, pa.types.is_time, pa.types.is_timestamp)
LISTS = (
    *(pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
    *(pa.types.is_list_view, pa.types.is_large_list_view),
)


@dataclass
class RowReader:
    """Converts rows of one schema. `lost`: where the current row's nulls were removed although they may be its own."""

    schema: pa.Schema
    lost: set[str] = field(default_factory=set)

    def read(self, rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
        """Yields each row with JSON's values, and the places of `lost` nulls."""
        features, find = read_features(self.schema), self.find
        readers = {one.name: find(one.type, features.get(one.name), name_if(one.name, COLUMN)) for one in self.schema}
        for row in rows:
            self.lost.clear()
            values = {name: readers[name](value) for name, value in row.items() if value is not None}
            yield values, tuple(sorted(self.lost))

    def find(self, kind: pa.DataType, feature: Any, place: str | None) -> Callable[[Any], Any]:
        """A function that converts values of this type, except null. `feature`: what the datasets library says of it;
        `place`: the object that it is in, if a null can mean something there."""
        is_extension = isinstance(kind, pa.BaseExtensionType)
        is_json = isinstance(feature, dict) and feature.get("_type") == "Json"
        if is_json or (is_extension and kind.extension_name == "arrow.json"):
            return read_json
        if is_extension:
            return self.find(kind.storage_type, feature, place)
        if pa.types.is_dictionary(kind):
            return self.find(kind.value_type, feature, place)
        if pa.types.is_struct(kind):
            return self.make_struct_reader(kind, feature, place)
        if pa.types.is_map(kind):
            return lambda _: Unreadable(f"a {kind}: write it as JSON text")
        if any(is_kind(kind) for is_kind in LISTS):
            inner = feature.get("feature") if isinstance(feature, dict) else None
            inner = feature[0] if isinstance(feature, list) and feature else inner
            read = self.find(kind.value_type, inner, place)
            # A list's nulls are the row's own, and stay.
            return keep if read is keep else lambda values: [None if one is None else read(one) for one in values]
        if any(is_kind(kind) for is_kind in DATES):
            return lambda value: value.isoformat()
        if place is not None and (pa.types.is_float32(kind) or pa.types.is_float16(kind)):
            narrow = np.float32 if pa.types.is_float32(kind) else np.float16
            return lambda value: float(str(narrow(value)))  # 0.1, not 0.10000000149011612
        return keep

    def make_struct_reader(self, kind: pa.StructType, feature: Any, place: str | None) -> Callable[[Any], Any]:
        inner = feature if isinstance(feature, dict) else {}
        readers = {one.name: self.find(one.type, inner.get(one.name), place or name_if(one.name, KEY)) for one in kind}
        changing = [(key, read) for key, read in readers.items() if read is not keep]

        def read(value: dict[str, Any]) -> dict[str, Any]:
            if None in value.values():
                if place is not None:
                    self.lost.add(place)
                value = {key: item for key, item in value.items() if item is not None}
            for key, read_item in changing:
                if key in value:
                    value[key] = read_item(value[key])
            return value

        return read


def name_if(name: str, wanted: str) -> str | None:
    return name if name == wanted else None


def keep(value: Any) -> Any:
    return value


def read_json(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        return Unreadable(f"a text that is marked as JSON: {error}")


def read_features(schema: pa.Schema) -> dict[str, Any]:
    """The datasets library's description of the columns in the schema's metadata; empty if there is none."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def refuse_non_json(value: Any, where: str) -> None:
    """Raises ValueError, with the key, if the value holds one that JSON does not have."""
    try:
        json.dumps(value, allow_nan=False)  # much faster than the walk that finds the key
        return
    except (ValueError, TypeError, RecursionError):
        pass
    waiting = [("", value)]  # not recursive: values may be nested deeply
    while waiting:
        key, one = waiting.pop()
        if isinstance(one, dict):
            waiting += [(f"{key}.{name}" if key else str(name), item) for name, item in one.items()]
        elif isinstance(one, list):
            waiting += [(f"{key}[{i}]", item) for i, item in enumerate(one)]
        elif not (one is None or isinstance(one, str | int | float)) or (
            isinstance(one, float) and not math.isfinite(one)
        ):
            has = f"has {quote(one)} at {key}" if key else f"is {quote(one)}"
            raise ValueError(f"{where} {has}, which JSON does not have: write it as a number or text, or leave it out")


WITHOUT_ARGUMENTS = {"name", "id", "type", "index"}  # keys of a call that needs none


def read_message(message: Any, number: int) -> Any:
    """The message without keys that say nothing, with arguments of calls as objects; values of another type stay, to be
    refused with their reason. ValueError for arguments that are no object, and values that JSON does not have."""
    if not isinstance(message, dict):
        return message
    if len(message) == 2 and isinstance(message.get("content"), str) and "role" in message:
        return message
    where = f"message {number} ({message.get('role')})"
    refuse_non_json({key: value for key, value in message.items() if key != "content"}, where)
    read = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "tool_calls" not in read:
        return read
    calls = read.pop("tool_calls")
    if isinstance(calls, str):
        calls = read_embedded_json(calls, f"{where}: 'tool_calls'") if calls.strip() else []
    if calls in ([], None):
        return read
    if isinstance(calls, list):
        calls = [read_call(call, f"{where}: call {i}") for i, call in enumerate(calls, start=1)]
    return {**read, "tool_calls": calls}


def read_call(call: Any, where: str) -> Any:
    """The call with its arguments as an object, at either of their places."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        if "arguments" in call:
            raise ValueError(f"{where} has 'arguments' beside 'function': they belong in it")
        return {**call, "function": read_call(call["function"], where)}
    if "name" not in call:
        return call
    if "arguments" not in call and not call.keys() <= WITHOUT_ARGUMENTS:
        raise ValueError(f"{where} has no 'arguments', but the keys {quote(sorted(call))}: name them 'arguments'")
    return {**call, "arguments": read_arguments(call.get("arguments"), where)}


def read_arguments(given: Any, where: str) -> dict[str, Any]:
    """The arguments of a call; none if they are missing, null or an empty text."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    error = ""
    try:
        arguments = parse_json(given) if isinstance(given, str) else given
    except ValueError as problem:
        arguments, error = None, f": {problem}"
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} has the arguments {quote(given)}, expected an object, or its JSON text{error}")
    return arguments
