"""A third party's distribution as it is in life: a project folder, built and installed by pip, found by its metadata.

`tests/third_party.py` writes the files that an installation would leave; here nothing is written but a project.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = """
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"

[project.entry-points."dcpcomm.transports"]
{entries}

[tool.setuptools]
py-modules = {modules}
"""

#: A transport as a third party writes one: over nothing but what `group` offers, with options of its own.
RING = '''
import os
import sys
import time

import torch
from pydantic import BaseModel, ConfigDict, Field

from dcpcomm import Capabilities, MergeTransport

if os.environ.get("ACME_TRACE"):
    print("acme_ring is imported", file=sys.stderr)


class Ring(MergeTransport):
    """Rows through a store."""

    name = "ring"
    capabilities = Capabilities(devices=("cpu",), multi_host=True)

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        pause_s: float = Field(default=0.0005, ge=0, description="between two looks into the store")
        blocks: int = Field(default=1, ge=1, description="pieces of a message")

    def prepare(self) -> bytes:
        self._calls = {}
        return b""

    def connect(self, peers: list[bytes]) -> None:
        self._store = self.group.store("ring")

    def exchange(self, send, channel, recv=None):
        call = self._calls[channel] = self._calls.get(channel, 0) + 1
        me = self.group.rank
        for peer in range(self.group.size):
            pieces = send[peer].flatten().tensor_split(self.options.blocks)
            for i, piece in enumerate(pieces):
                self._store.set(f"{channel}/{call}/{me}/{peer}/{i}", piece.numpy().tobytes())
        for source in range(self.group.size):
            keys = [f"{channel}/{call}/{source}/{me}/{i}" for i in range(self.options.blocks)]
            while not self._store.check(keys):
                time.sleep(self.options.pause_s)
            raw = b"".join(self._store.get(key) for key in keys)
            recv[source].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(recv[source].shape))
        return recv

    def close(self) -> None:
        pass
'''

OLD = """
from acme_ring import Ring

class Old(Ring):
    name = "old"
    api_version = 99
"""

BROKEN = """
import acme_driver  # of the vendor's driver package, which isn't installed
"""

TWIN = """
from dcpcomm import Capabilities, MergeTransport

class Twin(MergeTransport):
    name = "ring"
    capabilities = Capabilities(devices=("cpu",))

    def prepare(self): return b""
    def connect(self, peers): pass
    def exchange(self, send, channel, recv=None): return recv
    def close(self): pass
"""


def build_and_install(
    work: Path, name: str, version: str, entry_points: dict[str, str], modules: dict[str, str]
) -> Path:
    """The folder that pip installed the distribution into; put it on `PYTHONPATH` for it to count. Needs no network."""
    project, site = work / f"{name}-project", work / f"{name}-site"
    project.mkdir()
    entries = "\n".join(f'{entry} = "{target}"' for entry, target in entry_points.items())
    text = PROJECT.format(name=name, version=version, entries=entries, modules=list(modules))
    (project / "pyproject.toml").write_text(text)
    for module, source in modules.items():
        (project / f"{module}.py").write_text(source)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(site), str(project)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return site
