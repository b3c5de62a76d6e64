"""Linear compression (Wukong-like): a weight from the left times a concat of user and candidate fields (form F1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class LCERanker(nn.Module):
    """Scores `[B]` from user fields `[U, K_u, N]`, candidate fields `[B, K_c, N]` and the index `[B]`."""

    def __init__(self, user_fields: int, cand_fields: int, dim: int, compressed: int) -> None:
        super().__init__()
        total = user_fields + cand_fields
        self.compress = nn.Parameter(torch.randn(compressed, total) / total**0.5)
        self.head = mlp((compressed * dim, 64, 1))

    def forward(self, user_fields: Tensor, cand_fields: Tensor, cand_to_user: Tensor) -> Tensor:
        """One score a candidate."""
        fields = torch.cat([user_fields[cand_to_user], cand_fields], dim=1)
        return self.head(torch.relu(self.compress @ fields).flatten(1)).squeeze(-1)


def build(user_fields: int = 256, cand_fields: int = 64, dim: int = 64, compressed: int = 32) -> Sample:
    """The model, example inputs and dynamic dims (published shape: 1178, 866, 256, 433)."""
    batch, users = Dim("B"), Dim("U")
    inputs = {
        "user_fields": torch.randn(3, user_fields, dim),
        "cand_fields": torch.randn(6, cand_fields, dim),
        "cand_to_user": torch.randint(0, 3, (6,)),
    }
    return (
        LCERanker(user_fields, cand_fields, dim, compressed),
        inputs,
        {
            "user_fields": {0: users},
            "cand_fields": {0: batch},
            "cand_to_user": {0: batch},
        },
    )


if __name__ == "__main__":
    main(build, __doc__)
