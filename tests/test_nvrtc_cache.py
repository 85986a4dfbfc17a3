"""Compiled kernels on disk: found again, never trusted where somebody else could have written or they are torn."""

from __future__ import annotations

import importlib.util
import os
import stat
from pathlib import Path

import pytest
import torch

from dcpcomm.combine import kernels, nvrtc
from tests.nursery import Nursery

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed: pip install 'dcpcomm[cu12]'"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernels are kept; not yet there."""
    monkeypatch.setenv("DCPCOMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def build(capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16) -> nvrtc.Binary:
    return nvrtc.compile_kernels("pack.cu", kernels.defines_for("pack.cu", dtype, 2), capability)


def test_the_second_time_it_comes_from_disk(folder: Path) -> None:
    first, second = build(), build()
    assert (first.cached, second.cached) == (False, True)
    assert first.image == second.image
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_gpu_option_or_source_is_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    assert not build((8, 0)).cached
    assert not build(dtype=torch.float32).cached
    real = nvrtc.sources_of

    def changed(name: str) -> dict[str, str]:
        return {file: f"{text}\n// changed\n" if file == "canonical.cuh" else text for file, text in real(name).items()}

    monkeypatch.setattr(nvrtc, "sources_of", changed)
    assert not build().cached
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("what", ["short", "empty", "a flipped bit", "another's magic"])
def test_a_torn_file_is_compiled_anew(folder: Path, what: str) -> None:
    image = build().image
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    if what == "short":
        del content[len(content) // 2 :]
    elif what == "empty":
        content.clear()
    elif what == "a flipped bit":
        content[-100] ^= 1
    else:
        content[0] ^= 1
    file.write_bytes(content)
    again = build()
    assert not again.cached
    assert again.image == image
    assert build().cached, "the torn file was not replaced"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_used(folder: Path, mode: int) -> None:
    build()
    (file,) = folder.iterdir()
    file.chmod(mode)
    assert not build().cached
    assert build().cached
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_to_elsewhere_is_not_used(folder: Path, tmp_path: Path) -> None:
    build()
    (file,) = folder.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert not build().cached


def test_a_folder_that_others_may_write_is_left_alone(folder: Path) -> None:
    build()
    folder.chmod(0o770)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert not build().cached
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_used(folder: Path) -> None:
    build()
    (file,) = folder.iterdir()
    os.chown(file, 12345, 12345)
    assert not build().cached


def test_where_nothing_can_be_written_it_compiles_all_the_same(folder: Path, tmp_path: Path) -> None:
    folder.parent.write_text("a file where the folder would be")
    assert not build().cached
    assert not build().cached
    folder.parent.unlink()
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert build().image


def test_no_draft_is_left_where_writing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(nvrtc.os, "replace", full)
    assert not build().cached
    assert list(folder.iterdir()) == []


def test_ranks_that_compile_at_once_don_t_disturb_each_other(folder: Path, nursery: Nursery) -> None:
    code = (
        "import torch; from dcpcomm.combine import kernels, nvrtc; import hashlib; "
        "b = nvrtc.compile_kernels('pack.cu', kernels.defines_for('pack.cu', torch.bfloat16, 2), (9, 0)); "
        "print(hashlib.sha256(b.image).hexdigest())"
    )
    ranks = [rank.wait() for rank in [nursery.python("-c", code) for _ in range(3)]]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len({rank.stdout for rank in ranks}) == 1
    assert len(list(folder.iterdir())) == 1
    assert build().cached
