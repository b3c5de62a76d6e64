"""The form an operator runs in: `auto`, `aten`, `aten16`, `triton`, or `triton:block_m=128,num_warps=8,...`.

Operators carry the form as a plain string, so that a saved program can fix the winner of a measurement.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from ikbo_cli.errors import ShapeError

C = TypeVar("C")


def parse_form(form: str, config_class: type[C]) -> tuple[str, C | None]:
    """Split a form into its level and, where one is spelled out, its configuration.

    Raises:
        ShapeError: Unknown level, field or value.
    """
    level, _, text = form.partition(":")
    if level not in ("auto", "aten", "aten16", "triton") or (text and level != "triton"):
        raise ShapeError(f"unknown form {form!r}", hint="auto, aten, aten16, triton, triton:field=value,...")
    if not text:
        return level, None
    try:
        values = {k: int(v) for k, v in (item.split("=") for item in text.split(","))}
        return level, config_class(**values)
    except (TypeError, ValueError) as error:
        names = ", ".join(f.name for f in fields(config_class))  # type: ignore[arg-type]
        raise ShapeError(f"cannot read form {form!r}: {error}", hint=f"fields: {names}") from error


def form_of(config: Any) -> str:
    """The form string that `parse_form` reads back."""
    return "triton:" + ",".join(f"{f.name}={getattr(config, f.name)}" for f in fields(config))
