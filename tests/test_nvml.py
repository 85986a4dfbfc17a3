"""What is asked of NVML, and made of its answers: against a library that answers as machines do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcpcomm import topology
from dcpcomm.machine import Fabric, Machine
from dcpcomm.nvml import NvmlAbsent, machine_by_nvml

COMPILER = shutil.which("cc") or shutil.which("gcc")
Fake = Callable[..., str]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    if COMPILER is None:
        pytest.skip("no C compiler to make a library with")

    def compiled(**defines: int) -> str:
        # A name for each: the loader takes a path that it knows for the library that it has.
        library = tmp_path / f"libnvidia-ml-{'-'.join(f'{k}{v}' for k, v in defines.items())}.so"
        source = Path(__file__).parent / "fake_nvml.c"
        given = [f"-D{name}={value}" for name, value in defines.items()]
        subprocess.run([COMPILER, "-shared", "-fPIC", "-w", *given, "-o", library, source], check=True)
        return str(library)

    return compiled


def test_a_machine_is_read_whole(fake: Fake) -> None:
    found = machine_by_nvml("here", fake(FABRIC=3))
    assert (found.driver, found.driver_cuda) == ("580.1.2", "13.0")
    assert [gpu.uuid for gpu in found.gpus] == ["0000-0", "0000-1"], "as CUDA has them, without NVML's prefix"
    assert {(gpu.name, gpu.architecture) for gpu in found.gpus} == {("NVIDIA Fake 0", "sm_100")}
    assert [gpu.pci for gpu in found.gpus] == ["00000000:1a:00.0", "00000000:1b:00.0"]
    assert found.gpus[0].fabric == Fabric("completed", "abababab-abab-abab-abab-abababababab", 5)
    (pair,) = found.pairs
    assert (pair.link, pair.access) == ("NV18", True)


@pytest.mark.parametrize(
    ("defines", "link"),
    [
        ({"LANES": 18, "REMOTE": 2}, "NV18"),  # through a switch
        ({"LANES": 12, "REMOTE": 255}, "NV12"),  # in a virtual machine, which isn't told where they lead
        ({"LANES": 8, "REMOTE": 0}, "NV4"),  # half of them to this peer
        ({"LANES": 0, "LEVEL": 10}, "PIX"),
        ({"LANES": 0, "LEVEL": 20}, "PXB"),
        ({"LANES": 0, "LEVEL": 30}, "PHB"),
        ({"LANES": 0, "LEVEL": 40}, "NODE"),
        ({"LANES": 0, "LEVEL": 50}, "SYS"),
        ({"LANES": 0, "LEVEL": 99}, "?"),
    ],
)
def test_links_have_the_words_of_nvidia_smi(fake: Fake, defines: dict[str, int], link: str) -> None:
    (pair,) = machine_by_nvml("here", fake(**defines)).pairs
    assert pair.link == link


def test_no_peer_access_has_the_drivers_reason(fake: Fake) -> None:
    found = machine_by_nvml("here", fake(COUNT=3, LANES=0, PEER_ACCESS=1))
    assert len(found.pairs) == 3
    assert {(pair.access, pair.reason) for pair in found.pairs} == {(False, "the chipset doesn't support it")}


@pytest.mark.parametrize(("state", "said"), [(0, "none"), (1, "not started"), (2, "in progress")])
def test_a_fabric_that_is_not_up_joins_nobody(fake: Fake, state: int, said: str) -> None:
    gpu = machine_by_nvml("here", fake(FABRIC=state)).gpus[0]
    assert gpu.fabric is not None
    assert (gpu.fabric.state, gpu.fabric.domain) == (said, "")


def test_what_an_old_driver_lacks_is_unknown(fake: Fake) -> None:
    assert machine_by_nvml("here", fake()).gpus[0].fabric is None


def test_an_nvml_that_is_not_there_or_does_not_start_has_its_reason(fake: Fake) -> None:
    with pytest.raises(NvmlAbsent, match="no NVIDIA driver"):
        machine_by_nvml("here", "libnvidia-ml-of-nobody.so.1")
    with pytest.raises(NvmlAbsent, match="NVML doesn't start: nvmlInit_v2: Unknown Error"):
        machine_by_nvml("here", fake(INIT=9))


def test_it_is_shut_down_again(fake: Fake) -> None:
    path = fake()
    machine_by_nvml("here", path)
    assert ctypes.CDLL(path).nvmlShutdown() == 1, "it was still up"


def test_without_nvml_this_machine_says_so_and_is_none_the_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(host: str) -> Machine:
        raise NvmlAbsent("no driver")

    monkeypatch.setattr(topology, "machine_by_nvml", absent)
    topology._seen.cache_clear()
    try:
        found = topology.this_machine()
    finally:
        topology._seen.cache_clear()
    assert found.gaps == ("no driver; neither links nor fabric are known",)
    assert found.device.startswith("cpu ")
    assert len(found.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
