"""The demonstration model: a small target-attention ranker, as serving code often calls it (form F3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

LENGTH, WIDTH, HEADS = 60, 64, 2


class Ranker(nn.Module):
    """Scores `[B]` from a profile, a history of item ids and a candidate; every input has one row per candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(5000, WIDTH)
        self.key, self.value, self.query = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tower = nn.Sequential(nn.Linear(512 + 2 * WIDTH, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, user_profile: Tensor, user_history: Tensor, cand_id: Tensor) -> Tensor:
        """One score a candidate."""
        history = self.items(user_history)
        target = self.items(cand_id)
        keys, values = self._heads(self.key(history)), self._heads(self.value(history))
        query = self._heads(self.query(target).unsqueeze(1))
        interest = nn.functional.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(1)
        features = torch.cat([user_profile, interest, target], dim=1)
        return torch.sigmoid(self.tower(features)).squeeze(-1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def export_demo() -> ExportedProgram:
    """Export the model, seeded."""
    torch.manual_seed(0)
    batch = Dim("B")
    inputs = {
        "user_profile": torch.randn(6, 512),
        "user_history": torch.randint(0, 5000, (6, LENGTH)),
        "cand_id": torch.randint(0, 5000, (6,)),
    }
    shapes = {name: {0: batch} for name in inputs}
    return torch.export.export(Ranker().eval(), (), inputs, dynamic_shapes=shapes)
