"""DIN: the target attends to the user's history through the four-way unit `[q, k, q - k, q * k]` (form F3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class DIN(nn.Module):
    """Scores `[B]` from a history of item ids `[B, L]`, its lengths `[B]`, a user id and a candidate id `[B]`."""

    def __init__(self, items: int, users: int, dim: int, unit: tuple[int, ...], tower: tuple[int, ...]) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.users = nn.Embedding(users, dim)
        layers: list[nn.Module] = []
        for before, after in zip((4 * dim, *unit), unit, strict=False):
            layers += [nn.Linear(before, after), nn.Sigmoid()]
        self.unit = nn.Sequential(*layers, nn.Linear(unit[-1], 1))
        self.tower = mlp((3 * dim, *tower, 1))

    def forward(self, user_history: Tensor, user_length: Tensor, user_id: Tensor, cand_id: Tensor) -> Tensor:
        """One score a candidate."""
        keys = self.items(user_history)
        target = self.items(cand_id)
        query = target.unsqueeze(1).expand(-1, keys.shape[1], -1)
        weight = self.unit(torch.cat([query, keys, query - keys, query * keys], dim=-1)).squeeze(-1)
        outside = torch.arange(keys.shape[1])[None, :] >= user_length[:, None]
        weight = weight.masked_fill(outside, 0.0)
        interest = torch.bmm(weight.unsqueeze(1), keys).squeeze(1)
        features = torch.cat([self.users(user_id), interest, target], dim=-1)
        return torch.sigmoid(self.tower(features)).squeeze(-1)


def build(
    items: int = 50_000,
    users: int = 10_000,
    dim: int = 64,
    length: int = 50,
    unit: tuple[int, ...] = (80, 40),
    tower: tuple[int, ...] = (200, 80),
) -> Sample:
    """The model, example inputs and dynamic dims."""
    batch = Dim("B")
    inputs = {
        "user_history": torch.randint(0, items, (6, length)),
        "user_length": torch.randint(1, length + 1, (6,)),
        "user_id": torch.randint(0, users, (6,)),
        "cand_id": torch.randint(0, items, (6,)),
    }
    return DIN(items, users, dim, unit, tower), inputs, {name: {0: batch} for name in inputs}


if __name__ == "__main__":
    main(build, __doc__)
