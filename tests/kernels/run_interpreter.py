"""Interpret a kernel on random cases: `python run_interpreter.py OP CASES`, in a fresh process."""

from __future__ import annotations

import sys

import interpreter  # noqa: F401  (before torch and the kernels)
import torch
from kernel_cases import MAKERS, Draw
from numerics import Gate

from ikbo_cli.kernels.group.configs import GroupConfig
from ikbo_cli.kernels.group.op import launch_group
from ikbo_cli.kernels.group.reference import group_reference

SIZES = [(5, 3), (33, 4), (1, 1), (6, 9), (0, 2), (17, 1), (12, 12)]
"""(B, U): uneven, one user, more users than candidates, no candidate."""


def interpret(op: str, cases: int) -> None:
    """Cases in float32 and float16 (the interpreter computes bf16 on raw bits), through the gate."""
    for dtype in (torch.float32, torch.float16):
        gate = Gate(dtype)
        for seed in range(cases):
            case = MAKERS[op](Draw(seed, dtype), *SIZES[seed % len(SIZES)])
            for got, original, truth in zip(case.launch(), case.original(), case.truth(), strict=True):
                gate.add(got, original, truth)
        gate.check()


def interpret_group(cases: int) -> None:
    """Both forms of the grouping, also with indexes out of range."""
    config = GroupConfig(block=16, chunk=32, num_warps=4, width=4)
    for seed in range(cases):
        draw = Draw(seed, torch.float32)
        batch, users = SIZES[seed % len(SIZES)]
        batch *= draw.choice((1, 7))
        index = draw.index(batch, users + 2) - 1
        for two_launches in (False, True):
            order, offsets = launch_group(index, users, config=config, two_launches=two_launches)
            expected = group_reference(index, users)
            assert torch.equal(order, expected[0])
            assert torch.equal(offsets, expected[1])


if __name__ == "__main__":
    name, count = sys.argv[1], int(sys.argv[2])
    if name == "group":
        interpret_group(count)
    else:
        interpret(name, count)
