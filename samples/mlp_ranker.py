"""MLP ranker: user and candidate features, concatenated, then a tower (form F3: every input has B rows)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class MLPRanker(nn.Module):
    """Scores `[B]` from user features `[B, K_u]` and candidate features `[B, K_c]`."""

    def __init__(self, user: int, cand: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.tower = mlp((user + cand, *hidden, 1))

    def forward(self, user_features: Tensor, cand_features: Tensor) -> Tensor:
        """One score a candidate."""
        return torch.sigmoid(self.tower(torch.cat([user_features, cand_features], dim=1))).squeeze(-1)


def build(user: int = 1178, cand: int = 866, hidden: tuple[int, ...] = (433, 128)) -> Sample:
    """The model, example inputs and dynamic dims."""
    batch = Dim("B")
    inputs = {"user_features": torch.randn(6, user), "cand_features": torch.randn(6, cand)}
    return MLPRanker(user, cand, hidden), inputs, {name: {0: batch} for name in inputs}


if __name__ == "__main__":
    main(build, __doc__)
