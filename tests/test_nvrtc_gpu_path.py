"""What tests/gpu asks of a GPU's errors and of adapters, asked of the fused kernel's own source on CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.emulated import COMPILER
from tests.nursery import Nursery

ROOT = Path(__file__).resolve().parent.parent
# Last on the path, as tests/conftest.py puts it, so that `import dcpcomm` finds what is installed.
RUN = "import sys, pytest; sys.path.append(sys.argv.pop(1)); sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels for the CPU with")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("about", ["errors", "adapters"])
def test_what_is_asked_of_a_gpu_holds_for_the_kernels_source(nursery: Nursery, about: str) -> None:
    ran = nursery.python(
        "-c", RUN, str(ROOT), "-q", "-p", "tests.pretend_gpu", "-p", "no:cacheprovider", "-k", "2",
        str(ROOT / f"tests/gpu/test_{about}_gpu.py"),
        environment={**os.environ, "DCPCOMM_TEST_RIG": "cpu"},
        folder=Path(sys.prefix),
    ).wait(180)  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert " passed" in ran.stdout
    assert "failed" not in ran.stdout
