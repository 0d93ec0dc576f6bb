"""numba's decorator for functions that Python calls: compiled code is kept on the disk, where there is a place."""

from collections.abc import Callable

from numba import njit


def compile_kept(function: Callable) -> Callable:
    """Compiles without Python's lock; every process does, for seconds, if nothing is kept (`options.places`)."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba finds no directory that it may write to
        return njit(nogil=True)(function)
