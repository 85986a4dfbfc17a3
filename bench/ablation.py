"""What each part of the fused kernel costs: the same kernel without it, timed beside the whole.

    dcpcomm bench --transport loopback_peer --transport loopback_peer:without=headers

A kernel that lacks a part answers good calls as before. It is for timing alone.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import threading
from pathlib import Path

from dcpcomm.combine.kernels import Kernels
from dcpcomm.combine.nvrtc import sources_of

__all__ = ["PARTS", "source_without", "use"]

_one_at_a_time = threading.Lock()
_POISON = """#pragma unroll
    for (i32 n = 0; n < AT_ENTRY; n++) heed(poison[n]);
    for (u32 n = AT_ENTRY; n < (N ? N : p.ranks); n++) heed(load_relaxed_u32(poison_at(p, own, n) + 4));
"""
_POISON_LOADS = (
    "#pragma unroll\n    for (i32 n = 0; n < AT_ENTRY; n++) poison[n] = load_relaxed_u32(poison_at(p, own, n) + 4);\n"
)
_SLOW_PATH = "            const u64 seen = look_around<N>(p, now, own, 0, pending, since);\n"
_COUNTS = "    return row_is_empty(p.counts, p.counts.token0 + (i64)n * p.counts.token_n + (i64)at.t);\n"
_SENTINELS = """#pragma unroll
                for (int w = 0; w < 4; w++) v[i].word[w] -= v[i].word[w] == SENTINEL;
"""
_WAIT = "            if (!works && trouble <= CALLED_OFF) trouble |= await_headers(p, now, own, since);\n"
_SEND = "        if (!trouble) send_headers<N>(p, now);\n"

#: By name, texts of fused.cu and what to put in their place.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "headers": ((_WAIT, ""), (_SEND, "")),
    "poison": ((_POISON_LOADS, ""), (_POISON, "")),
    "deadline": ((_SLOW_PATH, "            const u64 seen = 0;\n"),),
    "counts": ((_COUNTS, "    return false;\n"),),
    "progress": (
        ("            if (p.progress) store_relaxed(p.progress, ordinal + 1);\n", ""),
        ("                if (p.progress) store_relaxed(p.progress + 8, ordinal + 1);\n", ""),
    ),
    "sentinels": ((_SENTINELS, ""),),
}
PARTS["all"] = tuple({change[0]: change for part in PARTS.values() for change in part}.values())


def source_without(part: str) -> str:
    """fused.cu without one of PARTS.

    Raises:
        ValueError: there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part of the fused kernel; expected one of {', '.join(PARTS)}")
    text = sources_of("fused.cu")["fused.cu"]
    for there, instead in PARTS[part]:
        assert text.count(there) == 1, f"fused.cu has changed: {there!r} isn't in it once"
        text = text.replace(there, instead)
    return text


def use(part: str | None) -> None:
    """Mergers made from now on, in this process, have a kernel without `part`; whole where it is None."""
    with _one_at_a_time:  # ranks that are threads, all of which come here with the same part
        Kernels.fused_source = "fused.cu" if part is None else _file_without(part)


@functools.cache
def _file_without(part: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dcpcomm-ablation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "fused.cu"
    file.write_text(source_without(part), encoding="utf-8")
    return file
