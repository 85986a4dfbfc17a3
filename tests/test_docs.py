"""The documents tell the truth: their code runs, it prints what they say, and what they list is what there is.

A comment before a code block says what becomes of it:

    <!-- run -->              python, run here, in one namespace per page
    <!-- prints -->           what the block before printed; `...` stands for anything, and lines may be wrapped
    <!-- sh -->               commands, run from the repository's root
    <!-- file: NAME -->       a file, or the next piece of one
    <!-- config -->           a configuration that dcpcomm must accept
    <!-- excerpt: FILE -->    lines of a file of this repository, in its order
    <!-- printed by: CMD -->  a part of what a command prints
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

import dcpcomm
from dcpcomm import registry
from dcpcomm.backends.flashinfer_helix import HelixOptions
from dcpcomm.backends.nvshmem_put import NvshmemOptions
from dcpcomm.combine.peer_options import PeerOptions
from dcpcomm.config import MergeConfig
from tests.nursery import Nursery

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUNNABLE = [page for page in PAGES if "<!-- run -->" in page.read_text(encoding="utf-8")]
NAME = {"ids": lambda page: page.name}
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A code block: its mark ("" without one), language, text, and the line it begins at."""

    mark: str
    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["mark"] or "", m["language"], m["text"], text.count("\n", 0, m.start("text")))
        for m in _BLOCK.finditer(text)
    ]


def files_in(page: Path) -> dict[str, str]:
    """Name -> content of the files that a page gives, piece by piece."""
    files: dict[str, str] = defaultdict(str)
    for block in blocks_of(page):
        if block.mark.startswith("file: "):
            files[block.mark.removeprefix("file: ")] += block.text
    return files


def environment(**more: str) -> dict[str, str]:
    """This process's, with the commands of its Python first, and without settings of dcpcomm."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DCPCOMM_")}
    return {**kept, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), **more}


def run(command: str, folder: Path, **more: str) -> str:
    """What a command of the documents prints; it must succeed."""
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment(**more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def registrations() -> Iterator[None]:
    """Take back what a page registers."""
    before = set(registry.registered_transports())
    yield
    for name in set(registry.registered_transports()) - before:
        registry.unregister_transport(name)


@pytest.mark.parametrize("page", RUNNABLE, **NAME)
def test_the_code_prints_what_the_page_says(page: Path, registrations: None) -> None:
    namespace = {"__name__": f"docs.{page.stem}"}
    printed = ""
    for block in blocks_of(page):
        if block.mark == "run":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            printed = out.getvalue()
        elif block.mark == "prints":
            said = f"{page.name}:{block.line}: the page says\n{block.text}\nthe code before it printed\n{printed}"
            assert doctest.OutputChecker().check_output(block.text, printed, _SAME), said


def test_the_example_is_the_one_in_the_readme_and_runs() -> None:
    (name, text), *rest = files_in(ROOT / "README.md").items()
    assert not rest
    assert (ROOT / name).read_text(encoding="utf-8") == text
    (command,) = (block.text for block in blocks_of(ROOT / "README.md") if block.mark == "sh")
    assert name in command
    printed = run(command, ROOT)
    (shown,) = (block.text for block in blocks_of(ROOT / "README.md") if "holds [" in block.text and not block.mark)
    # Two processes share the pipe, and a line and its end may be written apart.
    line = re.compile(r"rank \d holds \[[^]]*\], merged over \[[^]]*\]")
    assert len(line.findall(shown)) == 2
    assert sorted(line.findall(printed)) == sorted(line.findall(shown))


def test_the_commands_on_configuration_work() -> None:
    (block,) = (block for block in blocks_of(ROOT / "docs/configuration.md") if block.mark == "sh")
    check, schema = block.text.splitlines()
    assert "nothing wrong" in run(check, ROOT)
    assert '"watchdog"' in run(schema, ROOT)


MARKED = [(page, block) for page in PAGES for block in blocks_of(page)]
EXCERPTS = [(page, block) for page, block in MARKED if block.mark.startswith("excerpt: ")]
PRINTED = [(page, block) for page, block in MARKED if block.mark.startswith("printed by: ")]


@pytest.mark.parametrize(("page", "block"), EXCERPTS, ids=lambda one: getattr(one, "name", ""))
def test_an_excerpt_is_in_its_file(page: Path, block: Block) -> None:
    lines = iter((ROOT / block.mark.removeprefix("excerpt: ")).read_text(encoding="utf-8").splitlines())
    for line in block.text.splitlines():
        assert line in lines, f"{page.name}: {line!r} is not in that file, or not in this order"


@pytest.mark.parametrize(("page", "block"), PRINTED, ids=lambda one: getattr(one, "name", ""))
def test_a_command_prints_what_the_page_shows(page: Path, block: Block) -> None:
    printed = run(block.mark.removeprefix("printed by: "), ROOT, COLUMNS="100")
    said = f"{page.name}:{block.line}: the command printed\n{printed}"
    assert doctest.OutputChecker().check_output(f"...{block.text.strip()}...", printed, _SAME), said


PLUGIN_PAGE = ROOT / "docs/write-a-transport.md"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Plugin:
    """The transport of docs/write-a-transport.md: its pieces put together, and installed."""
    folder = tmp_path_factory.mktemp("mailbox")
    for name, text in files_in(PLUGIN_PAGE).items():
        (folder / name).write_text(text, encoding="utf-8")
    # As the page's `pip install`, but into a folder of its own, and without a network.
    offline = "--no-deps --no-build-isolation --no-index --disable-pip-version-check --no-cache-dir --quiet"
    run(f"{shlex.quote(sys.executable)} -m pip install {offline} --target site .", folder)
    return Plugin(folder, nursery)


@dataclass(frozen=True)
class Plugin:
    folder: Path
    nursery: Nursery

    def run(self, command: str) -> str:
        return run(command, self.folder, PYTHONPATH=str(self.folder / "site"))

    def pytest(self, *arguments: str) -> str:
        given = environment(PYTHONPATH=str(self.folder / "site"))
        line = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        done = self.nursery.python(*line, environment=given, folder=self.folder).wait()
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def test_the_transport_of_the_page_is_listed(plugin: Plugin) -> None:
    assert re.search(r"mailbox\W+dcp-mailbox 0\.1\W+yes", plugin.run("dcpcomm list"))


@pytest.mark.timeout(300)  # the whole suite, in which some ranks wait for others on purpose
def test_the_transport_of_the_page_conforms(plugin: Plugin) -> None:
    report = plugin.run(_command("dcpcomm conformance"))
    assert "PASS" in report
    assert " 0 failed" in report


def test_the_transport_of_the_page_is_proven(plugin: Plugin) -> None:
    assert re.search(r"mailbox\W+proven", plugin.run(_command("dcpcomm verify")))


def test_the_class_of_the_page_has_a_test_for_each_case(plugin: Plugin) -> None:
    from dcpcomm.testing.conformance import CASES

    collected = plugin.pytest("--collect-only", "test_mailbox.py")
    tests = re.findall(r"TestMailbox::test_conformance\[(.+)-2\]", collected)
    assert tests == [case.name for case in CASES]


def test_the_tests_of_the_page_that_use_the_fixture_pass(plugin: Plugin) -> None:
    assert "2 passed" in plugin.pytest("test_merges.py")


def test_the_transport_of_the_page_carries_a_merge(plugin: Plugin) -> None:
    (expected,) = re.findall(r"It prints, among other lines, `(.*)`", PLUGIN_PAGE.read_text(encoding="utf-8"))
    assert expected in plugin.run(_command("torchrun"))


def _command(start: str) -> str:
    """The one command on the plug-in's page that begins so."""
    lines = [line for b in blocks_of(PLUGIN_PAGE) if b.language == "sh" for line in b.text.splitlines()]
    (command,) = (line for line in lines if line.startswith(start))
    return command


def test_the_readme_has_every_key_with_its_default() -> None:
    (block,) = (block for block in blocks_of(ROOT / "README.md") if block.mark == "config")
    shown = yaml.safe_load(block.text)
    assert MergeConfig(**shown) == MergeConfig()
    assert set(MergeConfig.model_fields) == set(shown)


def test_the_table_of_keys_is_complete() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    defaults = MergeConfig().model_dump(mode="json")
    for key, value in defaults.items():
        parts = {f"{key}.{part}": v for part, v in value.items()} if key in ("verify", "watchdog") else {key: value}
        for name, default in parts.items():
            (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*?) \|", text, re.M)
            shown = yaml.safe_load(re.findall(r"`([^`]*)`", row)[-1])
            assert shown == default, f"{name}: the page says {shown!r}, the default is {default!r}"


@pytest.mark.parametrize(
    ("page", "options"),
    [("cupy_ipc", PeerOptions), ("flashinfer_helix", HelixOptions), ("nvshmem_put", NvshmemOptions)],
)
def test_the_table_of_options_is_complete(page: str, options: type[BaseModel]) -> None:
    text = (ROOT / f"docs/transports/{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.M)
    shown = {name: yaml.safe_load(re.findall(r"`([^`]*)`", row)[-1]) for name, row in rows}
    assert shown == options().model_dump(mode="json")


def test_the_table_of_environment_variables_is_complete() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "dcpcomm").rglob("*.py"))
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    read = set(re.findall(r'"(DCPCOMM_[A-Z_]+)"', sources))
    assert read == set(re.findall(r"^\| `(DCPCOMM_[A-Z_]+)` \|", page, re.M))


def test_the_tables_of_transports_and_commands_are_complete() -> None:
    from dcpcomm.cli import COMMANDS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # What is registered either works, or says what it still waits for.
    said = "works|works on one GPU, two not tried|refused on Hopper"
    here = set(re.findall(rf"^\| `(\w+)` \|.*\| (?:{said}) \|$", text, re.M))
    assert here == {n for n, e in dcpcomm.registered_transports().items() if e.distribution.startswith("dcpcomm ")}
    assert set(re.findall(r"^\| `dcpcomm (\w+)` \|", text, re.M)) == set(COMMANDS)


def test_every_error_is_described() -> None:
    errors = {name for name in dcpcomm.errors.__all__ if name != "DCPCommError"}
    for page in ("README.md", "docs/errors.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert errors == {name for name in errors if re.search(rf"^(\| `{name}` \||## {name}$)", text, re.M)}, page


def test_every_module_has_its_line() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/.]+)` \|", text, re.M))
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "dcpcomm").rglob("*.py")}
    folders = tuple(name for name in named if name.endswith("/"))
    untold = {f for f in files if f not in named and not f.startswith(folders) and not f.endswith(("__main__.py",))}
    assert untold - {"dcpcomm/combine/__init__.py"} == set()
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_capability_is_described() -> None:
    text = (ROOT / "docs/write-a-transport.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", text, re.M)) >= set(dcpcomm.Capabilities.__dataclass_fields__)


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_links_lead_somewhere_and_lines_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    long = [f"{page.name}:{i}" for i, line in enumerate(text.splitlines(), 1) if len(line) > 120]
    assert not long, textwrap.shorten(", ".join(long), 300)
