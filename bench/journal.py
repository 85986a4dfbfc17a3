"""What an interrupted run had measured: one line of JSON for each cell, behind one that says what the run was of."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

__all__ = ["Journal"]


class Journal:
    """A file of cells.

    Args:
        path: of the file; its folder is made.
        run: what the run is of, as plain data: cells of another are not taken.
        fresh: begin anew.
    """

    def __init__(self, path: Path, run: dict[str, Any], fresh: bool = False) -> None:
        self.path, self._fresh = path, fresh
        self._head = json.dumps(run, sort_keys=True, default=list)
        self._begun = False

    def read(self) -> dict[str, list[float]]:
        """The cells of an interrupted run like this one; none of any other."""
        if self._fresh:
            return {}
        try:
            text = self.path.read_text(encoding="utf-8")
            head, *lines = text.splitlines()
        except (OSError, ValueError):
            return {}
        if head != self._head:
            return {}
        cells = {}
        for line in lines:
            with contextlib.suppress(ValueError):  # of a run that was killed while it wrote
                label, figures = json.loads(line)
                cells[label] = figures
        if not text.endswith("\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")  # or the next cell would be part of the torn line
        self._begun = True
        return cells

    def note(self, label: str, figures: list[float]) -> None:
        """One more cell, on disk when this returns."""
        if not self._begun:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.write_text(self._head + "\n", encoding="utf-8")
            self._begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([label, figures]) + "\n")

    def end(self) -> None:
        """The run is over: the next begins anew."""
        self.path.unlink(missing_ok=True)
