"""What `import dcpcomm` costs and brings along, and what it says where the project isn't installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dcpcomm

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=100)


def test_importing_brings_no_backend_no_cli_and_no_pydantic() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import dcpcomm; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    brought = json.loads(run(code).stdout)
    assert "dcpcomm" in brought
    for name in brought:
        assert not name.startswith(("dcpcomm.backends", "dcpcomm.cli", "dcpcomm.bench", "pydantic", "typer", "rich")), (
            name
        )


def test_importing_takes_at_most_100_ms_over_torch() -> None:
    code = "import time, torch; t = time.perf_counter(); import dcpcomm; print(time.perf_counter() - t)"
    # On a busy machine some are slower; one that is fast enough shows what it costs.
    assert any(float(run(code).stdout) < 0.1 for _ in range(6))


def test_every_public_name_is_there_and_listed_in_order() -> None:
    assert dcpcomm.__all__ == sorted(dcpcomm.__all__)
    for name in dcpcomm.__all__:
        assert getattr(dcpcomm, name) is not None
    assert set(dcpcomm.__all__) <= set(dir(dcpcomm))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(dcpcomm, "DCPMerger2")


def test_a_source_folder_that_is_not_installed_says_so() -> None:
    # -S and the cleared meta_path: without site-packages there is neither an installed copy nor an editable finder.
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path = [{str(ROOT)!r}] + [p for p in sys.path if p != {str(ROOT)!r}]; import dcpcomm"
    )
    result = run(code)
    assert result.returncode != 0
    assert "without being installed" in result.stderr
    assert "pip install -e ." in result.stderr
