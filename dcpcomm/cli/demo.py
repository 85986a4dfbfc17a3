"""`dcpcomm demo`: decode with the KV cache sharded over N processes, to the very tokens of one process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpcomm.cli.shape import on_ranks
from dcpcomm.cli.terminal import stdout_kept_clean

if TYPE_CHECKING:
    from rich.table import Table

    from dcpcomm.demo.run import Judgement, RankReport, Settings

__all__ = ["MAX_CONTEXT", "demo", "show"]

DEFAULT_RANKS = 4
_KEY = (
    "W_UV turns the latent that attention returns into a head's output. Before the merge it makes what is sent "
    "smaller, but every rank projects all heads. Times: the median of a layer's merges on the slowest rank. Sent: by "
    "a rank in one merge. Difference: the largest of attention outputs to those of one process."
)
#: Bytes of a file that are read: every rank prefills them all, in a time that grows with their square.
MAX_CONTEXT = 8192


class Projection(str, Enum):
    """Where W_UV is applied, relative to the merge."""

    before = "before"
    after = "after"
    auto = "auto"


def demo(
    ranks: Annotated[
        int | None,
        typer.Option(help=f"Processes to shard the KV cache over; {DEFAULT_RANKS}, or those of torchrun."),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(help=f"Text file to continue, its first {MAX_CONTEXT} bytes; default: one of ours."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens (bytes) to generate for each request.")] = 32,
    projection: Annotated[
        Projection,
        typer.Option(help="Project by W_UV before or after the merge; both are shown, this one first."),
    ] = Projection.auto,
    transport: Annotated[
        str, typer.Option(help="What carries the merges, a name in `dcpcomm list`; auto: dcpcomm's choice.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Decode with a small sparse-MLA model, its KV cache sharded over N local processes.

    The tokens must be those that one process with the whole cache chooses.

    Exit status: 0 they are, 1 they aren't, 2 wrong usage.
    """
    from dcpcomm.demo.run import Settings, judge, run_rank
    from dcpcomm.errors import ConfigError
    from dcpcomm.registry import load_transport

    text, source, left_out = _read(context)
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; expected 1 or more")
    settings = Settings(
        context=text,
        tokens=tokens,
        projection=projection.value,
        transport=None if transport == "auto" else transport,
    )
    size = _world_size(ranks, settings.decoder.num_heads)
    if settings.transport is not None:
        load_transport(settings.transport)  # says what is wrong with the name before any process is started

    with _progress(f"starting {size} process" + "es" * (size > 1)) as on_event, stdout_kept_clean():
        reports = on_ranks(run_rank, size, settings, on_event=on_event)
    if reports is None:  # another rank than 0 under torchrun
        return
    judgement = judge(reports)
    result = _result(settings, reports, judgement, source, left_out)
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(result)
    if not judgement.passed:
        raise typer.Exit(1)


def _read(path: Path | None) -> tuple[bytes, str, int]:
    """The text, what to call it, and how many bytes at its end were left out."""
    from dcpcomm.errors import ConfigError

    if path is None:
        path = Path(__file__).parent.parent / "demo" / "context.txt"
        source = "a text that comes with dcpcomm"
    else:
        source = str(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONTEXT)
            left_out = os.fstat(file.fileno()).st_size - len(text)
    except OSError as error:
        raise ConfigError(f"--context {path}: {error.strerror or error}; expected a readable file") from error
    if not text:
        raise ConfigError(f"--context {path} is empty; expected at least one byte to continue")
    return text, source, max(0, left_out)


def _world_size(ranks: int | None, heads: int) -> int:
    from dcpcomm.errors import ConfigError
    from dcpcomm.launch import under_torchrun

    size = DEFAULT_RANKS if ranks is None else ranks
    if under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, size):
            raise ConfigError(f"--ranks is {ranks}, but torchrun started {size}; leave --ranks out")
    if size < 1 or heads % size:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(f"--ranks is {size}; the demo's {heads} heads divide over {divisors} ranks")
    return size


@contextlib.contextmanager
def _progress(first: str) -> Iterator[Callable[[int, Any], None]]:
    """A bar on standard error while the block runs, if that is a terminal; yields what takes events."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # Under torchrun the ranks share one terminal.
    shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(first, total=None)

        def on_event(rank: int, event: tuple[int, int, str]) -> None:
            done, total, what = event
            bar.update(task, completed=done, total=total, description=what)

        yield on_event


def _result(
    settings: Settings, reports: list[RankReport], judgement: Judgement, source: str, left_out: int
) -> dict[str, Any]:
    """What `--json` prints. A figure that is no finite number is null."""
    from dcpcomm.demo.run import NEAR_TIE, TOLERANCE, prefixes

    first, reference = reports[0], reports[0].reference
    assert reference is not None
    config = settings.decoder

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "passed": judgement.passed,
        "failures": judgement.failures,
        "ranks": len(reports),
        "transport": first.transport,
        "model": {
            "layers": config.num_layers,
            "num_heads": config.num_heads,
            "kv_lora_rank": config.kv_lora_rank,
            "v_head_dim": config.v_head_dim,
            "top_k": list(config.top_k),
            "dtype": "float32",
            "device": "cpu",
            "seed": config.seed,
        },
        "context": {"source": source, "bytes": len(settings.context), "bytes_left_out": left_out},
        "interleave": settings.interleave,
        "requests": [
            {
                "context_bytes": length,
                "tokens": mine,
                "text": repr(bytes(mine))[2:-1],
                "reference_tokens": whole,
                "equal": all(o.tokens[row] == whole for report in reports for o in report.orders),
            }
            for row, (length, mine, whole) in enumerate(
                zip(prefixes(settings.context), first.orders[0].tokens, reference.tokens, strict=True)
            )
        ],
        "empty_pairs": sum(report.empty for report in reports),
        "pairs": sum(report.pairs for report in reports),
        "orders": [
            {
                "projection": order.projection,
                "merge_median_us": [
                    round(max(us), 1) for us in zip(*(report.orders[i].merge_us for report in reports), strict=True)
                ],
                "wire_bytes_per_rank": max(report.orders[i].wire_bytes for report in reports),
                "max_attention_difference": finite(order.attention_difference),
                "max_logit_difference": finite(order.logit_difference),
            }
            for i, order in enumerate(first.orders)
        ],
        "tolerance": TOLERANCE,
        "near_tie": min(reference.logit_margin, reference.choice_gap) < NEAR_TIE,
        "min_logit_margin": finite(reference.logit_margin),
        "min_choice_gap": finite(reference.choice_gap),
        "explain": first.explained.splitlines(),
    }


def show(result: dict[str, Any]) -> None:
    """Print for people what `--json` prints for programs."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    ranks = result["ranks"]
    processes = f"{ranks} process" + "es" * (ranks > 1)
    console.print(f"Sparse-MLA decode, its KV cache sharded over {processes}, checked by one process", style="bold")
    for part in (_facts(result), _generated(result), _orders(result)):
        console.print()
        console.print(part)
    console.print(Padding(_KEY, (0, 2)), style="dim")
    console.print()
    console.print(_near_ties(result))
    console.print()
    if result["passed"]:
        console.print(Text("PASS  ", "bold green"), f"{processes} chose the very tokens of one process.", sep="")
    for failure in result["failures"]:
        console.print(Text("FAIL  ", "bold red"), failure, sep="")


def _facts(result: dict[str, Any]) -> Table:
    from rich.table import Table

    ranks, model, context = result["ranks"], result["model"], result["context"]
    *lengths, last = (str(request["context_bytes"]) for request in result["requests"])
    left_out = f" ({context['bytes_left_out']} more left out)" if context["bytes_left_out"] else ""
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "model",
        f"{model['layers']} layers, {model['num_heads']} heads, random weights; {model['dtype']} on {model['device']}",
    )
    facts.add_row("requests", f"the first {', '.join(lengths)} and {last} bytes of {context['source']}{left_out}")
    facts.add_row("sharding", f"KV entry i lies on rank i mod {ranks}")
    facts.add_row("sparse", f"a layer attends to its best {' or '.join(map(str, model['top_k']))} entries")
    facts.add_row(
        "empty",
        f"in {result['empty_pairs']} of {result['pairs']} cases a rank held none of a row's chosen entries, "
        "and brought NaN to the merge on purpose",
    )
    facts.add_row("merge", f"over {result['transport']}" if ranks > 1 else "one rank has nobody to merge with")
    return facts


def _generated(result: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("context", "generated: noise, being untrained, but the same noise", "same", box=None, padding=(0, 2))
    table.columns[0].justify = "right"
    table.columns[1].overflow = "fold"
    for request in result["requests"]:
        same = Text("yes", "green") if request["equal"] else Text("NO", "bold red")
        # Text, because generated bytes may hold brackets, which rich would take for markup.
        table.add_row(f"{request['context_bytes']} B", Text(request["text"]), same)
    return table


def _orders(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    table.add_column("W_UV")
    for name in (*(f"layer {i}" for i in range(result["model"]["layers"])), "sent", "difference"):
        table.add_column(name, justify="right")
    for order in result["orders"]:
        table.add_row(
            f"{order['projection']} merge",
            *(f"{us:,.0f} us" for us in order["merge_median_us"]),
            f"{order['wire_bytes_per_rank']:,} B",
            _figure(order["max_attention_difference"]),
        )
    return table


def _near_ties(result: dict[str, Any]) -> str:
    """What rounding may do to a token, and how far it was from doing it here."""
    logits = [order["max_logit_difference"] for order in result["orders"]]
    closest = f"{_figure(result['min_logit_margin'])} between the two best logits"
    if result["min_choice_gap"] is not None:
        closest += (
            f", {_figure(result['min_choice_gap'])} between the index scores of the last entry chosen and "
            "the first left out"
        )
    told = f"{closest}: near enough for rounding to have had a say." if result["near_tie"] else f"{closest}."
    if not result["passed"]:
        return f"Rounding can change a token only at a near-tie. The closest in this run: {told}"
    return (
        f"Shards sum in another order, so logits differ by rounding, here by {_figure(max(logits))} at most. "
        f"That can change a token only at a near-tie. The closest in this run: {told}"
    )


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"
