"""Kernels compiled on this machine by NVRTC, and kept on disk.

Binaries lie in `kernels/` of dcpcomm's cache folder, one file for each (sources, options, architecture, NVRTC version).
What comes out of there is run on a GPU, so a file counts only if nobody else could have written it and it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dcpcomm.cachefolder import cache_dir
from dcpcomm.errors import DCPCommError

__all__ = ["Binary", "KernelsUnavailable", "compile_kernels", "options_for", "sources_of"]

_FOLDER = Path(__file__).resolve().parent / "cuda"
_MAGIC = b"dcpcomm kernels 1\n"
#: Every operation rounded as written: a result must not depend on what a compiler contracts or flushes.
_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


class KernelsUnavailable(DCPCommError):
    """The CUDA kernels can't be compiled here: a package is missing, or NVRTC doesn't know the GPU's kind."""


@dataclass(frozen=True)
class Binary:
    """What a CUDA driver loads.

    Attributes:
        image: a CUBIN, or PTX ending in a 0 byte.
        target: "sm_90", say, or "compute_90" for PTX.
        cached: whether it came from disk.
    """

    image: bytes
    target: str
    cached: bool


def sources_of(name: str | Path) -> dict[str, str]:
    """By file name, kernel file `name` ("pack.cu", or an absolute path) and every header that it may include."""
    files = [_FOLDER / name, *sorted(_FOLDER.glob("*.cuh"))]  # an absolute path stays what it is
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def options_for(defines: Mapping[str, int], target: str) -> tuple[str, ...]:
    """NVRTC's options for `target` ("sm_90")."""
    macros = (f"-D{name}={value}" for name, value in sorted(defines.items()))
    return (f"--gpu-architecture={target}", *_OPTIONS, *macros)


def compile_kernels(name: str | Path, defines: Mapping[str, int], capability: tuple[int, int]) -> Binary:
    """Kernel file `name` with `defines`, for a GPU of compute capability `capability`; from disk where it is there.

    Args:
        name: of a file in `cuda/` ("pack.cu"), or the absolute path of another, which may include the headers there.

    Raises:
        KernelsUnavailable: CuPy or NVRTC isn't installed, or NVRTC is older than the GPU's whole family.
        DCPCommError: the sources don't compile, which is a bug.
    """
    nvrtc = _nvrtc()
    try:
        version, known = nvrtc.getVersion(), nvrtc.getSupportedArchs()
    except Exception as error:  # CuPy's loader raises errors of packages that may not be there to be named
        raise _unavailable(f"NVRTC can't be loaded: {error}") from error
    target = _target(capability, known)
    sources = sources_of(name)
    options = options_for(defines, target)
    key = hashlib.sha256(json.dumps([sources, options, list(version)]).encode()).hexdigest()
    folder = cache_dir() / "kernels"
    usable = _make_private(folder)
    if usable:
        image = _read(folder / key)
        if image is not None:
            return Binary(image, target, True)
    image = _compile(nvrtc, Path(name).name, sources, options, target)
    if usable:
        _write(folder / key, image)
    return Binary(image, target, False)


def _nvrtc() -> ModuleType:
    try:
        return importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise _unavailable(f"CuPy can't be imported: {error}") from error


def _unavailable(reason: str) -> KernelsUnavailable:
    return KernelsUnavailable(
        f"{reason.strip()}. Install what the CUDA kernels are compiled by: pip install 'dcpcomm[cu12]', or "
        "'dcpcomm[cu13]' for CUDA 13"
    )


def _target(capability: tuple[int, int], known: tuple[int, ...]) -> str:
    """Machine code for exactly this GPU if NVRTC knows it, else PTX for the newest that it knows below it."""
    arch = capability[0] * 10 + capability[1]
    if arch in known:
        return f"sm_{arch}"
    below = [one for one in known if one < arch]
    if not below:
        raise KernelsUnavailable(
            f"this GPU's architecture sm_{arch} is older than all that the installed NVRTC compiles for "
            f"(sm_{min(known)} and newer); install an older CUDA release's packages: pip install 'dcpcomm[cu12]'"
        )
    return f"compute_{max(below)}"


def _compile(nvrtc: Any, name: str, sources: Mapping[str, str], options: tuple[str, ...], target: str) -> bytes:
    headers = [file for file in sources if file != name]
    texts = [sources[file].encode() for file in headers]
    program = nvrtc.createProgram(sources[name], name, texts, [file.encode() for file in headers])
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise DCPCommError(f"{name} does not compile for {target} ({error}); please report this:\n{log}") from error
        if target.startswith("sm_"):
            return bytes(nvrtc.getCUBIN(program))
        text = nvrtc.getPTX(program)
        return (text.encode() if isinstance(text, str) else bytes(text)).rstrip(b"\0") + b"\0"
    finally:
        nvrtc.destroyProgram(program)


def _make_private(folder: Path) -> bool:
    """Create `folder`, for this user alone; whether what lies in it can be trusted."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        status = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _only_ours(status)


def _only_ours(status: os.stat_result) -> bool:
    """Whether nobody but this user, or root, could have written it."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(file: Path) -> bytes | None:
    """The image in `file`; None where there is none, it isn't ours, or it is torn."""
    try:
        # Opened first and looked at through the descriptor, so that it can't be exchanged in between.
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or not _only_ours(status):
                return None
            content = opened.read()
    except OSError:
        return None
    digest, image = content[len(_MAGIC) :][:32], content[len(_MAGIC) + 32 :]
    whole = content.startswith(_MAGIC) and image and hashlib.sha256(image).digest() == digest
    return image if whole else None


def _write(file: Path, image: bytes) -> None:
    """Keep `image`: whole or not at all, also while other ranks do the same. Where it can't be kept, it isn't."""
    with contextlib.suppress(OSError):
        descriptor, draft = tempfile.mkstemp(prefix=f"{file.name[:16]}.", dir=file.parent)  # for this user alone
        try:
            with open(descriptor, "wb") as opened:
                opened.write(_MAGIC + hashlib.sha256(image).digest() + image)
            os.replace(draft, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
