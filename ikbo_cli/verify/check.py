"""Verification: every ratio case through the gate, then speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.errors import UsageError
from ikbo_cli.program import Program
from ikbo_cli.results import PeakBytes, SpeedResult, VerifyCase, VerifyResult
from ikbo_cli.verify.cases import RatioCase, ratio_cases
from ikbo_cli.verify.gate import POOL, gate_for
from ikbo_cli.verify.graphs import inlined, program_dtype
from ikbo_cli.verify.inputs import InputMaker
from ikbo_cli.verify.measure import CaseRunner
from ikbo_cli.verify.timing import CompileFailed, benchmark, peak_bytes

QUICK_CASES = ("zipf", "U=1", "users without candidates")
QUICK_POOL = 512

Progress = Callable[[str, int, "int | None"], None]


def compare(
    original: fx.GraphModule,
    optimized: fx.GraphModule,
    manifest: Mapping[str, Any] | None,
    cases: Sequence[RatioCase],
    *,
    seed: int = 0,
    pool: int = POOL,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[VerifyCase], str | None]:
    """Compare two programs in cases that fit them (`InputMaker.fit`).

    Args:
        original: The original program.
        optimized: The rewritten program.
        manifest: Of the rewritten file; without one, inputs pair by name.
        cases: Fitted ratio cases.
        seed: Seed of the first draw of every case.
        pool: Elements of every output that are pooled before its error is judged.
        progress: Called with the number of cases done, and of all.

    Returns:
        Results, and the first failure with its output, row and error, or None.

    Raises:
        InvalidInput: inputs do not pair, or valid values cannot be derived.
    """
    gate = gate_for(program_dtype(inlined(original)), rounded=_rounded(manifest))
    runner = CaseRunner(original, optimized, InputMaker(original, optimized, manifest), gate)
    results: list[VerifyCase] = []
    worst = None
    for case in cases:
        result, where = runner.check(case, seed, pool)
        results.append(result)
        if not result.passed and worst is None:
            worst = f"{where} in case {case.name!r}: {result.reason}"
        if progress is not None:
            progress(len(results), len(cases))
    return results, worst


def _rounded(manifest: Mapping[str, Any] | None) -> bool:
    return bool(manifest and manifest.get("rounded_partials"))


def verify_programs(
    original: Program,
    optimized: Program,
    *,
    batch: int | None = None,
    users: int | None = None,
    ratio: float | None = None,
    seed: int = 0,
    trials: int | None = None,
    modes: Sequence[str] = ("eager", "compile"),
    threads: int | None = None,
    time: bool = True,
    progress: Progress | None = None,
    estimated_speedup: float | None = None,
) -> VerifyResult:
    """Compare two loaded programs, and time both.

    Args:
        original: The original.
        optimized: Its rewritten form; its manifest pairs the inputs, and gives the workload that is not given here.
        batch: Candidates.
        users: Users; excludes `ratio`.
        ratio: Candidates a user.
        seed: Seed of the random inputs.
        trials: Timed calls of each program.
        modes: `eager`, `compile`.
        threads: CPU threads of the timing.
        time: Whether to time.
        progress: Called with (phase, done, total).
        estimated_speedup: What the cost model expects, for the report.

    Raises:
        UsageError: no workload is known, or both `users` and `ratio` are given.
        InvalidInput: inputs do not pair, or valid values cannot be derived.
    """
    if users is not None and ratio is not None:
        raise UsageError("--ratio and --users exclude each other", hint="give one of them")
    known = (optimized.manifest or {}).get("workload", {})
    rows = batch if batch is not None else known.get("batch")
    if rows is None:
        raise UsageError("the optimized program carries no workload", hint="give --batch, and --ratio or --users")
    if users is None:
        spread = ratio if ratio is not None else known.get("ratio", rows)
        users = max(1, -int(-rows // spread))
    return verify_modules(
        original.module(),
        optimized.module(),
        optimized.manifest,
        original_path=str(original.path),
        optimized_path=str(optimized.path),
        batch=rows,
        users=users,
        seed=seed,
        trials=trials,
        modes=modes,
        threads=threads,
        timed=time,
        quick=False,
        progress=progress,
        estimated_speedup=estimated_speedup,
    )


def verify_modules(
    original: fx.GraphModule,
    optimized: fx.GraphModule,
    manifest: Mapping[str, Any] | None,
    *,
    original_path: str,
    optimized_path: str,
    batch: int,
    users: int,
    seed: int = 0,
    trials: int | None = None,
    modes: Sequence[str] = ("eager", "compile"),
    threads: int | None = None,
    timed: bool = True,
    quick: bool | None = None,
    progress: Progress | None = None,
    estimated_speedup: float | None = None,
) -> VerifyResult:
    """Compare a program with its rewritten form, both in this process (they may share weights), and time both.

    `quick` is the check that `transform` makes: three cases and smaller pools; it is the default without `timed`.

    Raises:
        InvalidInput: inputs do not pair, or valid values cannot be derived.
    """
    quick = not timed if quick is None else quick
    maker = InputMaker(original, optimized, manifest)
    fitted = {case.name: maker.fit(case) for case in ratio_cases(batch, users)}
    cases = [case for case in fitted.values() if case is not None]
    # A form that cannot express any of the quick cases is checked in those that it can.
    cases = [c for c in cases if not quick or c.name in QUICK_CASES] or cases
    total = len(cases) + (len(modes) if timed else 0)
    checked, worst = compare(
        original,
        optimized,
        manifest,
        cases,
        seed=seed,
        pool=QUICK_POOL if quick else POOL,
        progress=None if progress is None else lambda done, _: progress("verify", done, total),
    )
    speed: list[SpeedResult] = []
    notes: list[str] = []
    peak = None
    if timed and cases:
        case = next((c for c in cases if c.name == "zipf"), cases[0])
        draw = maker.draw(case, seed)
        peak = PeakBytes(peak_bytes(original, draw.original), peak_bytes(optimized, draw.optimized))
        for number, mode in enumerate(modes):
            try:
                speed.append(
                    benchmark(
                        original,
                        optimized,
                        draw.original,
                        draw.optimized,
                        mode=mode,
                        threads=threads or torch.get_num_threads(),
                        batch=case.batch,
                        users=case.users,
                        trials=trials,
                        estimated=estimated_speedup if mode == "eager" else None,
                    )
                )
            except CompileFailed as error:
                notes.append(f"torch.compile failed here, so it was not timed: {error}")
            if progress:
                progress("time", len(cases) + number + 1, total)
    return VerifyResult(
        original=original_path,
        optimized=optimized_path,
        passed=bool(checked) and all(case.passed for case in checked),
        cases=tuple(checked),
        speed=tuple(speed),
        peak_bytes=peak,
        gate=str(gate_for(program_dtype(inlined(original)), rounded=_rounded(manifest))),
        seed=seed,
        worst=worst if checked else "no case can be expressed by this program",
        not_applicable=tuple(name for name, case in fitted.items() if case is None),
        notes=tuple(notes),
    )
