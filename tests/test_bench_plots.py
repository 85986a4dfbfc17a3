"""Pictures show what was measured: their artists are compared with the recorded results that they are drawn from."""

from __future__ import annotations

import builtins
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpcomm.bench import plots
from dcpcomm.bench.result import Result
from dcpcomm.bench.table import Row
from dcpcomm.bench.timing import Summary
from dcpcomm.errors import ConfigError

RESULTS = Path(__file__).parent.parent / "bench/results"
NAMES = ("merge_h200x2.json", "merge_h200x2_direct.json", "merge_loopback_h200.json", "gloo_merge_cpu.json")


def axes_of(result: Result) -> list[Any]:
    """The pictures of a result, after it was really drawn: what overflows or warns fails here."""
    figure = plots.figure(result)
    figure.draw_without_rendering()
    return list(figure.axes)


def points(axes: Any, label: str) -> list[tuple[float, float]]:
    (line,) = (line for line in axes.get_lines() if line.get_label() == label)
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_every_transport_has_a_line_through_what_was_measured_on_logarithmic_axes(name: str) -> None:
    result = Result.read(RESULTS / name)
    times = axes_of(result)[0]
    assert (times.get_xscale(), times.get_yscale()) == ("log", "log")
    labels = {line.get_label() for line in times.get_lines()}
    dtypes = len({row.dtype for row in result.rows}) > 1
    timed: dict[str, list[tuple[float, float]]] = {}
    for row in result.rows:
        if row.times is not None:
            label = f"{row.transport}, {row.dtype}" if dtypes else row.transport
            timed.setdefault(label, []).append((row.size, row.times.p50))
    limits = {label for label in labels if label.startswith("limit")}
    assert labels - limits == set(timed)
    for label, expected in timed.items():
        assert points(times, label) == sorted(expected)
    shown = {text.get_text() for text in times.get_legend().get_texts()}
    assert shown == labels, "every line is in the legend"


@pytest.mark.parametrize("name", NAMES[:3])
def test_the_limit_is_drawn_in(name: str) -> None:
    result = Result.read(RESULTS / name)
    times = axes_of(result)[0]
    expected = sorted({row.size: row.limit_us for row in result.rows}.items())
    assert points(times, "limit") == [(size, pytest.approx(us)) for size, us in expected]
    low, high = times.get_ylim()
    assert low < min(row.limit_us for row in result.rows) < high


def test_limits_that_were_timed_with_their_cells_are_told_apart() -> None:
    times = axes_of(Result.read(RESULTS / "gloo_merge_cpu.json"))[0]
    assert points(times, "limit, bfloat16") == [(262144, 326.8)]
    assert points(times, "limit, float32") == [(524288, 488.7)]


def test_what_was_wrong_is_named_and_not_drawn() -> None:
    times = axes_of(Result.read(RESULTS / "merge_h200x2.json"))[0]
    assert "not drawn, because wrong: nccl_ag_rs, 7 cells" in times.get_xlabel()
    assert not any("nccl_ag_rs" in str(line.get_label()) for line in times.get_lines())


def row(transport: str, rows: int, dim: int, us: float, mad: float = 0.01, **more: Any) -> Row:
    return Row(rows * dim * 128, rows, 128, dim, "bfloat16", 2, transport, Summary(us, us, mad, 30), 0, 2.0, **more)


def test_the_fastest_merge_of_each_cell_wins() -> None:
    rows = [
        row("a", 1, 128, 10.0), row("b", 1, 128, 12.0), row("c (bare)", 1, 128, 1.0),
        row("a", 4, 128, 10.0, 1.0), row("b", 4, 128, 9.0, 1.0),
        row("a", 1, 512, 30.0), row("b", 1, 512, 15.0),
        row("a", 4, 512, 30.0), replace(row("b", 4, 512, 15.0), times=None, wrong=1),
    ]  # fmt: skip
    found = plots.winners_of(rows)
    assert found[1, 128] == plots.Winner("a", 1.2), "an exchange alone is no merge"
    assert found[4, 128] == plots.Winner("b", 1.0), "within noise"
    assert found[1, 512] == plots.Winner("b", 2.0)
    assert found[4, 512] == plots.Winner("a", None), "what is wrong can't win"
    base = Result.read(RESULTS / "merge_h200x2.json")
    _, winners = axes_of(replace(base, rows=tuple(rows)))
    area = winners.images[0].get_array()
    assert area.tolist() == [[0.0, 1.0], [1.0, 0.0]], "dim upwards, rows to the right, a before b"
    assert [text.get_text() for text in winners.get_xticklabels()] == ["1", "4"]
    assert [text.get_text() for text in winners.get_yticklabels()] == ["128", "512"]
    said = {text.get_position(): text.get_text() for text in winners.texts}
    assert said == {(0, 0): "1.20x", (1, 0): "even", (0, 1): "2.00x", (1, 1): "alone"}
    colours = [patch.get_facecolor()[:3] for patch in winners.get_legend().get_patches()]
    lines = {
        str(line.get_label()): line.get_color()[:3] for line in axes_of(replace(base, rows=tuple(rows)))[0].get_lines()
    }
    assert colours == [lines["a, D=128"], lines["b, D=128"]], "the same colour in both pictures"


def test_a_cell_that_nobody_measured_is_left_blank() -> None:
    rows = (row("a", 1, 128, 1.0), row("b", 1, 128, 2.0), row("a", 4, 256, 2.0), row("b", 4, 256, 1.0))
    _, winners = axes_of(replace(Result.read(RESULTS / NAMES[0]), rows=rows))
    assert winners.images[0].get_array().mask.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    ("name", "winner"), [("merge_h200x2.json", "four_launch_put"), ("merge_h200x2_direct.json", "nccl_a2a")]
)
def test_the_map_of_recorded_results_has_their_winner(name: str, winner: str) -> None:
    result = Result.read(RESULTS / name)
    winners = axes_of(result)[1]
    assert [text.get_text() for text in winners.get_legend().get_texts()] == [winner]
    expected = {row.rows for row in result.rows}
    assert winners.images[0].get_array().shape == (1, len(expected))


def test_with_one_merge_alone_there_is_no_map() -> None:
    assert len(axes_of(Result.read(RESULTS / "gloo_merge_cpu.json"))) == 1


@pytest.mark.filterwarnings("error")
def test_a_sweep_over_everything_gets_a_picture_for_each_of_its_parts(tmp_path: Path) -> None:
    rows = tuple(
        row(name, b, dim, 10.0 + b, projection=projection, empty=empty, skew_us=skew, v_head_dim=64)
        for name in ("a transport with rather a long name", "b")
        for b in (1, 2)
        for dim in (64, 128)
        for projection in ("none", "after")
        for empty in (0.0, 0.5)
        for skew in (0.0, 20.0)
    )
    result = replace(Result.read(RESULTS / NAMES[0]), rows=rows)
    axes = axes_of(result)
    titles = [one.get_title() for one in axes[::2]]
    assert len(axes) == 16, "a part for each of 8, with its map"
    assert "projection after, 50% empty, skew 20 us" in titles
    plots.save(result, tmp_path / "all.png")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_files_are_pictures(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"x.{suffix}"
    plots.save(Result.read(RESULTS / NAMES[2]), file)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert file.read_bytes().startswith(begins[suffix])


def test_a_result_without_rows_has_a_picture_too(tmp_path: Path) -> None:
    plots.save(replace(Result.read(RESULTS / NAMES[0]), rows=()), tmp_path / "empty.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(ConfigError, match=r"pip install 'dcpcomm\[bench\]'"):
        plots.check_plot(tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.png"):
        plots.check_plot(tmp_path / "x.gif")


def test_nothing_but_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **keywords: Any) -> Any:
        assert not name.startswith("matplotlib"), name
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    result = Result.read(RESULTS / NAMES[0])
    assert plots.winners_of(result.rows)
    assert plots.series_of(result.rows)


DOCS = RESULTS.parent.parent / "docs"


def test_every_picture_of_the_docs_is_of_a_committed_result_by_the_command_beside_it() -> None:
    page = (DOCS / "choose-a-transport.md").read_text(encoding="utf-8")
    pictures = sorted(path.stem for path in (DOCS / "plots").glob("*"))
    assert pictures == ["gloo_merge_cpu", "merge_h200x2", "merge_loopback_h200"]
    for name in pictures:
        assert f"](plots/{name}.png)" in page
        assert f"\ndcpcomm bench --from bench/results/{name}.json --plot docs/plots/{name}.png\n" in page
        assert plots.figure(Result.read(RESULTS / f"{name}.json")).axes
