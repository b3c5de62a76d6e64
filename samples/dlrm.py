"""DLRM with dot interaction over user and candidate fields (form F1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class DLRM(nn.Module):
    """Scores `[B]` from ids of user fields `[U, F_u]` and candidate fields `[B, F_c]`, and the index `[B]`."""

    def __init__(self, user_fields: int, cand_fields: int, rows: int, dim: int) -> None:
        super().__init__()
        self.fields = user_fields + cand_fields
        self.user_table = nn.Embedding(rows, dim)
        self.cand_table = nn.Embedding(rows, dim)
        pairs = self.fields * (self.fields - 1) // 2
        row, column = torch.tril_indices(self.fields, self.fields, -1)
        self.register_buffer("row", row.clone())
        self.register_buffer("column", column.clone())
        self.head = mlp((pairs, 128, 1))

    def forward(self, user_ids: Tensor, cand_ids: Tensor, cand_to_user: Tensor) -> Tensor:
        """One score a candidate."""
        user = torch.index_select(self.user_table(user_ids), 0, cand_to_user)
        x = torch.concat([user, self.cand_table(cand_ids)], dim=1)
        products = torch.bmm(x, x.transpose(1, 2))
        return self.head(products[:, self.row, self.column]).squeeze(-1)


def build(user_fields: int = 24, cand_fields: int = 12, rows: int = 10_000, dim: int = 64) -> Sample:
    """The model, example inputs and dynamic dims."""
    batch, users = Dim("B"), Dim("U")
    inputs = {
        "user_ids": torch.randint(0, rows, (3, user_fields)),
        "cand_ids": torch.randint(0, rows, (6, cand_fields)),
        "cand_to_user": torch.randint(0, 3, (6,)),
    }
    return (
        DLRM(user_fields, cand_fields, rows, dim),
        inputs,
        {
            "user_ids": {0: users},
            "cand_ids": {0: batch},
            "cand_to_user": {0: batch},
        },
    )


if __name__ == "__main__":
    main(build, __doc__)
