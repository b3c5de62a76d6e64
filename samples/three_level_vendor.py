"""Three levels: user -> vendor -> item, one broadcast feeding another (form F1, composed)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

if __package__:
    from samples.common import Sample, main, mlp
else:
    from common import Sample, main, mlp


class ThreeLevel(nn.Module):
    """Scores `[B]` from users `[U, K]`, vendors `[V, K]`, items `[B, K]`, and the index of each level."""

    def __init__(self, user: int, vendor: int, item: int, dim: int) -> None:
        super().__init__()
        self.vendor_tower = mlp((user + vendor, 2 * dim, dim))
        self.item_tower = mlp((user + dim + item, 2 * dim, 1))

    def forward(
        self, user: Tensor, vendor: Tensor, item: Tensor, vendor_to_user: Tensor, item_to_vendor: Tensor
    ) -> Tensor:
        """One score an item."""
        user_of_vendor = user[vendor_to_user]
        known = self.vendor_tower(torch.cat([user_of_vendor, vendor], dim=-1))
        both = torch.cat([user_of_vendor, known], dim=-1)[item_to_vendor]
        return self.item_tower(torch.cat([both, item], dim=-1)).squeeze(-1)


def build(user: int = 512, vendor: int = 256, item: int = 128, dim: int = 128) -> Sample:
    """The model, example inputs and dynamic dims."""
    batch, vendors, users = Dim("B"), Dim("V"), Dim("U")
    inputs = {
        "user": torch.randn(2, user),
        "vendor": torch.randn(4, vendor),
        "item": torch.randn(9, item),
        "vendor_to_user": torch.randint(0, 2, (4,)),
        "item_to_vendor": torch.randint(0, 4, (9,)),
    }
    dims = {
        "user": users,
        "vendor": vendors,
        "item": batch,
        "vendor_to_user": vendors,
        "item_to_vendor": batch,
    }
    return ThreeLevel(user, vendor, item, dim), inputs, {name: {0: size} for name, size in dims.items()}


if __name__ == "__main__":
    main(build, __doc__)
