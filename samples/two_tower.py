"""Two towers and a mixing head for one user: the user's row is expanded to the candidates (form F2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class TwoTower(nn.Module):
    """Scores `[B]` from one user's features `[1, K_u]` and candidate features `[B, K_c]`."""

    def __init__(self, user: int, cand: int, dim: int) -> None:
        super().__init__()
        self.user_tower = mlp((user, 2 * dim, dim))
        self.cand_tower = mlp((cand, 2 * dim, dim))
        self.head = mlp((3 * dim, dim, 1))

    def forward(self, user_features: Tensor, cand_features: Tensor) -> Tensor:
        """One score a candidate."""
        user = self.user_tower(user_features.expand(cand_features.shape[0], -1))
        cand = self.cand_tower(cand_features)
        return self.head(torch.cat([user, cand, user * cand], dim=-1)).squeeze(-1)


def build(user: int = 1024, cand: int = 256, dim: int = 128) -> Sample:
    """The model, example inputs and dynamic dims."""
    inputs = {"user_features": torch.randn(1, user), "cand_features": torch.randn(6, cand)}
    return TwoTower(user, cand, dim), inputs, {"user_features": None, "cand_features": {0: Dim("B")}}


if __name__ == "__main__":
    main(build, __doc__)
