"""The ratio cases: how candidates may be spread over users."""

from __future__ import annotations

import dataclasses

import torch

ZIPF_EXPONENT = 1.2


@dataclasses.dataclass(frozen=True)
class RatioCase:
    """One spread of candidates over users. `kind` says how `index` draws it."""

    name: str
    batch: int
    users: int
    kind: str

    def index(self, generator: torch.Generator) -> torch.Tensor:
        """The index `[batch]`, int64."""
        rows = torch.arange(self.batch)
        even = rows * self.users // max(self.batch, 1)
        if self.kind == "even":
            return even
        if self.kind == "zipf":
            weights = torch.arange(1, self.users + 1).double() ** -ZIPF_EXPONENT
            return torch.multinomial(weights, self.batch, replacement=True, generator=generator)
        if self.kind == "skewed":
            index = torch.zeros(self.batch, dtype=torch.int64)
            others = min(self.users - 1, self.batch)
            index[:others] = torch.arange(1, others + 1)
            return index[torch.randperm(self.batch, generator=generator)]
        if self.kind == "gaps":
            return even // 2 * 2
        return even[torch.randperm(self.batch, generator=generator)]


def ratio_cases(batch: int, users: int) -> list[RatioCase]:
    """Every case of the contract at a workload of `batch` candidates and `users` users."""
    odd = max(1, batch - 1 | 1) if batch > 2 else batch
    return [
        RatioCase("even", batch, users, "even"),
        RatioCase("zipf", batch, users, "zipf"),
        RatioCase("one user has almost all", batch, users, "skewed"),
        RatioCase("U=1", batch, 1, "even"),
        RatioCase("U=B", batch, batch, "unsorted"),
        RatioCase("users without candidates", batch, max(2, users), "gaps"),
        RatioCase("odd counts", odd, max(1, users // 2 * 2 - 1), "zipf"),
        RatioCase("unsorted index", batch, users, "unsorted"),
    ]
