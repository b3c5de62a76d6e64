"""Triton's interpreter for tests: import this before any kernel, in a process of its own.

`TRITON_INTERPRET=1` replaces `@triton.jit` process-wide, so tests that interpret kernels run through
`run_cases.py` in a subprocess.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter


def _patch_scalars() -> None:
    """Let one-element arrays become Python integers, which NumPy 2.4 no longer does by itself.

    Drop once Triton's interpreter reads scalars with `.item()`.
    """
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


_patch_scalars()
