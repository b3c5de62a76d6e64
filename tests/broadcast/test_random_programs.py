import pytest
from random_programs import check

PROGRAMS, CHUNKS = 2000, 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk):
    size = PROGRAMS // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        assert check(seed) is None, f"seed {seed}"
