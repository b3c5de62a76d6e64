"""Target attention over a long history, with K/V projections; the history is gathered inside (form F1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class TargetAttention(nn.Module):
    """Scores `[B]` from histories `[U, L, D]`, candidates `[B, D]` and the index `[B]`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.head = mlp((2 * dim, 128, 1))

    def forward(self, user_history: Tensor, cand_features: Tensor, cand_to_user: Tensor) -> Tensor:
        """One score a candidate."""
        history = user_history.index_select(0, cand_to_user)
        keys, values = self._split(self.key(history)), self._split(self.value(history))
        query = self._split(self.query(cand_features).unsqueeze(1))
        mixed = F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(1)
        return self.head(torch.cat([mixed, cand_features], dim=-1)).squeeze(-1)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def build(dim: int = 256, heads: int = 4, length: int = 200) -> Sample:
    """The model, example inputs and dynamic dims."""
    batch, users = Dim("B"), Dim("U")
    inputs = {
        "user_history": torch.randn(3, length, dim),
        "cand_features": torch.randn(6, dim),
        "cand_to_user": torch.randint(0, 3, (6,)),
    }
    return (
        TargetAttention(dim, heads),
        inputs,
        {
            "user_history": {0: users},
            "cand_features": {0: batch},
            "cand_to_user": {0: batch},
        },
    )


if __name__ == "__main__":
    main(build, __doc__)
