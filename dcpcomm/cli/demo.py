"""`dcpcomm demo`: decode with the KV cache sharded over N ranks, to the very tokens of one that holds it whole."""

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

from dcpcomm.cli.shape import Device, Dtype, on_ranks
from dcpcomm.cli.terminal import stdout_kept_clean

if TYPE_CHECKING:
    from rich.table import Table

    from dcpcomm.demo.judge import Judgement, RankReport, Variant
    from dcpcomm.demo.run import Settings

__all__ = ["MAX_CONTEXT", "demo", "show"]

DEFAULT_RANKS = 4
_KEY = (
    "W_UV turns the latent that attention returns into a head's output. Before the merge it makes what is sent "
    "smaller, but every rank projects all heads. Times in us, the median over steps on the slowest rank: of the layer "
    "whose merge takes longest, and of a whole step; share: of the step, in merges. Sent: bytes of a rank in one "
    "merge. Differs: the largest difference of attention outputs to those of one rank that holds the whole cache; "
    "where partials are shorter than float32, in the first layer, as then others may attend to other entries."
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
        typer.Option(
            help=f"Ranks to shard the KV cache over; {DEFAULT_RANKS}, or those of torchrun. Processes, with a GPU "
            "each; where there are fewer GPUs, threads that share one."
        ),
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
        str,
        typer.Option(
            help="What carries the merges, a name in `dcpcomm list`; auto: dcpcomm's choice; all: each that can."
        ),
    ] = "auto",
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Of the partials. Shorter than float32, rounding chooses other tokens than one rank's; they must be "
            "the same on all ranks, and over all transports that are deterministic."
        ),
    ] = Dtype.float32,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Decode with a small sparse-MLA model, its KV cache sharded over N local ranks.

    The tokens must be those that one rank with the whole cache chooses. On GPUs every decode is made twice: eagerly,
    and with each step the replay of one CUDA graph.

    Exit status: 0 they are, 1 they aren't, 2 wrong usage.
    """
    import torch

    from dcpcomm.demo.judge import judge
    from dcpcomm.demo.run import Settings, run_rank, run_threads
    from dcpcomm.errors import ConfigError
    from dcpcomm.launch import under_torchrun
    from dcpcomm.registry import load_transport

    text, source, left_out = _read(context)
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; expected 1 or more")
    settings = Settings(
        context=text,
        tokens=tokens,
        projection=projection.value,
        transport=None if transport == "auto" else transport,
        dtype=dtype.value,
        device=device,
    )
    size = _world_size(ranks, settings.decoder.num_heads)
    if transport not in ("auto", "all"):
        load_transport(transport)  # says what is wrong with the name before any rank is started

    gpus = 0 if device == "cpu" or under_torchrun() else torch.cuda.device_count()
    threads = 0 < gpus < size
    with _progress(f"starting {_plural(size, threads)}") as on_event, stdout_kept_clean():
        if threads:
            reports: list[RankReport] | None = run_threads(settings, size, on_event)
        else:
            reports = on_ranks(run_rank, size, settings, on_event=on_event)
    if reports is None:  # another rank than 0 under torchrun
        return
    judgement = judge(reports, settings.dtype)
    result = _result(settings, reports, judgement, source, left_out, threads)
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(result)
    if not judgement.passed:
        raise typer.Exit(1)


def _plural(ranks: int, threads: bool) -> str:
    one, more = ("thread on one GPU", "threads on one GPU") if threads else ("process", "processes")
    return f"{ranks} {one if ranks == 1 else more}"


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
    settings: Settings, reports: list[RankReport], judgement: Judgement, source: str, left_out: int, threads: bool
) -> dict[str, Any]:
    """What `--json` prints. A figure that is no finite number is null."""
    from dcpcomm.demo.judge import NEAR_TIE, TOLERANCE
    from dcpcomm.demo.run import prefixes

    first, reference = reports[0], reports[0].reference
    assert reference is not None
    config = settings.decoder
    return {
        "passed": judgement.passed,
        "failures": judgement.failures,
        "ranks": len(reports),
        "ranks_are": "threads on one GPU" if threads else "processes",
        "devices": [report.device for report in reports],
        "model": {
            "layers": config.num_layers,
            "num_heads": config.num_heads,
            "kv_lora_rank": config.kv_lora_rank,
            "v_head_dim": config.v_head_dim,
            "top_k": list(config.top_k),
            "dtype": settings.dtype,
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
                "equal": all(v.tokens[row] == whole for report in reports for v in report.variants),
            }
            for row, (length, mine, whole) in enumerate(
                zip(prefixes(settings.context), first.variants[0].tokens, reference.tokens, strict=True)
            )
        ],
        "empty_pairs": sum(report.empty for report in reports),
        "pairs": sum(report.pairs for report in reports),
        "variants": [_variant(list(same)) for same in zip(*(report.variants for report in reports), strict=True)],
        "skipped": first.skipped,
        "tolerance": TOLERANCE[settings.dtype],
        "near_tie": min(reference.logit_margin, reference.choice_gap) < NEAR_TIE,
        "min_logit_margin": _finite(reference.logit_margin),
        "min_choice_gap": _finite(reference.choice_gap),
        "explain": first.explained.splitlines(),
    }


def _variant(by_rank: list[Variant]) -> dict[str, Any]:
    first = by_rank[0]
    return {
        "transport": first.transport,
        "mode": first.mode,
        "projection": first.projection,
        "merge_median_us": [round(max(us), 1) for us in zip(*(one.merge_us for one in by_rank), strict=True)],
        "step_median_us": round(max(one.step_us for one in by_rank), 1),
        "merge_share": round(max(sum(one.merge_us) / one.step_us for one in by_rank), 3),
        "wire_bytes_per_rank": max(one.wire_bytes for one in by_rank),
        "max_attention_difference": _finite(first.attention_difference),
        "max_logit_difference": _finite(first.logit_difference),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(result: dict[str, Any]) -> None:
    """Print for people what `--json` prints for programs."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    ranks = _plural(result["ranks"], "threads" in result["ranks_are"])
    console.print(f"Sparse-MLA decode, its KV cache sharded over {ranks}, checked by one", style="bold")
    for part in (_facts(result), _generated(result), _variants(result)):
        console.print()
        console.print(part)
    console.print(Padding(_KEY, (0, 2)), style="dim")
    for name, reason in result["skipped"].items():
        console.print(Padding(Text(f"skipped  {name}: {reason}"), (0, 2)), style="dim")
    console.print()
    console.print(_near_ties(result))
    console.print()
    if result["passed"]:
        console.print(Text("PASS  ", "bold green"), _passed(result, ranks), sep="")
    for failure in result["failures"]:
        console.print(Text("FAIL  ", "bold red"), failure, sep="")


def _passed(result: dict[str, Any], ranks: str) -> str:
    if all(request["equal"] for request in result["requests"]):
        return f"{ranks} chose the very tokens of one."
    return f"{ranks} chose the same tokens; {result['model']['dtype']} rounds to others than one chose in float32."


def _facts(result: dict[str, Any]) -> Table:
    from rich.table import Table

    ranks, model, context = result["ranks"], result["model"], result["context"]
    *lengths, last = (str(request["context_bytes"]) for request in result["requests"])
    left_out = f" ({context['bytes_left_out']} more left out)" if context["bytes_left_out"] else ""
    devices = ", ".join(dict.fromkeys(result["devices"]))
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "model",
        f"{model['layers']} layers, {model['num_heads']} heads, random weights; {model['dtype']} partials on {devices}",
    )
    facts.add_row("requests", f"the first {', '.join(lengths)} and {last} bytes of {context['source']}{left_out}")
    facts.add_row("sharding", f"KV entry i lies on rank i mod {ranks}")
    facts.add_row("sparse", f"a layer attends to its best {' or '.join(map(str, model['top_k']))} entries")
    facts.add_row(
        "empty",
        f"in {result['empty_pairs']} of {result['pairs']} cases a rank held none of a row's chosen entries, "
        "and brought NaN to the merge on purpose",
    )
    names = list(dict.fromkeys(str(variant["transport"]) for variant in result["variants"]))
    facts.add_row("merge", f"over {', '.join(names)}" if ranks > 1 else "one rank has nobody to merge with")
    return facts


def _generated(result: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    exact = result["model"]["dtype"] == "float32"
    heading = "generated: noise, being untrained" + (", but the same noise" if exact else "")
    table = Table("context", heading, "same" if exact else "as in float32", box=None, padding=(0, 2))
    table.columns[0].justify = "right"
    table.columns[1].overflow = "fold"
    for request in result["requests"]:
        same = Text("yes", "green") if request["equal"] else Text("NO", "bold red")
        if not exact:
            pairs = list(zip(request["tokens"], request["reference_tokens"], strict=True))
            same = Text(f"{sum(a == b for a, b in pairs)} of {len(pairs)}")
        # Text, because generated bytes may hold brackets, which rich would take for markup.
        table.add_row(f"{request['context_bytes']} B", Text(request["text"]), same)
    return table


def _variants(result: dict[str, Any]) -> Table:
    from rich.table import Table

    variants = result["variants"]
    several = len({(one["transport"], one["mode"]) for one in variants}) > 1
    table = Table(box=None, padding=(0, 1))  # all of it fits in 80 columns, and no name is cut
    for name in ("transport", "mode") if several else ():
        table.add_column(name, no_wrap=True)
    table.add_column("W_UV", no_wrap=True)
    for name in ("merge", "step", "share", "sent", "differs"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in variants:
        table.add_row(
            *((str(one["transport"]), one["mode"]) if several else ()),
            one["projection"],
            f"{max(one['merge_median_us']):,.0f}",
            f"{one['step_median_us']:,.0f}",
            f"{one['merge_share']:.0%}",
            f"{one['wire_bytes_per_rank']:,}",
            _figure(one["max_attention_difference"]),
        )
    return table


def _near_ties(result: dict[str, Any]) -> str:
    """What rounding may do to a token, and how far it was from doing it here."""
    logits, dtype = [one["max_logit_difference"] for one in result["variants"]], result["model"]["dtype"]
    if dtype != "float32":
        pairs = [
            pair for one in result["requests"] for pair in zip(one["tokens"], one["reference_tokens"], strict=True)
        ]
        same = sum(a == b for a, b in pairs)
        return (
            f"Partials are rounded to {dtype}, which now and then chooses other entries and tokens than float32 does: "
            f"{same} of {len(pairs)} tokens are the same here. The ranks must agree with each other all the same, and "
            "so must transports that are deterministic."
        )
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
