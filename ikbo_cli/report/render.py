"""Results on a terminal: tables that also read well when piped. stdout is the result, stderr is progress."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ikbo_cli.results import (
    AnalyzeResult,
    BeforeAfter,
    Cost,
    DoctorResult,
    InputInfo,
    Site,
    TransformResult,
    VerifyResult,
)

PIPED_WIDTH = 120
_COLOURS = {"rewritten": "green", "declined": "yellow", "refused": "red", "unsupported": "red"}


def console() -> Console:
    """The console of stdout; a fixed width where it is piped."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A bar on stderr, gone when the work is done; nothing where stderr is no terminal."""
    err = Console(stderr=True)
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(phase: str, done: int, total: int | None) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield update


def problem(message: str) -> None:
    """A line on stderr."""
    Console(stderr=True, highlight=False).print(f"ikbo: {message}", markup=False)


def heading(command: str) -> None:
    """The command that a result belongs to."""
    console().print(Text(f"\n$ {command}", style="bold cyan"))


def show(result: Any, *, diff: bool = False, out: Console | None = None) -> None:
    """Print any result."""
    target = out or console()
    match result:
        case AnalyzeResult():
            _analyze(target, result)
        case TransformResult():
            _transform(target, result, diff)
        case VerifyResult():
            _verify(target, result)
        case DoctorResult():
            _doctor(target, result)


def _analyze(out: Console, result: AnalyzeResult) -> None:
    work = result.workload
    assumed = " (assumed; --batch and --ratio change it)" if work.assumed else ""
    out.print(Text(f"{result.model.path}", style="bold"), Text(f"{result.model.format}, {work.dtype}", style="dim"))
    out.print(
        f"workload: B={work.batch} candidates, U={work.users} users, ratio {work.ratio:.3g} on {work.device}{assumed}"
    )
    out.print(_input_table("inputs", result.inputs))
    if result.sites:
        out.print(_site_table(result.sites))
    out.print(_totals_table(result.totals, result.balance_flop_per_byte))
    only = result.user_only
    out.print(f"user-side work that now runs once per user: {_si(only.flops)}FLOP, {_us(only.time_us)}")
    never = "never" if result.break_even_ratio is None else f"{result.break_even_ratio:.3g}"
    out.print(
        Text(f"estimated speedup {result.speedup_estimate:.2f}x", style="bold green"),
        f"break-even ratio {never}",
    )
    out.print(_curve_table(result))
    _notes(out, result.notes)


def _transform(out: Console, result: TransformResult, diff: bool) -> None:
    verb = "wrote" if result.written else "would write"
    state = "rewritten" if result.changed else "unchanged in behaviour and speed"
    out.print(Text(f"{verb} {result.output}", style="bold"), f"({state})")
    if result.reason:
        out.print(f"reason: {result.reason}", markup=False)
    sites = (*result.rewritten, *result.declined, *result.refused)
    if sites:
        out.print(_site_table(sites))
    out.print(_input_table("new signature", result.signature))
    out.print(Text(f"estimated speedup {result.speedup_estimate:.2f}x", style="bold green"))
    if result.verify is not None:
        cases = ", ".join(case.name for case in result.verify.cases)
        out.print(f"checked numerically against float64: {'passed' if result.verify.passed else 'FAILED'} ({cases})")
    if diff:
        for title, before, after in result.diff:
            out.print(Text(title, style="bold"))
            for op in before:
                out.print(Text(f"  - {op}", style="red"))
            for op in after:
                out.print(Text(f"  + {op}", style="green"))
    out.print(Text("to run it:", style="bold"))
    for line in result.usage.splitlines():
        out.print(f"    {line}", markup=False)
    _notes(out, result.notes)


def _verify(out: Console, result: VerifyResult) -> None:
    out.print(f"original:  {result.original}\noptimized: {result.optimized}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, title="numerics, against float64", title_justify="left")
    for name in ("case", "B", "U", "error original", "error optimized", "allowed", "result"):
        table.add_column(name, justify="left" if name in ("case", "result") else "right", no_wrap=name != "result")
    for case in result.cases:
        verdict = Text("pass", style="green") if case.passed else Text(f"FAIL {case.reason or ''}", style="bold red")
        table.add_row(
            case.name, str(case.batch), str(case.users), f"{case.rms_original:.2e}", f"{case.rms_optimized:.2e}",
            f"{case.gate:.2e}", verdict,
        )  # fmt: skip
    out.print(table)
    out.print(f"gate: {result.gate}; seed {result.seed}", markup=False)
    if result.not_applicable:
        out.print("not applicable to this form: " + ", ".join(result.not_applicable), markup=False)
    if result.speed:
        speed = Table(box=box.SIMPLE_HEAD, title="speed, interleaved medians", title_justify="left")
        for name in ("mode", "device", "threads", "original", "optimized", "speedup", "estimated", "spread"):
            speed.add_column(name, justify="left" if name in ("mode", "device") else "right")
        for row in result.speed:
            estimate = "" if row.estimated_speedup is None else f"{row.estimated_speedup:.2f}x"
            speed.add_row(
                row.mode, row.device, str(row.threads), _us(row.original_us), _us(row.optimized_us),
                Text(f"{row.speedup:.2f}x", style="bold green" if row.speedup >= 1 else "bold red"), estimate,
                f"{100 * row.spread:.0f} %",
            )  # fmt: skip
        out.print(speed)
    if result.peak_bytes:
        peak = result.peak_bytes
        out.print(f"peak memory of intermediate results: {_si(peak.original, 1024)}B -> {_si(peak.optimized, 1024)}B")
    if result.bisect:
        out.print(f"first site that breaks the result: {result.bisect}", markup=False)
    _notes(out, result.notes)
    if result.passed:
        out.print(Text("passed: nothing changed but the speed", style="bold green"))
    else:
        out.print(Text(f"FAILED: {result.worst}", style="bold red"))


def _doctor(out: Console, result: DoctorResult) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, version in result.versions.items():
        table.add_row(name, version)
    table.add_row("device", result.device)
    for backend in result.backends:
        state = Text("available", style="green") if backend.available else Text("not available", style="yellow")
        table.add_row(f"backend {backend.name}", Text.assemble(state, f": {backend.reason}"))
    out.print(table)


def _input_table(title: str, inputs: tuple[InputInfo, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("name", "shape", "dtype", "side", "known from"):
        table.add_column(name)
    for item in inputs:
        shape = "[" + ", ".join(map(str, item.shape)) + "]"
        table.add_row(Text(item.name), Text(shape), item.dtype, item.side, item.how)
    return table


def _site_table(sites: tuple[Site, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="sites: where user rows meet candidates", title_justify="left")
    for name in ("site", "source", "user rows", "expanded", "bytes", "before", "after", "outcome"):
        table.add_column(name, justify="right" if name in ("bytes", "before", "after") else "left", overflow="fold")
    for site in sites:
        where = site.source or site.node
        module = f"\n{site.module}" if site.module else ""
        what = site.rule or ""
        outcome = Text(f"{what} {site.status}".strip(), style=_COLOURS[site.status])
        outcome.append(f"\n{site.reason or site.kind}", style="dim")
        table.add_row(
            site.id, Text(where + module), _shape(site.user_shape), _shape(site.expanded_shape),
            f"{_si(site.materialized_bytes, 1024)}B", _cost(site.before), _cost(site.after), outcome,
        )  # fmt: skip
    return table


def _totals_table(totals: BeforeAfter, balance: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="whole program", title_justify="left")
    table.add_column("")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    before, after = totals.before, totals.after
    table.add_row("FLOP", _si(before.flops), _si(after.flops))
    table.add_row("bytes moved", _si(before.bytes, 1024) + "B", _si(after.bytes, 1024) + "B")
    intensity = [t.flops / max(t.bytes, 1.0) for t in (before, after)]
    table.add_row(f"FLOP / byte (balance {balance:.0f})", *(f"{value:.1f}" for value in intensity))
    table.add_row("peak memory", _si(before.peak_bytes, 1024) + "B", _si(after.peak_bytes, 1024) + "B")
    table.add_row("estimated time", _us(before.time_us), _us(after.time_us))
    table.add_row("kernels", str(before.kernels), str(after.kernels))
    return table


def _curve_table(result: AnalyzeResult) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="speedup against ratio (estimate)", title_justify="left", show_header=False
    )
    top = max(point.speedup for point in result.curve)
    for point in result.curve:
        length = round(30 * math.log1p(point.speedup) / math.log1p(max(top, 1e-9)))
        colour = "green" if point.speedup >= 1 else "red"
        table.add_row(f"{point.ratio:>6}", Text("█" * max(1, length), style=colour), f"{point.speedup:.2f}x")
    return table


def _notes(out: Console, notes: tuple[str, ...]) -> None:
    for note in notes:
        out.print(f"note: {note}", markup=False)


def _cost(cost: Cost | None) -> str:
    return "" if cost is None else _us(cost.time_us)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def _si(number: float, base: int = 1000) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if number < base:
            return f"{number:.3g} {unit}"
        number /= base
    return f"{number:.3g} P"
