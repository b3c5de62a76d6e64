"""Which rewrite breaks the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx


def bisect(
    build: Callable[[Sequence[str]], fx.GraphModule],
    passes: Callable[[fx.GraphModule], bool],
    sites: Sequence[str],
) -> str | None:
    """The first site whose rewrite breaks the result.

    Args:
        build: Makes the program in which only the given sites are rewritten.
        passes: Whether a program computes what the original does.
        sites: Every rewritten site, in graph order.

    Returns:
        The site, or None if the program with all of them passes. With fewer sites rewritten a faulty one may be
        hidden behind another, so what is found is the site that turns a passing prefix into a failing one.
    """
    if passes(build(sites)):
        return None
    good, bad = 0, len(sites)
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(build(sites[:middle])):
            good = middle
        else:
            bad = middle
    return sites[bad - 1] if sites else None
