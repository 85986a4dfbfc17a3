"""What several commands do to keep a terminal, or a pipe, fit to read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["stdout_kept_clean"]


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what libraries write to standard output to standard error: some Gloos report connections there."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
