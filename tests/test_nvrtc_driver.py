"""Modules and launches against a library in the driver's place that writes down what it was called with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpcomm.combine import driver, params
from dcpcomm.combine.nvrtc import KernelsUnavailable
from dcpcomm.errors import DCPCommError

COMPILER = shutil.which("gcc")
with_compiler = pytest.mark.skipif(COMPILER is None, reason="no gcc to compile a driver in place of CUDA's with")

SOURCE = """
#include <stdint.h>
#include <string.h>
int64_t seen[16];
int current, pushed, unloaded, released, fail_with;
struct Attribute { int id; char gap[4]; union { int value; char room[64]; } u; };
struct Config { unsigned grid[3], block[3], shared; void *stream; struct Attribute *attributes; unsigned count; };
int cuLaunchKernelEx(const struct Config *c, void *f, void **arguments, void **extra) {
    if (!current) return 201;
    if (fail_with) return fail_with;
    int64_t attribute = c->count == 0 ? 0 : c->count == 1 ? c->attributes[0].id * 10 + c->attributes[0].u.value : -1;
    int64_t now[12] = {(int64_t)f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                       (int64_t)c->stream, extra != 0 ? -1 : attribute, 0, 0};
    memcpy(now + 10, arguments[0], 16);
    memcpy(seen, now, sizeof now);
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(0x700000000000 + device); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { released += device; return 0; }
int cuCtxSetCurrent(void *context) { current = context == (void *)(0x700000000000 + 42); return 0; }
int cuCtxPushCurrent_v2(void *context) { pushed++; return context != (void *)(0x700000000000 + 42); }
int cuCtxPopCurrent_v2(void **context) { pushed--; return 0; }
int cuModuleLoadData(void **module, const char *image) {
    *module = (void *)0x7123456789ab;
    return pushed != 1 ? 201 : strcmp(image, "an image") ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x7fedcba98765;
    return pushed != 1 || module != (void *)0x7123456789ab ? 400 : strcmp(name, "pack_16") ? 500 : 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    *blocks = 2048 / threads;
    return pushed != 1 || function != (void *)0x7fedcba98765 || shared ? 400 : 0;
}
int cuModuleUnload(void *module) { unloaded += module == (void *)0x7123456789ab; return 0; }
int cuGetErrorName(int status, const char **text) { *text = status == 500 ? "CUDA_ERROR_NOT_FOUND" : 0; return 0; }
int cuGetErrorString(int status, const char **text) { *text = status == 500 ? "named symbol not found" : 0; return 0; }
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    assert COMPILER is not None
    source, file = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(SOURCE, encoding="utf-8")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", str(file), str(source)], check=True, timeout=60)
    real = ctypes.CDLL
    library = real(str(file))
    driver._driver.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(driver.ctypes, "CDLL", lambda name: library if name == "libcuda.so.1" else real(name))
        driver._driver()
    yield library
    driver._driver.cache_clear()


def number(fake: Any, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(fake, name)


@with_compiler
def test_a_launch_passes_on_what_it_was_bound_with(fake: Any) -> None:
    context = driver.Context(torch.device("cpu", 2))
    module = driver.Module(context, b"an image")
    function = module.function("pack_16")
    assert module.resident_blocks(function, 512) == 4
    assert number(fake, "pushed").value == 0, "a context was left on the stack"
    counted = params.PackParams(0x7000_0000_0001, -5)
    launch = driver.Launch(context, function, "pack", (2112, 3, 17, 7), counted)
    for stream, current in ((0x5555_5555_5550, 0), (0, 1)):  # the first on a thread without a current context
        assert number(fake, "current").value == current
        launch(stream)
        seen = (ctypes.c_int64 * 12).in_dll(fake, "seen")
        assert list(seen) == [0x7FED_CBA9_8765, 2112, 3, 1, 17, 7, 1, 0, stream, 0, 0x7000_0000_0001, -5]
    counted.rows = 77
    launch(0)
    assert (ctypes.c_int64 * 12).in_dll(fake, "seen")[10] == 77, "the struct is read at each launch"
    driver.Launch(context, function, "pack", (1, 1, 32, 1), counted, programmatic=True)(3)
    assert list((ctypes.c_int64 * 12).in_dll(fake, "seen"))[8:10] == [3, 61], "programmatic stream serialization, on"
    for _ in range(2):
        module.unload()
        context.release()
    assert number(fake, "unloaded").value == 1
    assert number(fake, "released").value == 42


@with_compiler
def test_what_the_driver_refuses_is_an_error_that_names_it(fake: Any) -> None:
    context = driver.Context(torch.device("cpu", 2))
    module = driver.Module(context, b"an image")
    with pytest.raises(
        DCPCommError, match=r"cuModuleGetFunction of nothing failed with CUDA_ERROR_NOT_FOUND \(500\): named"
    ):
        module.function("nothing")
    with pytest.raises(DCPCommError, match="cuOccupancyMaxActiveBlocksPerMultiprocessor"):
        module.resident_blocks(1, 64)
    assert number(fake, "pushed").value == 0
    with pytest.raises(DCPCommError, match=r"cuModuleLoadData failed with an unknown error \(200\)"):
        driver.Module(context, b"another")
    number(fake, "fail_with").value = 701
    launch = driver.Launch(context, 1, "combine", (1, 2, 3, 4), params.CombineParams())
    with pytest.raises(DCPCommError, match=r"launching combine with grid \(1, 2, 3, 4\) failed .*\(701\)"):
        launch(0)


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    driver._driver.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", absent)
    with pytest.raises(KernelsUnavailable, match=r"driver can't be loaded: libcuda\.so\.1.*install NVIDIA's driver"):
        driver._driver()
    driver._driver.cache_clear()
