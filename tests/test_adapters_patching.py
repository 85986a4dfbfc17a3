"""The plug-ins swap dcpcomm in wherever an engine's modules hold its functions, and say what they did not and why."""

from __future__ import annotations

import importlib.metadata
import logging
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpcomm
from dcpcomm.adapters import patching, sglang, vllm
from tests.engines import Package, adapted
from tests.oracle import Case, judge, make_case
from tests.world import World, rank_of

THEIRS = "    return 'theirs'\n"
OLD_RS = "def cp_lse_ag_out_rs(cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False):\n" + THEIRS
RS = OLD_RS.replace("return_lse=False", "return_lse=False, is_lse_base_on_e=True")
AR = RS.replace("_rs(", "_ar(")
FIRST_A2A = (
    "def dcp_a2a_lse_reduce(local_output, local_lse, kvp_group, return_lse=False, is_lse_base_on_e=True):\n" + THEIRS
)
LENGTHS = "is_lse_base_on_e=True, seq_lens=None, query_start_loc=None"
NEW = (RS + AR + RS.replace("cp_lse_ag_out_rs", "dcp_a2a_lse_reduce")).replace("is_lse_base_on_e=True", LENGTHS)
MANAGER = """
import functools

class Workspace:
    def lse_reduce(self, *args, **kwargs):
        return "direct"

@functools.cache
def get_direct_dcp_a2a_workspace(group) -> Workspace | None:
    return Workspace()

class Manager:
    def __init__(self, group, is_lse_base_on_e):
        direct = get_direct_dcp_a2a_workspace(0)  # cached by its argument
        self.combine = direct.lse_reduce if direct is not None else functools.partial(
            dcp_a2a_lse_reduce, cp_group=group, is_lse_base_on_e=is_lse_base_on_e)
"""

#: By layout: the modules of a release, and how each of its importing modules calls the merge.
LAYOUTS = {
    "0.11": {
        "vllm.attention.ops.common": OLD_RS,
        "vllm.v1.attention.backends.mla.common": (
            "from vllm.attention.ops.common import cp_lse_ag_out_rs\n"
            "def step(out, lse, group):\n    return cp_lse_ag_out_rs(out, lse, group)\n"
        ),
    },
    "0.16": {
        "vllm.v1.attention.ops.common": RS + AR,
        "vllm.v1.attention.ops.dcp_alltoall": FIRST_A2A,
        "vllm.v1.attention.backends.mla.common": (
            "from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce as _reduce\n"
            "from vllm.v1.attention.ops.common import cp_lse_ag_out_ar, cp_lse_ag_out_rs\n"
            "def step(out, lse, group):\n    return _reduce(out, lse, group, True, is_lse_base_on_e=True)[0]\n"
        ),
    },
    "0.25": {
        "vllm.v1.attention.ops.dcp": "from __future__ import annotations\n" + NEW + MANAGER,
        "vllm.v1.attention.backends.mla.common": (
            "from vllm.v1.attention.ops.dcp import Manager, cp_lse_ag_out_rs\n"
            "def step(out, lse, group):\n"
            "    return Manager(group, True).combine(out, lse, seq_lens=None, query_start_loc=None)\n"
        ),
    },
}
BACKEND = "vllm.v1.attention.backends.mla.common"


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Any]:
    made: list[Package] = []

    def one(files: dict[str, str]) -> Package:
        made.append(Package(tmp_path, files))
        return made[-1]

    yield one
    vllm.unpatch()
    sglang.unpatch()
    for package in made:
        package.remove()


def bound(module: Any, *names: str) -> list[Any]:
    return [getattr(module, name) for name in names]


@pytest.mark.parametrize("loaded_before", [True, False])
def test_a_name_bound_by_an_importing_module_is_replaced_there(install: Any, loaded_before: bool) -> None:
    package = install(LAYOUTS["0.16"])
    if loaded_before:
        package.load(BACKEND)
    report = vllm.patch()
    backend, ops = package.load(BACKEND), package.load("vllm.v1.attention.ops.common")
    names = "cp_lse_ag_out_ar", "cp_lse_ag_out_rs"
    assert bound(backend, *names) == bound(ops, *names) == bound(vllm, *names)
    assert backend._reduce is package.load("vllm.v1.attention.ops.dcp_alltoall").dcp_a2a_lse_reduce
    assert backend._reduce is vllm._first_dcp_a2a_lse_reduce
    assert not report.refused
    assert "vllm.v1.attention.ops.common.cp_lse_ag_out_rs" in report.patched
    assert (f"{BACKEND}._reduce" in report.patched) == loaded_before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_patch_changes_nothing_and_undoing_it_brings_theirs_back(install: Any, layout: str) -> None:
    package = install(LAYOUTS[layout])
    backend = package.load(BACKEND)
    originals = dict(vars(backend))
    first = vllm.patch()
    patched = dict(vars(backend))
    second = vllm.patch()
    assert first.patched == second.patched
    assert not second.refused
    assert dict(vars(backend)) == patched != originals
    vllm.unpatch()
    assert dict(vars(backend)) == originals
    assert vllm.patch().patched == first.patched


def through_the_engine(group: Any, case: Case, folder: Path, layout: str) -> Any:
    rank = rank_of(group)
    package = Package(folder / str(rank), LAYOUTS[layout])
    try:
        step = package.load(BACKEND).step
        with adapted(group) as coordinator:
            given = case.outs[rank], case.lses[rank], coordinator
            unpatched = str(step(*given))
            vllm.patch()
            merged = step(*given)
            vllm.unpatch()
            return unpatched, merged, str(step(*given))
    finally:
        package.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engines_step_is_merged_by_dcpcomm_while_it_is_patched(
    pool: Any, rng: torch.Generator, tmp_path: Path, layout: str
) -> None:
    case = make_case(rng, 2)
    by_rank = World("gloo_a2a", 2, pool).run(through_the_engine, case, tmp_path, layout)
    judge([merged for _, merged, _ in by_rank], case)
    own = {"0.11": "theirs", "0.16": "t", "0.25": "direct"}[layout]  # 0.16 takes the first of a pair
    assert {(before, after) for before, _, after in by_rank} == {(own, own)}


# ---------------------------------------------------------------- what is left alone


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (RS.replace("ctx=None", "ctx=None, head_major=False"), "it takes head_major, which dcpcomm doesn't know"),
        (RS.replace("cp_attn_lse, cp_group", "cp_group, cp_attn_lse"), r"it takes \(cp_attn_out, cp_group, cp_attn"),
        (RS.replace("base_on_e=True", "base_on_e=False"), "the default of is_lse_base_on_e is another one"),
        ("cp_lse_ag_out_rs = 7\n", "its parameters can't be read"),
        ("raise OSError('no driver')\n", "importing it raised OSError: no driver"),
        ("import not_there\n", "importing it raised ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_what_is_called_otherwise_or_fails_is_left_alone_and_told(install: Any, source: str, reason: str) -> None:
    package = install({"vllm.v1.attention.ops.common": source, "vllm.v1.attention.ops.dcp_alltoall": FIRST_A2A})
    report = vllm.patch()
    (refused,) = report.refused
    assert refused.startswith("vllm.v1.attention.ops.common")
    assert re.search(reason, refused)
    assert report.patched == ["vllm.v1.attention.ops.dcp_alltoall.dcp_a2a_lse_reduce"]
    if "raise" not in source and "import" not in source:
        own = package.load("vllm.v1.attention.ops.common").cp_lse_ag_out_rs
        assert own == 7 or own(0, 1, 2) == "theirs"


def test_a_direct_merge_that_callers_rely_on_is_left_alone(install: Any) -> None:
    relied_on = MANAGER.replace("Workspace | None", "Workspace")
    package = install({"vllm.v1.attention.ops.dcp": "from __future__ import annotations\n" + NEW + relied_on})
    report = vllm.patch()
    (refused,) = report.refused
    assert "get_direct_dcp_a2a_workspace" in refused
    assert "VLLM_USE_DIRECT_DCP_A2A=0" in refused
    assert package.load("vllm.v1.attention.ops.dcp").get_direct_dcp_a2a_workspace(0) is not None


def test_another_release_says_where_was_looked(install: Any) -> None:
    install({"vllm.v1.attention.elsewhere": RS})
    report = vllm.patch()
    assert not report.patched
    assert "none of the modules that are known" in report.refused[0]
    assert "vllm.v1.attention.ops.dcp" in report.refused[0]


def test_an_engine_that_is_not_there_is_told() -> None:
    report = patching.Patch("no_such_engine", ["no_such_engine.ops"], {}).apply()
    assert report.refused == ["no_such_engine isn't installed here"]
    assert "nothing was swapped in" in str(report)


# ---------------------------------------------------------------- entry points


@pytest.mark.parametrize(
    ("engine", "variable", "files"),
    [
        (vllm, "DCPCOMM_VLLM", LAYOUTS["0.16"]),
        (
            sglang,
            "DCPCOMM_SGLANG",
            {
                "sglang.srt.layers.dcp.comm": (
                    "def dcp_a2a_lse_reduce(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e=True, "
                    f"cuda_graph_buffers=None, comm_backend='a2a'):\n{THEIRS}"
                    f"def cp_lse_ag_out_rs_mha(cp_attn_out, cp_attn_lse, cp_group, return_lse=False):\n{THEIRS}"
                    f"def cp_lse_ag_out_rs_mla(cp_attn_out, cp_attn_lse, cp_group, ctx=None):\n{THEIRS}"
                ),
                "sglang.srt.models.forward_mla": "from sglang.srt.layers.dcp.comm import cp_lse_ag_out_rs_mla\n",
            },
        ),
    ],
)
def test_a_plug_in_does_nothing_until_its_variable_says_so(
    install: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: Any,
    variable: str,
    files: dict[str, str],
) -> None:
    package = install(files)
    modules = [package.load(name) for name in files]
    before = [dict(vars(module)) for module in modules]
    for off in (None, "", "0"):
        monkeypatch.delenv(variable, raising=False)
        if off is not None:
            monkeypatch.setenv(variable, off)
        engine.register()
        assert [dict(vars(module)) for module in modules] == before
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(dcpcomm.ConfigError, match=f"{variable} is 'yes'; expected 0 or 1"):
        engine.register()
    monkeypatch.setenv(variable, "1")
    with caplog.at_level(logging.INFO, "dcpcomm"):
        engine.register()
        engine.register()
    for module, was in zip(modules, before, strict=True):
        names = [name for name, value in was.items() if callable(value) and not name.startswith(("__", "step"))]
        assert names
        assert all(getattr(module, name) is not was[name] for name in names)
        # Once: engines load their plug-ins more than once.
        assert all(caplog.text.count(f"swapped in: {module.__name__}.{name}\n") == 1 for name in names)


@pytest.mark.parametrize(
    ("group", "target"),
    [("vllm.general_plugins", vllm.register), ("sglang.srt.plugins", sglang.register)],
)
def test_the_engines_find_the_plug_ins(group: str, target: Any) -> None:
    (found,) = [one for one in importlib.metadata.entry_points(group=group) if one.name == "dcpcomm"]
    assert pkgutil.resolve_name(found.value) is target


@pytest.mark.parametrize(("engine", "adapter"), [("vllm", vllm), ("sglang", sglang)])
def test_the_real_engine_is_patched_whole(engine: str, adapter: Any) -> None:
    pytest.importorskip(engine, reason=f"{engine} isn't installed here: stand-ins are patched instead")
    try:
        report = adapter.patch()
        assert report.patched
        assert not report.refused, report
    finally:
        adapter.unpatch()
