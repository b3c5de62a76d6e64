"""Time the kernels on the local GPU beside what models run today; every result is checked before it is timed.

    python benchmarks/kernels.py [attention|lce|linear|din|dot|group ...] [--explore] [--json FILE]

Times are medians over CUDA graph replays with the L2 cache flushed before each (`triton.testing.do_bench`);
ratios compare lines of one run. Random data, uneven ratios, unsorted index. `--explore` times every configuration
listed here instead of the shipped choice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ikbo_cli import kernels
from ikbo_cli.kernels.din_unit.configs import DinConfig
from ikbo_cli.kernels.dot_interaction.configs import DotConfig
from ikbo_cli.kernels.lce.configs import LceConfig
from ikbo_cli.kernels.linear.configs import LinearConfig
from ikbo_cli.kernels.shared.forms import form_of
from ikbo_cli.kernels.target_attention.configs import AttentionConfig

BF16, FP16 = torch.bfloat16, torch.float16
RESULTS: list[dict[str, Any]] = []
COMPILE_ONLY = False


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def uneven_index(batch: int, users: int) -> Tensor:
    """Unsorted index; a user's candidates vary by up to +-85 % around the mean."""
    weights = torch.rand(users) * 1.7 + 0.15
    index = torch.multinomial(weights, batch, replacement=True)
    index[:users] = torch.arange(users)
    return index[torch.randperm(batch)].cuda()


def microseconds(run: Callable[[], object]) -> float:
    """Median time of a graph replay, L2 flushed, in microseconds."""
    run()
    torch.cuda.synchronize()
    if COMPILE_ONLY:
        return 1.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1000 * triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")


def record(
    group: str,
    name: str,
    run: Callable[[], Any],
    truth: Any = None,
    flops: float = 0.0,
    limit: float = 1.3e-2,
) -> float:
    """Check a version against the truth (relative RMS error, within `limit`), time it and print a line."""
    error = 0.0
    try:
        got = run()
        if truth is not None:
            pairs = zip(got, truth, strict=True) if isinstance(got, tuple) else [(got, truth)]
            error = max(float((g.double() - t.double()).norm() / t.double().norm()) for g, t in pairs)
            if not error <= limit:
                raise AssertionError(f"wrong result: relative error {error:.2e}")
        time_us = microseconds(run)
    except Exception as failure:  # a configuration that does not fit the device is a line of the table
        print(f"{group:26s} {name:62s} FAILED {str(failure).splitlines()[0][:90]}", flush=True)
        RESULTS.append({"group": group, "name": name, "failed": str(failure)[:300]})
        return float("nan")
    rate = flops / time_us / 1e6
    RESULTS.append({"group": group, "name": name, "time_us": time_us, "tflops": rate, "rms_error": error})
    rate_text = f"{rate:7.1f} TF" if flops else ""
    print(f"{group:26s} {name:62s} {time_us:9.2f} us {rate_text:10s} err {error:.1e}", flush=True)
    return time_us


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True)


def attention(explore: bool) -> None:
    heads, head, batch, users = 2, 128, 2048, 32
    settings = [(64, 1024), (64, 2048), (8, 1024), (1, 1024)]
    for steps, keys in settings[:1] + settings[2:] if explore else settings:
        group = f"attention S={steps} L={keys}"
        flops = 4.0 * batch * steps * heads * keys * head
        q, k, v = (
            randn(batch, steps, heads, head),
            randn(users, keys, heads, head),
            randn(users, keys, heads, head),
        )
        index = uneven_index(batch, users)
        order, offsets = kernels.group_candidates(index, users)
        folded = [t.transpose(1, 2) for t in (q.reshape(users, -1, heads, head), k, v)]

        def cudnn(folded: list[Tensor] = folded) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(*folded)

        def flash(q: Tensor = q, k: Tensor = k, v: Tensor = v, index: Tensor = index) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                moved = (t.transpose(1, 2) for t in (q, k[index], v[index]))
                return functional.scaled_dot_product_attention(*moved).transpose(1, 2)

        record(group, "cuDNN folded, even twin", cudnn, flops=flops)
        truth = kernels.broadcast_target_attention(q.float(), k.float(), v.float(), index, order, offsets, form="aten")
        if not explore:
            record(group, "SDPA flash with broadcast", flash, truth, flops)
        forms = ["auto"]
        if explore:
            tiles = [
                (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
                (128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 32, 8, 4), (64, 32, 4, 4),
            ]  # fmt: skip
            spans: tuple[int, ...] = (0,)
            if steps == 8:
                spans = (0, 512)
            elif steps == 1:
                tiles = [
                    (64, 64, 4, 3),
                    (64, 64, 4, 2),
                    (64, 32, 4, 4),
                    (128, 64, 8, 3),
                    (32, 64, 4, 3),
                    (64, 128, 4, 2),
                ]
                spans = (128, 256, 512)
            forms = [form_of(AttentionConfig(*tile, span)) for tile in tiles for span in spans]
        for form in forms:

            def run(form: str = form) -> Tensor:
                return kernels.broadcast_target_attention(q, k, v, index, order, offsets, form=form)

            record(group, form, run, truth, flops)


def group_bench(explore: bool) -> None:
    for batch, users in ((1024, 15), (4096, 59), (4096, 4096), (8192, 118), (16_384, 235), (65_536, 937)):
        index = uneven_index(batch, users)
        record(f"group B={batch} U={users}", "auto", lambda i=index, u=users: kernels.group_candidates(i, u))
        record(f"group B={batch} U={users}", "torch.sort", lambda i=index: torch.sort(i, stable=True))


def lce(explore: bool) -> None:
    rows, columns, user_depth, cand_depth = 433, 256, 1178, 866
    for batch, ratio in ((1024, 70),) if explore else ((1024, 70), (256, 70), (4096, 70), (1024, 10), (4096, 10_000)):
        users = max(1, -(-batch // ratio))
        group = f"lce B={batch} ratio={ratio}"
        flops = 2.0 * rows * columns * (batch * cand_depth + users * user_depth)
        e_cand = randn(batch, cand_depth, columns, dtype=FP16)
        e_user = randn(users, user_depth, columns, dtype=FP16)
        # weights as `transform` leaves them: rows padded to 16-byte multiples
        w_cand = functional.pad(randn(rows, cand_depth, dtype=FP16, scale=0.03), (0, 6))
        w_user = functional.pad(randn(rows, user_depth, dtype=FP16, scale=0.03), (0, 6))
        index = uneven_index(batch, users)
        narrow = (w_cand[:, :cand_depth], w_user[:, :user_depth])
        truth = narrow[0].float() @ e_cand.float() + (narrow[1].float() @ e_user.float())[index]
        padded = [functional.pad(e, (0, 0, 0, 6)) for e in (e_cand, e_user)]

        def decomposed(padded: list[Tensor] = padded, w_cand: Tensor = w_cand, w_user: Tensor = w_user) -> Tensor:
            return w_cand @ padded[0] + (w_user @ padded[1])[index]

        record(group, "decomposed, K padded, torch.compile", compiled(decomposed), truth, flops)
        forms = ["auto", "triton", "aten16"]
        if explore:
            tiles = [
                (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (64, 256, 64, 4, 2), (64, 256, 64, 4, 3), (128, 128, 64, 8, 3),
                (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (256, 128, 64, 8, 3), (128, 256, 32, 8, 4), (128, 128, 32, 4, 4),
                (128, 256, 64, 8, 3, 0), (64, 128, 64, 4, 3), (64, 256, 32, 4, 4),
            ]  # fmt: skip
            forms = [form_of(LceConfig(*tile)) for tile in tiles] + ["aten16"]
        for form in forms:

            def run(form: str = form) -> Tensor:
                return kernels.broadcast_lce(e_cand, narrow[0], index, e_user, narrow[1], form=form)

            record(group, form, run, truth, flops)


def linear(explore: bool) -> None:
    shapes = (
        (16_384, 512, 2048, 1024),
        (4096, 512, 2048, 1024),
        (16_384, 1024, 1024, 512),
        (2048, 256, 1024, 256),
    )
    for batch, depth, user_depth, columns in shapes[:3] if explore else shapes:
        users = -(-batch // 70)
        group = f"linear B={batch} K={depth} N={columns}"
        flops = 2.0 * columns * (batch * depth + users * user_depth)
        x_cand, x_user = randn(batch, depth), randn(users, user_depth)
        w_cand, w_user = randn(columns, depth, scale=0.03), randn(columns, user_depth, scale=0.03)
        bias, index = randn(columns), uneven_index(batch, users)
        truth = torch.relu(
            x_cand.float() @ w_cand.float().T + (x_user.float() @ w_user.float().T)[index] + bias.float()
        )
        weight = torch.cat([w_user, w_cand], 1)

        def original(x_cand: Tensor, x_user: Tensor, index: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.relu(functional.linear(torch.cat([x_user[index], x_cand], 1), weight, bias))

        def decomposed(x_cand: Tensor, x_user: Tensor, index: Tensor, w_user: Tensor, w_cand: Tensor) -> Tensor:
            part = functional.linear(x_user, w_user, bias)
            return torch.relu(functional.linear(x_cand, w_cand) + part[index])

        original_c, decomposed_c = compiled(original), torch.compile(decomposed, fullgraph=True)
        record(
            group,
            "original, torch.compile",
            lambda: original_c(x_cand, x_user, index, weight, bias),
            truth,
            flops,
        )
        record(
            group,
            "decomposed, torch.compile",
            lambda: decomposed_c(x_cand, x_user, index, w_user, w_cand),
            truth,
            flops,
        )
        record(group, "user GEMM alone", lambda: torch.mm(x_user, w_user.T, out_dtype=torch.float32))
        record(group, "candidate GEMM alone", lambda: functional.linear(x_cand, w_cand))
        forms = ["auto", "aten", "aten16"]
        if explore:
            tiles = [
                (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3),
                (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 4), (128, 128, 32, 4, 4), (64, 256, 64, 4, 2),
                (128, 128, 64, 8, 4, 0),
            ]  # fmt: skip
            forms = [form_of(LinearConfig(*tile)) for tile in tiles] + ["aten", "aten16"]
        for form in forms:

            def run(form: str = form) -> Tensor:
                return kernels.broadcast_linear(
                    x_cand,
                    w_cand,
                    index,
                    x_user,
                    w_user,
                    None,
                    bias,
                    "relu",
                    form,
                )

            record(group, form, run, truth, flops)


def din(explore: bool) -> None:
    batch, users, keys, depth, units, tail = 2048, 30, 200, 64, 80, 40
    q, k, index = randn(batch, depth), randn(users, keys, depth), uneven_index(batch, users)
    w1, b1 = randn(units, 4 * depth, scale=0.06), randn(units)
    w2, b2, w_out, b_out = randn(tail, units, scale=0.1), randn(tail), randn(1, tail, scale=0.15), randn(1)
    lengths = torch.randint(keys // 2, keys + 1, (users,), device="cuda", dtype=torch.int32)
    for act in ("sigmoid", "relu"):
        for name, length in (("full", None), ("lengths", lengths)):
            group = f"din {act} {name}"
            arguments = (q, k, index, w1, b1, w_out, b_out, w2, b2, act, None, None, length, None, False)
            reference = kernels.din_unit.reference.din_unit_reference
            lifted = [t.float() if isinstance(t, Tensor) and t.dtype == BF16 else t for t in arguments]
            truth = reference(*lifted)
            original = compiled(lambda *a: reference(*a))
            flops = 2.0 * batch * keys * (depth * units + units * tail)
            record(group, "original, torch.compile", lambda: original(*arguments), truth, flops, limit=3e-2)
            forms = ["auto", "aten"]
            if explore:
                tiles = [(64, 4, 2), (64, 4, 1), (128, 8, 2), (32, 4, 2), (32, 2, 2), (16, 1, 2), (64, 4, 3)]
                forms = [form_of(DinConfig(*tile)) for tile in tiles]
            for form in forms:

                def run(form: str = form) -> Tensor:
                    return kernels.broadcast_din_unit(*arguments, form=form)

                record(group, form, run, truth, flops, limit=3e-2)
        if explore:
            break


def dot(explore: bool) -> None:
    for batch, user_fields, cand_fields, depth in (
        (4096, 40, 20, 128),
        (4096, 20, 10, 64),
        (16_384, 40, 20, 128),
    ):
        users = -(-batch // 70)
        group = f"dot B={batch} {user_fields}+{cand_fields} D={depth}"
        x_user, x_cand = randn(users, user_fields, depth), randn(batch, cand_fields, depth)
        index, dense = uneven_index(batch, users), randn(batch, 13)
        reference = kernels.dot_interaction.reference.dot_interaction_reference
        truth = reference(x_user.float(), x_cand.float(), index, dense.float())
        fields = user_fields + cand_fields
        rows, columns = torch.triu_indices(fields, fields, 1, device="cuda")

        def original(
            x_user: Tensor,
            x_cand: Tensor,
            index: Tensor,
            dense: Tensor,
            rows: Tensor = rows,
            columns: Tensor = columns,
        ) -> Tensor:
            x = torch.cat([x_user[index], x_cand], 1)
            return torch.cat([torch.bmm(x, x.transpose(1, 2))[:, rows, columns], dense], 1)

        original_c = compiled(original)
        record(group, "original, torch.compile", lambda: original_c(x_user, x_cand, index, dense))
        decomposed = torch.compile(reference, fullgraph=True)
        record(group, "decomposed, torch.compile", lambda: decomposed(x_user, x_cand, index, dense), truth)
        forms = ["auto"]
        if explore:
            forms = [form_of(DotConfig(d, w)) for d in (128, 64, 32) for w in (2, 4, 8) if d <= depth]
        for form in forms:

            def run(form: str = form) -> tuple[Tensor, Tensor]:
                return kernels.broadcast_dot_interaction(x_user, x_cand, index, dense, form)

            record(group, form, run, truth)


def ceilings() -> None:
    a, b = randn(8192, 8192), randn(8192, 8192)
    record("ceiling", "bf16 GEMM 8192^3", lambda: a @ b, flops=2.0 * 8192**3)
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time_us = record("ceiling", "copy 2 GiB", lambda: target.copy_(source))
    print(f"copy {2 * source.numel() / time_us / 1e6:.2f} TB/s")


BENCHES = {"group": group_bench, "attention": attention, "lce": lce, "linear": linear, "din": din, "dot": dot}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=list(BENCHES), help="which operators")
    parser.add_argument("--explore", action="store_true", help="time all listed configurations")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--compile-only", action="store_true", help="fill the kernel caches, time nothing")
    options = parser.parse_args()
    global COMPILE_ONLY
    COMPILE_ONLY = options.compile_only
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}")
    if not COMPILE_ONLY:
        ceilings()
    for op in options.ops:
        BENCHES[op](options.explore)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"device": device, "torch": torch.__version__, "results": RESULTS}, file, indent=1)


if __name__ == "__main__":
    main()
