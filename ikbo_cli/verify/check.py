"""Verification: every ratio case through the gate, then speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ikbo_cli.results import PeakBytes, SpeedResult, VerifyCase, VerifyResult
from ikbo_cli.verify.benchmark import benchmark, peak_bytes
from ikbo_cli.verify.cases import RatioCase, ratio_cases
from ikbo_cli.verify.compare import POOL, Gate, Outcome, compare_output, equivalence, gate_for
from ikbo_cli.verify.inputs import InputMaker
from ikbo_cli.verify.reference import has_selections, record_selections, run_reference

MAX_DRAWS = 64
QUICK_CASES = ("zipf", "U=1", "users without candidates")
QUICK_POOL = 512


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
    progress: Callable[[str, int, int | None], None] | None = None,
    estimated_speedup: float | None = None,
) -> VerifyResult:
    """Compare a program with its rewritten form, and time both.

    Without `timed` it is the quick check that `transform` makes: three cases, smaller pools, no timing.
    """
    maker = InputMaker(original, optimized, manifest)
    gate = gate_for(program_dtype(original), rounded=bool(manifest and manifest.get("rounded_partials")))
    cases = [c for c in ratio_cases(batch, users) if timed or c.name in QUICK_CASES]
    applicable = [c for c in cases if maker.applicable(c)]
    total = len(applicable) + (len(modes) if timed else 0)
    done = 0
    checked: list[VerifyCase] = []
    worst: str | None = None
    for case in applicable:
        outcome, where = _check_case(maker, original, optimized, case, gate, seed, POOL if timed else QUICK_POOL)
        checked.append(
            VerifyCase(
                case.name,
                case.batch,
                case.users,
                outcome.passed,
                outcome.allowed,
                outcome.rms_original,
                outcome.rms_optimized,
                outcome.max_abs,
                0,
                outcome.reason,
            )
        )
        if not outcome.passed and worst is None:
            worst = f"{where} in case {case.name!r}: {outcome.reason}"
        done += 1
        if progress:
            progress("verify", done, total)
    speed: list[SpeedResult] = []
    notes: list[str] = []
    peak = None
    if timed and applicable:
        case = next((c for c in applicable if c.name == "zipf"), applicable[0])
        draw = maker.draw(case, seed)
        peak = PeakBytes(peak_bytes(original, draw.original), peak_bytes(optimized, draw.optimized))
        for mode in modes:
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
            except Exception as error:
                if mode == "eager":
                    raise
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                notes.append(f"torch.compile failed here, so it was not timed: {first[:200]}")
            done += 1
            if progress:
                progress("time", done, total)
    return VerifyResult(
        original=original_path,
        optimized=optimized_path,
        passed=bool(checked) and all(case.passed for case in checked),
        cases=tuple(checked),
        speed=tuple(speed),
        peak_bytes=peak,
        gate=str(gate),
        seed=seed,
        worst=worst if checked else "no case can be expressed by this program",
        not_applicable=tuple(c.name for c in cases if c not in applicable),
        notes=tuple(notes),
    )


def _check_case(
    maker: InputMaker,
    original: fx.GraphModule,
    optimized: fx.GraphModule,
    case: RatioCase,
    gate: Gate,
    seed: int,
    pool: int,
) -> tuple[Outcome, str]:
    """Pool draws of one case until every output is large enough; the worst output and its name."""
    references: list[list[torch.Tensor]] = []
    firsts: list[list[torch.Tensor]] = []
    seconds: list[list[torch.Tensor]] = []
    second_references: list[list[torch.Tensor]] = []
    selective = has_selections(original) or has_selections(optimized)
    for number in range(MAX_DRAWS):
        draw = maker.draw(case, seed + number)
        first, second = _run(original, draw.original), _run(optimized, draw.optimized)
        if selective:
            # Selections are discontinuous: the programs must agree in float64, and each is then held to a float64
            # run that makes its own choices.
            reason = equivalence(run_reference(original, draw.original), run_reference(optimized, draw.optimized))
            if reason is not None:
                return Outcome(False, 0.0, 0.0, float("inf"), float("inf"), reason), "a float64 run"
            reference = run_reference(original, draw.original, record_selections(original, draw.original))
            second_references.append(
                run_reference(optimized, draw.optimized, record_selections(optimized, draw.optimized))
            )
        else:
            reference = run_reference(original, draw.original)
        references.append(reference)
        firsts.append(first)
        seconds.append(second)
        floats = [t for t in first if t.dtype.is_floating_point]
        smallest = min((t.numel() for t in floats), default=pool)
        if smallest * (number + 1) >= pool:
            break
    worst: tuple[Outcome, str] | None = None
    for position in range(len(firsts[0])):
        outcome = compare_output(
            [r[position] for r in references],
            [a[position] for a in firsts],
            [b[position] for b in seconds],
            gate,
        )
        if selective and firsts[0][position].dtype.is_floating_point:
            outcome = _own_reference(
                [r[position] for r in references], [r[position] for r in second_references],
                [a[position] for a in firsts], [b[position] for b in seconds], gate,
            )  # fmt: skip
        if (worst is None or (worst[0].passed and not outcome.passed) or _badness(outcome) > _badness(worst[0])) and (
            worst is None or worst[0].passed or not outcome.passed
        ):
            worst = (outcome, f"output {position}")
    assert worst is not None
    return worst


def _own_reference(
    first_truth: list[torch.Tensor], second_truth: list[torch.Tensor], firsts: list[torch.Tensor],
    seconds: list[torch.Tensor], gate: Gate,
) -> Outcome:  # fmt: skip
    """The gate where each program has a reference of its own: errors are compared, not values."""
    shifted = [s.double() - t + r for s, t, r in zip(seconds, second_truth, first_truth, strict=True)]
    return compare_output(first_truth, [f.double() for f in firsts], shifted, gate)


def _badness(outcome: Outcome) -> float:
    return outcome.rms_optimized / outcome.allowed if outcome.allowed else float(not outcome.passed)


def _run(module: fx.GraphModule, args: Sequence[Any]) -> list[torch.Tensor]:
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.no_grad():
        result = fx.Interpreter(module).run(*copies, enable_io_processing=False)
    return list(pytree.tree_leaves(result))


def program_dtype(module: fx.GraphModule) -> torch.dtype:
    """The dtype a program computes in: that of its floating-point outputs."""
    for node in module.graph.nodes:
        if node.op == "output":
            for value in pytree.tree_leaves(node.args):
                dtype = getattr(value.meta.get("val"), "dtype", None) if isinstance(value, fx.Node) else None
                if dtype is not None and dtype.is_floating_point:
                    return dtype
    return torch.float32
