"""Cases about where rows arrive: every row, every head, every width, every slice at its rank."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcpcomm.testing.conformance.case import Case, NotHere
from dcpcomm.testing.conformance.judging import JudgedBy, judge_script
from dcpcomm.testing.conformance.partials import LAYOUTS, Partials
from dcpcomm.testing.conformance.rank import Call, Played, Rank, Script, play
from dcpcomm.testing.conformance.scene import Scene

__all__ = ["ROWS"]

#: 36 pads the row to 16 bytes; 80, 96 and 576 straddle warps and 128-byte lines.
WIDTHS = (36, 64, 80, 96, 128, 576)


def construct(at: Rank) -> list[str]:
    with at.merger(at.scene.shape()) as merger:
        return merger.transports


def judge_construct(scene: Scene, got: list[Any]) -> None:
    for rank, names in enumerate(got):
        assert names == [scene.transport], f"rank {rank}: the merger took {names}, expected [{scene.transport!r}]"


def numbered_heads(scene: Scene) -> Script:
    """`out[b, h, :] = h + step * source`, equal LSEs. The step is what small dtypes hold exactly."""
    shape = scene.shape()
    step = 1000.0 if scene.dtype == torch.float32 else 8.0
    heads = torch.arange(shape.num_heads, dtype=torch.float32).view(1, 1, -1, 1)
    sources = step * torch.arange(scene.n, dtype=torch.float32).view(-1, 1, 1, 1)
    outs = (heads + sources).expand(-1, 5, -1, shape.head_dim).to(scene.dtype).contiguous()
    return Script(shape, (Call(Partials(outs, torch.zeros(outs.shape[:3]), "e")),))


def judge_numbered_heads(scene: Scene, got: list[Any]) -> None:
    partials = numbered_heads(scene).calls[0].partials
    wanted = partials.merged("heads")[0]
    for rank, ((out, _),) in enumerate(got):
        for j in range(out.shape[1]):
            off = (out[:, j].double() - wanted[rank][:, j]).abs().max().item()
            shift = float(out[0, j, 0]) - float(wanted[rank][0, j, 0])
            assert off < 0.25, (
                f"rank {rank}: its head {j}, head {rank * out.shape[1] + j} of the group, is off by {off:g}: as far as "
                f"if head {rank * out.shape[1] + j + shift:g} had come in its place (or another rank's rows)"
            )


def fresh(scene: Scene) -> Script:
    shape, rng = scene.shape(), scene.generator()
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in (4, 3)))


def in_given_order(at: Rank) -> Any:
    if isinstance(at.group, dist.ProcessGroup) and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise NotHere("this torch always sorts the ranks of a group")
    return play(at, fresh(at.scene))


def row_counts(scene: Scene) -> Script:
    shape, rng = scene.shape(), scene.generator()
    sizes = (1, 2, 7, shape.max_tokens - 1, shape.max_tokens)
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in sizes))


def varying_rows(scene: Scene) -> Script:
    shape, rng = scene.shape(num_heads=scene.n), scene.generator()
    sizes = [1, shape.max_tokens, 2, 7, shape.max_tokens - 1, 1, 3]
    return Script(shape, tuple(Call(scene.partials(rng, b, shape), tag=i) for i, b in enumerate(sizes)))


def chunks(scene: Scene) -> Script:
    """More rows than one exchange carries; counts must be cut like the rows."""
    shape, rng = scene.shape(max_tokens=6), scene.generator()
    calls = []
    for b in (7, 15, 6, 25):
        partials = scene.partials(rng, b, shape)
        partials.counts = torch.randint(0, 3, (scene.n, b), generator=rng)
        calls.append(Call(partials))
    return Script(shape, tuple(calls))


def width(d: int, scene: Scene) -> Script:
    shape, rng = scene.shape(head_dim=d, dtype=_narrowest(scene)), scene.generator()
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in (1, 9, shape.max_tokens, 4)))


def scattered(scatter: str, scene: Scene) -> Script:
    shape, rng = scene.shape(scatter=scatter, max_tokens=4 * scene.n), scene.generator()
    sizes = (scene.n, 4 * scene.n, 3 * scene.n, 9 * scene.n)
    return Script(shape, tuple(Call(scene.partials(rng, b, shape)) for b in sizes))


def layouts(scene: Scene) -> Script:
    """Each layout meets each other one on another rank, for partials and LSE apart."""
    shape, rng = scene.shape(dtype=_narrowest(scene)), scene.generator()
    names = list(LAYOUTS)
    calls = []
    for i in range(len(names)):
        partials = scene.partials(rng, 5, shape)
        rolled = (*names[i:], *names[:i])
        calls.append(Call(partials, layouts=rolled, lse_layouts=(*rolled[2:], *rolled[:2])))
    return Script(shape, tuple(calls))


def _narrowest(scene: Scene) -> torch.dtype:
    """Two bytes where they are carried: then alignment matters most."""
    return min(scene.capabilities.dtypes, key=lambda dtype: dtype.itemsize)


def _scripted(name: str, proves: str, script: Any) -> Case:
    return Case(name=name, proves=proves, rank_function=Played(script), judge=JudgedBy(script))


def judge_in_order(scene: Scene, got: list[Any]) -> None:
    judge_script(scene, fresh(scene), got)


ROWS: tuple[Case, ...] = (
    Case(
        name="constructs",
        proves="all ranks agree on the transport, connect it, and it passes its verification",
        rank_function=construct,
        judge=judge_construct,
    ),
    Case(
        name="heads-in-order",
        proves="each rank gets its own heads, in order, from every source: no permutation of heads or ranks",
        rank_function=Played(numbered_heads),
        judge=judge_numbered_heads,
    ),
    Case(
        name="slices-by-group-rank",
        proves="slice r goes to group rank r where the group's global ranks are not in order",
        rank_function=in_given_order,
        judge=judge_in_order,
        reordered=True,
    ),
    _scripted("every-row", "all rows arrive, the last one too: B of 1, 2, odd, and up to max_tokens", row_counts),
    _scripted(
        "rows-vary", "B may change from call to call: nothing is kept from a larger or smaller one", varying_rows
    ),
    _scripted("more-than-max-tokens", "B > max_tokens runs in chunks, its valid counts cut alike", chunks),
    *(
        _scripted(f"width-{d}", f"rows of {d} elements are whole: strides, padding, rows that straddle lines", script)
        for d in WIDTHS
        for script in (partial(width, d),)
    ),
    *(
        _scripted(f"scatter-{scatter}", f'scatter="{scatter}": {what}', script)
        for scatter, what in (
            ("heads", "rank r gets its heads of all rows"),
            ("tokens", "rank r gets its rows, all heads"),
            ("none", "every rank gets everything"),
        )
        for script in (partial(scattered, scatter),)
    ),
    _scripted("layouts", "any strides and offsets of partials and LSE, other ones on each rank, same answer", layouts),
)
