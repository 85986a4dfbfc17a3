"""What dcpcomm keeps on disk and may forget: soaks' verdicts, tuned cost tables, the last decision."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["cache_dir", "write_whole"]


def cache_dir() -> Path:
    """`DCPCOMM_CACHE_DIR`, or else the user's cache folder."""
    named = os.environ.get("DCPCOMM_CACHE_DIR")
    if named:
        return Path(named)
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "dcpcomm"
    try:
        return Path.home() / ".cache" / "dcpcomm"
    except RuntimeError:  # a user that this container knows nothing of
        return Path(tempfile.gettempdir()) / f"dcpcomm-{os.getuid()}"


def write_whole(path: Path, text: str) -> None:
    """Write a file that no reader sees half of, also where several processes and threads write it at once.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A draft of its own for each writer: two texts of unequal lengths in one file are neither.
    prefix = f"{path.stem}."
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=prefix, delete=False) as draft:
        draft.write(text)
    os.replace(draft.name, path)
