"""Writes large files, laid out in advance, on threads that compute their SHA-256 meanwhile.

SHA-256 takes a file's bytes in order, at 1 to 2 GB/s on one core, so several files are hashed at the same time, and
each while it is written: hashlib and os.pwrite release Python's lock.

https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 16 << 20  # written and hashed at the same time
INLINE_BYTES = 1 << 20  # writing a smaller block takes less time than waking a thread


class HashedFile:
    """A new file whose parts may be written in any order, each by one call of `write`, from one thread at a time. A
    part that does not follow the hashed ones is hashed later, by reading it back. Once all `size` bytes are written,
    the file is flushed to the disk and closed.
    """

    def __init__(self, path: Path, header: bytes, size: int):
        """`header` is the file's first part, and written before any other."""
        self.path, self.header, self.size = path, header, size
        self.sha256, self.num_hashed = hashlib.sha256(), 0
        self.descriptor: int | None = None  # while the file is open
        self.early: dict[int, int] = {}  # ends of parts written out of order, by their starts

    @property
    def is_complete(self) -> bool:
        return self.num_hashed == self.size

    @property
    def entry(self) -> dict[str, Any]:
        """The complete file's entry for the manifest."""
        assert self.is_complete, f"{self.path.name}: {self.num_hashed} of {self.size} bytes were written"
        return {"size": self.size, "sha256": self.sha256.hexdigest()}

    def write(self, start: int, data: bytes | memoryview | Tensor, writer: Executor) -> None:
        """Writes `data` on the thread of `writer`, and hashes it on this one. OSError if that fails."""
        if self.num_hashed == 0 and self.descriptor is None:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self.write(0, self.header, writer)
        if isinstance(data, Tensor):
            data = data.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        view = memoryview(data)
        if not view:
            return
        if start == self.num_hashed:
            self.write_next(view, writer)
        else:
            write_at(self.descriptor, view, start)
            self.early[start] = start + len(view)
        while self.num_hashed in self.early:
            for block in self.read_back(self.early.pop(self.num_hashed)):
                self.sha256.update(block)
        if self.is_complete:
            os.fsync(self.descriptor)
            self.close()

    def write_next(self, view: memoryview, writer: Executor) -> None:
        for offset in range(0, len(view), BLOCK_BYTES):
            block = view[offset : offset + BLOCK_BYTES]
            if len(block) < INLINE_BYTES:
                write_at(self.descriptor, block, self.num_hashed)
                self.sha256.update(block)
            else:
                written = writer.submit(write_at, self.descriptor, block, self.num_hashed)
                self.sha256.update(block)
                written.result()
            self.num_hashed += len(block)

    def read_back(self, end: int) -> Iterator[bytes]:
        """The file's blocks from those hashed to `end`, which now count as hashed."""
        while self.num_hashed < end:
            block = os.pread(self.descriptor, min(BLOCK_BYTES, end - self.num_hashed), self.num_hashed)
            if not block:
                raise OSError(f"{self.path.name} ends at byte {self.num_hashed}, but {end} were written")
            self.num_hashed += len(block)
            yield block

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def write_at(descriptor: int, data: memoryview, start: int) -> None:
    """Writes all of `data`; the system may take less at once."""
    while data:
        num_written = os.pwrite(descriptor, data, start)
        data, start = data[num_written:], start + num_written


class WritePool:
    """Threads that fill files while the caller prepares the next parts. One thread calls all methods. Each file is in a
    lane, which writes one part at a time. `wait` raises the first error; everything after it is dropped."""

    def __init__(self, num_lanes: int, max_bytes: int):
        """`max_bytes` is the memory that `make_room` lets wait. OSError if the threads cannot be started."""
        self.max_bytes = max_bytes
        self.hashers = [start_thread(f"hash {i}") for i in range(num_lanes)]
        self.writers = [start_thread(f"write {i}") for i in range(num_lanes)]
        self.files: list[HashedFile] = []
        self.changed = threading.Condition()
        self.num_parts = self.num_bytes = 0  # waiting or being written
        self.error: Exception | None = None

    def add_file(self, path: Path, header: bytes, size: int) -> int:
        """Adds a new file of `size` bytes that begins with `header`, and is created by its first write.
        Returns its number: files are best filled in this order."""
        self.files.append(HashedFile(path, header, size))
        return len(self.files) - 1

    def turn_of(self, number: int, start: int) -> tuple[int, int]:
        """Sort key of the parts of all files: each file in its own order, one file of each lane at a time."""
        return number // len(self.hashers), start

    def make_room(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more fit into `max_bytes`, or nothing else is waiting."""
        with self.changed:
            self.changed.wait_for(lambda: self.num_bytes == 0 or self.num_bytes + num_bytes <= self.max_bytes)

    def write(self, number: int, place: range, data: bytes | Tensor) -> None:
        """Starts writing `data` to its place in a file; `data` must not change before `wait` returns."""
        file, lane = self.files[number], number % len(self.hashers)
        size = len(data) if isinstance(data, bytes) else data.nbytes
        assert size == len(place), f"{size} bytes for {len(place)} in {file.path.name}"
        with self.changed:
            self.num_parts += 1
            self.num_bytes += size
        self.hashers[lane].submit(self.run, file, place.start, data, self.writers[lane], size)

    def run(self, file: HashedFile, start: int, data: bytes | memoryview | Tensor, writer: Executor, size: int) -> None:
        try:
            if self.error is None:
                file.write(start, data, writer)
        except Exception as error:
            self.error = self.error or error
        finally:
            with self.changed:
                self.num_parts -= 1
                self.num_bytes -= size
                self.changed.notify()

    def wait(self) -> None:
        """Waits until everything is written; raises the first error."""
        for number, file in enumerate(self.files):
            if file.num_hashed == 0:  # it may have no data, only a header
                self.write(number, range(0), b"")
        with self.changed:
            self.changed.wait_for(lambda: self.num_parts == 0)
        if self.error is not None:
            raise self.error

    def finish(self) -> dict[Path, dict[str, Any]]:
        """Waits like `wait`; returns every file's manifest entry."""
        self.wait()
        return {file.path: file.entry for file in self.files}

    def drop(self) -> None:
        """Drops waiting parts, and forgets all files and the error."""
        self.error = self.error or RuntimeError("dropped")  # parts after an error are dropped
        with self.changed:
            self.changed.wait_for(lambda: self.num_parts == 0)
        for file in self.files:
            file.close()
        self.files, self.error = [], None

    def close(self) -> None:
        """Drops waiting parts, and ends the threads."""
        self.drop()
        for thread in (*self.hashers, *self.writers):
            thread.shutdown()


def start_thread(name: str) -> ThreadPoolExecutor:
    """A thread that is already running: memory may be too low to start one later."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        executor.submit(int).result()
    except RuntimeError as error:
        raise OSError(f"no thread can be started to write files: {error}") from None
    return executor


# The library's names, in the order in which its files store them, so that all numbers are aligned.
DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ITEM_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


class TensorFile:
    """A safetensors file, laid out from the dtypes and shapes of its tensors and filled in any order by `pool`.
    The complete file is identical to one written by `safetensors.torch.save_file`."""

    def __init__(self, path: Path, tensors: dict[str, tuple[str, Sequence[int]]], pool: WritePool):
        self.pool = pool
        header, self.places = lay_out(tensors)  # of the tensors not yet written
        ends = [place.stop for place in self.places.values()]
        self.number = pool.add_file(path, header, max(ends, default=len(header)))

    def write(self, name: str, tensor: Tensor) -> None:
        """Starts writing a tensor, which must not change before `pool` is done."""
        self.pool.write(self.number, self.places.pop(name), tensor)

    def fill(self, read: Callable[[str], Tensor]) -> None:
        """Starts writing all tensors, in the file's order, each as soon as there is room for it."""
        for name, place in list(self.places.items()):
            self.pool.make_room(len(place))
            self.write(name, read(name))


def lay_out(tensors: dict[str, tuple[str, Sequence[int]]]) -> tuple[bytes, dict[str, range]]:
    """The header of a file of tensors of these dtypes and shapes, and each tensor's range of bytes in the file."""
    order = list(ITEM_SIZES)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (order.index(item[1][0]), item[0])):
        ends.append(ends[-1] + math.prod(shape) * ITEM_SIZES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    del header["__metadata__"]
    begin = len(text := len(text).to_bytes(8, "little") + text)
    return text, {name: range(*(begin + end for end in entry["data_offsets"])) for name, entry in header.items()}
