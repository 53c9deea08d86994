"""What a request holds of a KV group whose layers see a window of w tokens: a query at position p sees positions p - w + 1 .. p.

With `length` tokens computed, the next query is at position `length`, or at the last whole page before it where somebody continues from
the prefix cache. What lies in whole pages before the first position that either sees is behind the window: nobody will read it.

    0                window_start(length)        whole page   length
    │ behind the window, │ seen from the last      │ seen from  │ next
    │ may be given back  │ whole page on           │ `length`   │ query
"""

from __future__ import annotations

UNLIMITED = 1 << 62
"""More tokens than any group holds."""


def pages_seen(window: int, page_size: int) -> int:
    """Whole pages before a page's first position of which that position sees something."""
    return -(-(window - 1) // page_size)


def window_start(length: int, window: int, page_size: int) -> int:
    """The first position, on a page's boundary, that a request with `length` computed tokens keeps."""
    return max(0, length // page_size - pages_seen(window, page_size)) * page_size


def least_window_tokens(window: int, page_size: int) -> int:
    """With so many slots a single request of any length goes on: what it keeps, the page that it writes, and one more for the step that
    is submitted while the last one's result is out."""
    return (pages_seen(window, page_size) + 2) * page_size


def most_window_tokens(window: int, chunk: int, page_size: int) -> int:
    """A request holds no more, in whole pages, when it writes `chunk` tokens in one step."""
    return least_window_tokens(window, page_size) + -(-chunk // page_size) * page_size
