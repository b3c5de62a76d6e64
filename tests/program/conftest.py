import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from program_files import export_ranker


@pytest.fixture(scope="session")
def ranker():
    return export_ranker()


@pytest.fixture(scope="session")
def ranker_file(ranker, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "ranker.pt2"
    torch.export.save(ranker, str(path))
    return path
