"""The commands as Python calls: the same words, the same results.

`analyze`, `transform` and `verify` return the frozen dataclasses of `ikbo_cli.results`, whose JSON is what the command
line prints. `compact_inputs` builds the inputs of a rewritten program from an expanded batch, and `check_index`
checks an index that operators and written files do not check.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ikbo_cli
from ikbo_cli import program, results
from ikbo_cli.analyze import curve
from ikbo_cli.broadcast import REWRITES, Declared, Refusal, load_rules, walk
from ikbo_cli.cost import Device, get_device
from ikbo_cli.doctor import doctor
from ikbo_cli.errors import InvalidInput, MissingRequirement, NegativeAnswer, OutputExists, UsageError
from ikbo_cli.results import Declarations
from ikbo_cli.transform import emit, plan, workload
from ikbo_cli.verify import find_pair, verify_modules

Progress = Callable[[str, int, "int | None"], None]

__all__ = [
    "Declarations",
    "analyze",
    "check_index",
    "compact_inputs",
    "demo_model",
    "doctor",
    "explain",
    "rule_codes",
    "transform",
    "verify",
]


def analyze(
    model: str | Path,
    *,
    declarations: Declarations | None = None,
    batch: int | None = None,
    ratio: float | None = None,
    users: int | None = None,
    device: str = "local",
    trust: bool = False,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> results.AnalyzeResult:
    """Find the user-side work that a saved model repeats per candidate, and what it costs.

    Args:
        model: Path of a `.pt2` file.
        declarations: Declared user inputs and index.
        batch: Candidates; 1024 if not given.
        ratio: Candidates a user; 70 if neither it nor `users` is given.
        users: Users in the batch.
        device: Device to estimate for.
        trust: Load files that would execute code.
        seed: Unused by the estimate; accepted for symmetry with `transform` and `verify`.
        threads: CPU threads to estimate for.
        progress: Called with (phase, done, total).

    Raises:
        IkboError: the model cannot be read, or a declaration does not fit it.
    """
    del seed
    loaded, declared, wanted, target = _prepare(
        model, declarations, batch, ratio, users, device, trust, threads, progress
    )
    made = plan.make_plan(loaded.module(), declared, wanted, target)
    _report(progress, "estimate", 2, 3)
    points, break_even = curve.speedup_curve(made, wanted, target)
    _report(progress, "estimate", 3, 3)
    return results.AnalyzeResult(
        model=_model_info(loaded),
        workload=_workload(made, wanted, target),
        inputs=_inputs(loaded, made, declared),
        sites=made.sites,
        user_only=plan.user_only(made),
        totals=results.BeforeAfter(plan.totals(made.before), plan.totals(made.after)),
        speedup_estimate=made.speedup,
        break_even_ratio=break_even,
        curve=points,
        unknown_ops=made.walk.unknown_ops,
        balance_flop_per_byte=target.balance(_dtype(made)),
        notes=_notes(made, declared),
    )


def transform(
    model: str | Path,
    output: str | Path,
    *,
    declarations: Declarations | None = None,
    batch: int | None = None,
    ratio: float | None = None,
    users: int | None = None,
    device: str = "local",
    trust: bool = False,
    seed: int = 0,
    threads: int | None = None,
    backend: str = "auto",
    policy: str = "fastest",
    dry_run: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    force: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> results.TransformResult:
    """Rewrite a saved model so that user-side work runs once per user, and save it.

    Args:
        model: Path of a `.pt2` file.
        output: Path of the file to write; never `model` itself.
        declarations: Declared user inputs and index.
        batch: Candidates that decisions are made for.
        ratio: Candidates a user.
        users: Users in the batch.
        device: Device that decisions are made for.
        trust: Load files that would execute code.
        seed: Seed of the numeric check.
        threads: CPU threads to estimate for.
        backend: `aten` or `auto` (which is `aten` on a CPU).
        policy: `fastest` declines what is estimated to lose, `always` rewrites what is valid.
        dry_run: Plan only; write nothing.
        only: Rules or site ids to rewrite.
        skip: Rules or site ids to leave alone.
        force: Overwrite an existing output.
        check: Check the result numerically before it appears.
        progress: Called with (phase, done, total).

    Raises:
        IkboError: the model cannot be read, a declaration does not fit it, or the check fails (nothing is written).
    """
    path = Path(output)
    _check_output(Path(model), path, force=force, dry_run=dry_run)
    if backend == "triton":
        raise MissingRequirement("the triton backend is not available in this version", hint="use --backend aten")
    if backend not in ("auto", "aten"):
        raise UsageError(f"unknown backend {backend!r}", hint="one of: auto, aten, triton")
    if policy not in ("fastest", "always"):
        raise UsageError(f"unknown policy {policy!r}", hint="one of: fastest, always")
    loaded, declared, wanted, target = _prepare(
        model, declarations, batch, ratio, users, device, trust, threads, progress
    )
    original = loaded.module()
    made = plan.make_plan(original, declared, wanted, target, policy=policy, only=only, skip=skip)
    _report(progress, "export", 2, 4)
    manifest = _manifest(loaded, made, declared, wanted, target, path)
    verified = None
    if not dry_run:
        rewritten = made.module is not original
        exported = emit.export_program(original, made.module, made.walk) if rewritten else loaded.exported
        _report(progress, "check", 3, 4)
        if check:
            verified = verify_modules(
                original,
                program.unlifted(exported),
                manifest,
                original_path=str(model),
                optimized_path=str(path),
                batch=made.sizes.concrete(wanted.batch),
                users=wanted.users,
                seed=seed,
                timed=False,
            )
            if not verified.passed:
                raise NegativeAnswer(
                    f"the rewritten program does not agree with the original: {verified.worst}; nothing was written",
                    hint="`--skip` a site, and report this: it is a bug",
                )
        del original
        gc.collect()
        program.save(exported, path, manifest=manifest, force=force)
        _report(progress, "save", 4, 4)
    by_status: dict[str, list[results.Site]] = {"rewritten": [], "declined": [], "refused": []}
    for site in made.sites:
        by_status["refused" if site.status == "unsupported" else site.status].append(site)
    return results.TransformResult(
        model=_model_info(loaded),
        workload=_workload(made, wanted, target),
        output=str(path),
        written=not dry_run,
        changed=made.changed,
        signature=_signature(made),
        rewritten=tuple(by_status["rewritten"]),
        declined=tuple(by_status["declined"]),
        refused=tuple(by_status["refused"]),
        totals=results.BeforeAfter(plan.totals(made.before), plan.totals(made.after)),
        speedup_estimate=made.speedup,
        verify=verified,
        reason=made.reason,
        usage=_usage(path, made, declared),
        diff=_diff(made),
        notes=_notes(made, declared),
    )


def verify(
    original: str | Path | None = None,
    optimized: str | Path | None = None,
    *,
    batch: int | None = None,
    ratio: float | None = None,
    users: int | None = None,
    device: str = "local",
    trust: bool = False,
    trials: int | None = None,
    modes: Sequence[str] = ("eager", "compile"),
    bisect: bool = False,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> results.VerifyResult:
    """Prove that an optimized file computes what its original does, and measure both.

    Args:
        original: The original; None finds it through the manifest of the optimized file.
        optimized: The optimized file; None takes the newest with a manifest in this folder.
        batch: Candidates; the manifest's workload if nothing is given.
        ratio: Candidates a user.
        users: Users in the batch.
        device: `local` or `cpu`.
        trust: Load files that would execute code.
        trials: Timed calls of each program.
        modes: `eager`, `compile`.
        bisect: On failure, name the first site whose rewrite breaks the result.
        seed: Seed of the random inputs.
        threads: CPU threads.
        progress: Called with (phase, done, total).

    Raises:
        IkboError: a file cannot be read, or the two cannot be paired.
    """
    first = Path(original) if original is not None else None
    second = Path(optimized) if optimized is not None else None
    old_path, new_path = find_pair(first, second)
    old, new = program.load(old_path, trust=trust), program.load(new_path, trust=trust)
    manifest = new.manifest
    if manifest and batch is None and ratio is None and users is None:
        batch, users = manifest["workload"]["batch"], manifest["workload"]["users"]
    wanted = workload.wanted_workload(batch, ratio, users)
    estimated = _estimate(old, manifest, wanted, get_device(device, threads))
    outcome = verify_modules(
        old.module(),
        new.module(),
        manifest,
        original_path=str(old_path),
        optimized_path=str(new_path),
        batch=wanted.batch,
        users=wanted.users,
        seed=seed,
        trials=trials,
        modes=modes,
        threads=threads,
        progress=progress,
        estimated_speedup=estimated,
    )
    if bisect and not outcome.passed and manifest:
        outcome = _bisect(old, manifest, outcome, wanted, seed)
    return outcome


def explain(code: str) -> str:
    """The documentation of a rewrite.

    Raises:
        UsageError: no such code.
    """
    load_rules()
    if code not in REWRITES:
        raise UsageError(f"no rule {code!r}", hint="rules: " + ", ".join(sorted(REWRITES)))
    rewrite = REWRITES[code]
    return f"{rewrite.code} {rewrite.name} ({rewrite.status})\n\n{rewrite.doc}"


def rule_codes() -> list[tuple[str, str, str]]:
    """Every rewrite: code, name, status."""
    load_rules()
    return [(r.code, r.name, r.status) for _, r in sorted(REWRITES.items())]


def demo_model(path: str | Path) -> Path:
    """Build the demonstration model: a target-attention ranker whose inputs all have one row per candidate."""
    from ikbo_cli.analyze.demo import export_demo

    torch.export.save(export_demo(), str(path))
    return Path(path)


def compact_inputs(
    batch: Mapping[str, torch.Tensor], manifest: Mapping[str, Any], request_ids: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Turn an expanded batch into the inputs of the rewritten program.

    Args:
        batch: The original's inputs by name; user-side tensors have `B` rows.
        manifest: The `ikbo.json` of the rewritten program.
        request_ids: `[B]`, equal where rows belong to one user. Without it, a user is a run of equal rows.

    Returns:
        The new inputs by name: user-side tensors with `U` rows, the others as they were, and the index `[B]`.

    Raises:
        InvalidInput: an input is missing, or rows of one request differ in a user-side input.
    """
    if manifest["form"] == "graph":
        return dict(batch)
    compact = [item for item in manifest["inputs"] if item["compact"]]
    missing = [item["original"] for item in manifest["inputs"] if item["original"] and item["original"] not in batch]
    if missing:
        raise InvalidInput(f"the batch has no input {', '.join(missing)}", hint="names are the original program's")
    rows = batch[compact[0]["original"]].shape[0]
    if request_ids is None:
        starts = torch.ones(rows, dtype=torch.bool)
        if rows > 1:
            starts[1:] = False
            for item in compact:
                tensor = batch[item["original"]]
                same = (tensor[1:] == tensor[:-1]) | (tensor[1:].isnan() & tensor[:-1].isnan())
                starts[1:] |= ~same.flatten(1).all(1) if tensor.dim() > 1 else ~same
        index = starts.long().cumsum(0) - 1
        first = starts.nonzero().flatten()
    else:
        _, index = torch.unique(request_ids, return_inverse=True)
        users = int(index.max()) + 1 if rows else 0
        first = torch.full((users,), rows, dtype=torch.int64).scatter_reduce(0, index, torch.arange(rows), "amin")
    dtype = getattr(torch, manifest["index"]["dtype"])
    new: dict[str, torch.Tensor] = {}
    for item in manifest["inputs"]:
        if item["side"] == "index" and item["original"] is None:
            new[item["name"]] = index.to(dtype)
        elif item["compact"]:
            tensor = batch[item["original"]]
            new[item["name"]] = tensor[first]
            if not torch.equal(new[item["name"]][index].nan_to_num(), tensor.nan_to_num()):
                raise InvalidInput(f"rows of one request differ in the user-side input {item['name']!r}")
        else:
            new[item["name"]] = batch[item["original"]]
    return new


def check_index(index: torch.Tensor, users: int) -> None:
    """Check that every entry of an index is a user row; operators and written files do not.

    Raises:
        InvalidInput: the dtype is no integer, or an entry is out of range (its row is named).
    """
    if index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
        raise InvalidInput(f"the index must be int32 or int64 of shape [B], not {index.dtype} {tuple(index.shape)}")
    wrong = ((index < 0) | (index >= users)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise InvalidInput(f"index[{row}] is {int(index[row])}, but there are {users} users")


def _prepare(
    model: str | Path,
    declarations: Declarations | None,
    batch: int | None,
    ratio: float | None,
    users: int | None,
    device: str,
    trust: bool,
    threads: int | None,
    progress: Progress | None,
) -> tuple[program.Program, Declared, workload.Wanted, Device]:
    wanted = workload.wanted_workload(batch, ratio, users)
    target = get_device(device, threads)
    _report(progress, "load", 0, None)
    loaded = program.load(model, trust=trust)
    _report(progress, "load", 1, 3)
    return loaded, _declared(loaded, declarations or Declarations()), wanted, target


def _declared(loaded: program.Program, declarations: Declarations) -> Declared:
    names = [item.name for item in loaded.inputs]
    listing = "inputs: " + ", ".join(names)
    chosen: set[str] = set()
    for pattern in declarations.user_inputs:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise UsageError(f"--user-inputs {pattern!r} matches no input", hint=listing)
        chosen.update(found)
    if declarations.index is not None and declarations.index not in names:
        raise UsageError(f"--index {declarations.index!r} is no input", hint=listing)
    if declarations.index_dtype not in ("int64", "int32"):
        raise UsageError("--index-dtype is int64 or int32")
    if len(chosen) == len(names):
        raise UsageError("every input is declared user-side: nothing is left that tells candidates apart", hint=listing)
    return Declared(frozenset(chosen), declarations.index, getattr(torch, declarations.index_dtype))


def _check_output(model: Path, output: Path, *, force: bool, dry_run: bool) -> None:
    if output.suffix != ".pt2":
        raise UsageError(f"the output must end in .pt2, not {output.suffix or 'nothing'!r}")
    if output.exists() and model.exists() and os.path.samefile(output, model):
        raise UsageError(
            "the output is the model itself", hint="choose another path; the original is never overwritten"
        )
    if output.exists() and not force and not dry_run:
        raise OutputExists(f"{output} exists", hint="give --force to overwrite it")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"the folder {output.resolve().parent} does not exist")


def _model_info(loaded: program.Program) -> results.ModelInfo:
    return results.ModelInfo(str(loaded.path), loaded.format, loaded.sha256)


def _dtype(made: plan.Plan) -> torch.dtype:
    for node in made.original.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            return value.dtype
    return torch.float32


def _workload(made: plan.Plan, wanted: workload.Wanted, device: Device) -> results.Workload:
    name = str(_dtype(made)).removeprefix("torch.")
    return results.Workload(wanted.batch, wanted.users, wanted.ratio, device.name, name, wanted.assumed)


def _inputs(loaded: program.Program, made: plan.Plan, declared: Declared) -> tuple[results.InputInfo, ...]:
    sources = {value.source for site in made.walk.sites for value in site.inputs}
    sides = _graph_sides(made)
    found = []
    for item in loaded.inputs:
        if item.name in declared.user_inputs:
            side, how = "user", "declared"
        elif item.name == declared.index:
            side, how = "index", "declared"
        else:
            side, how = sides.get(item.name, "candidate" if sources else "shared"), "graph"
        found.append(
            results.InputInfo(item.name, side, how, item.shape, str(item.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        )
    return tuple(found)


def _graph_sides(made: plan.Plan) -> dict[str, str]:
    """Which inputs the graph itself shows to be user rows or an index."""
    sides: dict[str, str] = {}
    for site in made.walk.sites:
        for value in site.inputs:
            for step in value.map.steps:
                index = getattr(step, "index", None)
                if index is not None and index.op == "placeholder":
                    sides[index.name] = "index"
            for node in _ancestors(value.node):
                sides.setdefault(node.name, "user")
    return sides


def _ancestors(node: torch.fx.Node) -> list[torch.fx.Node]:
    seen, stack, found = {node}, [node], []
    while stack:
        current = stack.pop()
        if current.op == "placeholder":
            found.append(current)
        for other in current.all_input_nodes:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return found


def _signature(made: plan.Plan) -> tuple[results.InputInfo, ...]:
    names = {size: name for name, size in made.walk.hints.items()}
    batch = next((names[s] for item in made.walk.inputs if item.original is None for s in _shape(item.node)), None)
    signature = []
    for item in made.walk.inputs:
        value = item.node.meta["val"]
        if not isinstance(value, torch.Tensor):
            continue
        shape = tuple("B" if names.get(s) == batch and batch else names.get(s, s) for s in value.shape)
        side = "index" if item.original is None else "user" if item.compact else "candidate"
        how = "declared" if item.compact or item.original is None else "graph"
        dtype = str(value.dtype).removeprefix("torch.")
        signature.append(results.InputInfo(item.node.name, side, how, shape, dtype))  # type: ignore[arg-type]
    return tuple(signature)


def _shape(node: torch.fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def _manifest(
    loaded: program.Program,
    made: plan.Plan,
    declared: Declared,
    wanted: workload.Wanted,
    device: Device,
    output: Path,
) -> dict[str, Any]:
    assert loaded.path is not None
    index = next((item for item in made.walk.inputs if item.original is None), None)
    name = index.node.name if index else declared.index
    return {
        "schema_version": results.SCHEMA_VERSION,
        "tool_version": ikbo_cli.__version__,
        "torch_version": torch.__version__,
        "original": {
            "path": os.path.relpath(loaded.path.resolve(), output.resolve().parent),
            "sha256": loaded.sha256,
        },
        "workload": results.to_json(_workload(made, wanted, device)),
        "changed": made.changed,
        "form": "declared" if declared.user_inputs else "graph",
        "inputs": [
            {
                "name": item.node.name,
                "side": "index" if item.node.name == name else "user" if item.compact else "candidate",
                "how": "declared" if item.compact or item.original is None else "graph",
                "original": item.original,
                "compact": item.compact,
            }
            for item in made.walk.inputs
        ],
        "index": {"name": name, "dtype": str(declared.index_dtype).removeprefix("torch.")} if name else None,
        "rewritten": [results.to_json(site) for site in made.sites if site.status == "rewritten"],
        "refused": [results.to_json(site) for site in made.sites if site.status != "rewritten"],
        "rounded_partials": made.walk.rounded_partials,
        "estimate": {"before_us": made.before.time_us, "after_us": made.after.time_us},
    }


def _usage(path: Path, made: plan.Plan, declared: Declared) -> str:
    lines = ["import torch", f'program = torch.export.load("{path.name}").module()']
    names = [item.node.name for item in made.walk.inputs]
    if declared.user_inputs:
        lines = [
            "from ikbo_cli.api import compact_inputs",
            "from ikbo_cli.program import read_manifest",
            *lines,
            "# batch: the original's inputs by name, one row per candidate",
            f'inputs = compact_inputs(batch, read_manifest("{path.name}"))',
            "scores = program(**inputs)",
        ]
    else:
        lines.append(f"scores = program({', '.join(names)})  # the same call as before")
    return "\n".join(lines)


def _diff(made: plan.Plan) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    nodes = {node.name: node for node in made.original.graph.nodes}
    rows = []
    for site, record in zip(made.sites, made.walk.sites, strict=False):
        if site.status != "rewritten" or record.origin not in nodes:
            continue
        node = nodes[record.origin]
        before = tuple(str(n.target) for n in [*node.all_input_nodes, node] if n.op == "call_function")
        rows.append((f"{site.id} {site.rule}", before, tuple(str(n.target) for n in record.emitted)))
    return tuple(rows)


def _notes(made: plan.Plan, declared: Declared) -> tuple[str, ...]:
    notes = []
    for position, compact in enumerate(made.walk.outputs_compact):
        if compact:
            notes.append(f"output {position} depends on the user alone; it keeps its row per candidate")
    if made.walk.unknown_ops:
        listed = ", ".join(f"{op} ({count})" for op, count in made.walk.unknown_ops.items())
        notes.append(f"no rule for: {listed}; their inputs are expanded there, which is always right")
    if not made.sites and not declared.user_inputs:
        notes.append(
            "no repeated user rows were found in the graph; if the inputs themselves repeat them, name these with "
            "--user-inputs"
        )
    return tuple(notes)


def _estimate(
    old: program.Program, manifest: Mapping[str, Any] | None, wanted: workload.Wanted, device: Device
) -> float | None:
    if not manifest or not manifest.get("changed"):
        return None
    declared = _declared_from(manifest)
    return plan.make_plan(old.module(), declared, wanted, device, skip=()).speedup


def _declared_from(manifest: Mapping[str, Any]) -> Declared:
    users = frozenset(item["original"] for item in manifest["inputs"] if item["compact"])
    added = any(item["original"] is None for item in manifest["inputs"])
    index = manifest["index"]["name"] if manifest.get("index") and not added else None
    dtype = getattr(torch, manifest["index"]["dtype"]) if manifest.get("index") else torch.int64
    return Declared(users, index, dtype)


def _bisect(
    old: program.Program,
    manifest: Mapping[str, Any],
    outcome: results.VerifyResult,
    wanted: workload.Wanted,
    seed: int,
) -> results.VerifyResult:
    original, declared = old.module(), _declared_from(manifest)
    sites = [site["node"] for site in manifest["rewritten"]]
    names = {site["node"]: site["id"] for site in manifest["rewritten"]}
    for count in range(1, len(sites) + 1):
        active = set(sites[:count])
        outcome_of = walk(original, declared, _only(active))
        module = emit.build_module(original, outcome_of)
        trial = verify_modules(
            original, module, dict(manifest), original_path="", optimized_path="", batch=wanted.batch,
            users=wanted.users, seed=seed, timed=False,
        )  # fmt: skip
        if not trial.passed:
            return dataclasses.replace(outcome, bisect=f"{names[sites[count - 1]]} ({sites[count - 1]})")
    return dataclasses.replace(
        outcome,
        bisect="every rewrite alone passes when made again from the original: the file was changed later",
    )


def _only(active: set[str]) -> Callable[[str, str], Refusal | None]:
    return lambda code, origin: None if origin in active else Refusal("not part of this trial")


def _report(progress: Progress | None, phase: str, done: int, total: int | None) -> None:
    if progress is not None:
        progress(phase, done, total)
