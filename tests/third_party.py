"""A third party's distribution, made of files: metadata, an entry point and a module."""

from __future__ import annotations

from pathlib import Path

TRANSPORT = """
from pydantic import BaseModel
from dcpcomm.transport import Capabilities, MergeTransport

class Ring(MergeTransport):
    name = "{name}"
    capabilities = Capabilities(devices=("cpu",))

    class Options(BaseModel):
        blocks: int = 4
        eager: bool = False

    def prepare(self): return b""
    def connect(self, peers): pass
    def exchange(self, send, channel, recv=None): return send
    def close(self): pass
"""


def install(
    folder: Path,
    distribution: str,
    entry_points: dict[str, str],
    modules: dict[str, str] | None = None,
    version: str = "1.2",
) -> None:
    """Write what `pip install` would: `folder` must be on `sys.path` for it to count."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"{name} = {target}" for name, target in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dcpcomm.transports]", *lines, ""]))
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(source)
