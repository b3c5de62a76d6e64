"""The `ikbo` command. Commands parse options, make one library call, render and exit; torch is imported only then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import ikbo_cli
from ikbo_cli.errors import IkboError
from ikbo_cli.results import Declarations, to_json

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Find user-side work that a ranking model repeats per candidate, and run it once per user.",
)

OUR_BUG = 70

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A .pt2 file, written by torch.export.save.")]
UserInputs = Annotated[
    list[str] | None,
    typer.Option("--user-inputs", help="Name or glob of inputs that repeat user rows; repeatable.", metavar="GLOB"),
]
Index = Annotated[str | None, typer.Option("--index", help="An existing input that is the index.", metavar="NAME")]
IndexDtype = Annotated[str, typer.Option("--index-dtype", help="int64 or int32, for an added index.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Candidates in the batch (default 1024).")]
Ratio = Annotated[float | None, typer.Option("--ratio", help="Candidates a user (default 70).")]
Users = Annotated[int | None, typer.Option("--users", help="Users in the batch, instead of a ratio.")]
DeviceName = Annotated[str, typer.Option("--device", help="local, cpu, h100, h200, a100, b200, mi300x.")]
Trust = Annotated[bool, typer.Option("--trust", help="Load files that would execute code.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of random inputs.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"ikbo {ikbo_cli.__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def analyze(
    model: Model,
    user_inputs: UserInputs = None,
    index: Index = None,
    index_dtype: IndexDtype = "int64",
    batch: Batch = None,
    ratio: Ratio = None,
    users: Users = None,
    device: DeviceName = "local",
    max_waste: Annotated[
        float | None,
        typer.Option("--max-waste", help="Exit 1 when more than PCT of the time is avoidable.", metavar="PCT"),
    ] = None,
    trust: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Show where a saved model repeats user-side work, and what it costs."""
    from ikbo_cli import api
    from ikbo_cli.report import render

    with render.progress(quiet=json) as progress:
        result = api.analyze(
            model, declarations=_declarations(user_inputs, index, index_dtype), batch=batch, ratio=ratio, users=users,
            device=device, trust=trust, seed=seed, threads=threads, progress=progress,
        )  # fmt: skip
    _show(result, json)
    if max_waste is not None:
        waste = 100 * (1 - 1 / max(result.speedup_estimate, 1.0))
        if waste > max_waste:
            render.problem(f"{waste:.1f} % of the estimated time is avoidable, more than {max_waste:g} %")
            raise typer.Exit(1)


@app.command()
def transform(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="The .pt2 file to write.", metavar="OUT")],
    user_inputs: UserInputs = None,
    index: Index = None,
    index_dtype: IndexDtype = "int64",
    batch: Batch = None,
    ratio: Ratio = None,
    users: Users = None,
    device: DeviceName = "local",
    backend: Annotated[str, typer.Option("--backend", help="auto, aten (plain PyTorch), triton.")] = "auto",
    policy: Annotated[
        str, typer.Option("--policy", help="fastest declines what is estimated to lose; always rewrites all.")
    ] = "fastest",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Rule or site to rewrite; repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", help="Rule or site to leave alone; repeatable.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show the ops before and after, site by site.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing OUT.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Skip the numeric check.")] = False,
    require_change: Annotated[
        bool, typer.Option("--require-change", help="Exit 1 when nothing could be gained.")
    ] = False,
    trust: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Rewrite a saved model so that user-side work runs once per user."""
    from ikbo_cli import api
    from ikbo_cli.report import render

    with render.progress(quiet=json) as progress:
        result = api.transform(
            model, output, declarations=_declarations(user_inputs, index, index_dtype), batch=batch, ratio=ratio,
            users=users, device=device, trust=trust, seed=seed, threads=threads, backend=backend, policy=policy,
            dry_run=dry_run, only=only or (), skip=skip or (), force=force, check=not no_verify, progress=progress,
        )  # fmt: skip
    _show(result, json, diff=diff)
    if require_change and not result.changed:
        raise typer.Exit(1)


@app.command()
def verify(
    original: Annotated[Path | None, typer.Argument(help="The original; with one path, the optimized file.")] = None,
    optimized: Annotated[Path | None, typer.Argument(help="The optimized file.")] = None,
    batch: Batch = None,
    ratio: Ratio = None,
    users: Users = None,
    device: DeviceName = "local",
    trials: Annotated[int | None, typer.Option("--trials", help="Timed calls of each program.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", help="eager or compile; repeatable (default both).")
    ] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="On failure, name the site that breaks the result.")] = False,
    trust: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Prove that an optimized file computes what its original does, and time both."""
    from ikbo_cli import api
    from ikbo_cli.report import render

    with render.progress(quiet=json) as progress:
        result = api.verify(
            original, optimized, batch=batch, ratio=ratio, users=users, device=device, trust=trust, trials=trials,
            modes=mode or ("eager", "compile"), bisect=bisect, seed=seed, threads=threads, progress=progress,
        )  # fmt: skip
    _show(result, json)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="A rule such as IKB101; none lists them all.")] = None,
) -> None:
    """Explain a rewrite."""
    from ikbo_cli import api

    if code is None:
        for name, title, status in api.rule_codes():
            typer.echo(f"{name}  {title}  ({status})")
    else:
        typer.echo(api.explain(code))


@app.command()
def demo(threads: Threads = None) -> None:
    """Build a ranking model, then analyze, transform and verify it here."""
    import tempfile

    from ikbo_cli import api
    from ikbo_cli.report import render

    with tempfile.TemporaryDirectory() as folder:
        model, fast = Path(folder) / "ranker.pt2", Path(folder) / "fast.pt2"
        declarations = Declarations(user_inputs=("user_*",))
        with render.progress() as progress:
            api.demo_model(model)
            found = api.analyze(model, declarations=declarations, threads=threads, progress=progress)
        render.heading("ikbo analyze ranker.pt2 --user-inputs 'user_*'")
        render.show(found)
        with render.progress() as progress:
            made = api.transform(model, fast, declarations=declarations, threads=threads, progress=progress)
        render.heading("ikbo transform ranker.pt2 -o fast.pt2 --user-inputs 'user_*'")
        render.show(made)
        with render.progress() as progress:
            proof = api.verify(model, fast, modes=("eager",), threads=threads, progress=progress)
        render.heading("ikbo verify ranker.pt2 fast.pt2 --mode eager")
        render.show(proof)
    if not proof.passed:
        raise typer.Exit(1)


@app.command()
def doctor(json: Json = False) -> None:
    """Versions, device, and the kernel backends that can be used here."""
    from ikbo_cli import api

    _show(api.doctor(), json)


def _declarations(user_inputs: list[str] | None, index: str | None, index_dtype: str) -> Declarations:
    return Declarations(tuple(user_inputs or ()), index, index_dtype)


def _show(result: Any, json: bool, **options: Any) -> None:
    if json:
        import json as encoder

        typer.echo(encoder.dumps(to_json(result), indent=1))
    else:
        from ikbo_cli.report import render

        render.show(result, **options)


def main() -> None:
    """Run the command; every error becomes one clear message and an exit code."""
    try:
        app()
    except IkboError as error:
        if os.environ.get("IKBO_DEBUG"):
            raise
        where = f" [{error.source or error.node}]" if error.source or error.node else ""
        print(f"ikbo: {error.message}{where}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("IKBO_DEBUG"):
            raise
        import traceback

        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        print(
            f"ikbo: internal error at {place}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]} "
            "(this is our bug; IKBO_DEBUG=1 shows the traceback)",
            file=sys.stderr,
        )
        sys.exit(OUR_BUG)


if __name__ == "__main__":
    main()
