import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ikbo_cli import api

GOLDEN = Path(__file__).parent.parent / "golden"


def ikbo(*args, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "ikbo_cli", *map(str, args)], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return api.demo_model(tmp_path_factory.mktemp("cli") / "ranker.pt2")


def shape_of(value):
    """Field names and kinds of a JSON value, for the golden files."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


@pytest.mark.parametrize("command", ["analyze", "transform", "verify"])
def test_json_schema(command, model, tmp_path):
    common = ["--user-inputs", "user_*", "--json", "--threads", "1"]
    fast = tmp_path / "fast.pt2"
    first = ("analyze", model) if command == "analyze" else ("transform", model, "-o", fast)
    run = ikbo(*first, *common)
    if command == "verify":
        run = ikbo("verify", model, fast, "--json", "--batch", "64", "--users", "5", "--mode", "eager", "--trials", "1")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    golden = GOLDEN / f"{command}.json"
    assert shape_of(document) == json.loads(golden.read_text()), (
        "fields may be added (update the golden file), not renamed"
    )


def test_help_is_quick():
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert ikbo("--help").returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_errors_are_one_message(tmp_path):
    run = ikbo("analyze", tmp_path / "none.pt2")
    assert run.returncode == 2
    assert "no such file" in run.stderr
    assert "Traceback" not in run.stderr + run.stdout


def test_max_waste(model):
    assert ikbo("analyze", model, "--user-inputs", "user_*", "--max-waste", "5", "--threads", "1").returncode == 1
    assert ikbo("analyze", model, "--user-inputs", "user_*", "--max-waste", "99", "--threads", "1").returncode == 0


def test_require_change(tmp_path):
    class Plain(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x)

    path = tmp_path / "plain.pt2"
    torch.export.save(
        torch.export.export(Plain(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim("B")},)), path
    )
    run = ikbo("transform", path, "-o", tmp_path / "o.pt2", "--require-change")
    assert run.returncode == 1
    assert (tmp_path / "o.pt2").exists()


def test_verify_finds_the_pair_and_fails_on_a_wrong_file(model, tmp_path):
    fast = tmp_path / "fast.pt2"
    original = tmp_path / "ranker.pt2"
    original.write_bytes(model.read_bytes())
    assert ikbo("transform", original, "-o", fast, "--user-inputs", "user_*").returncode == 0
    small = ("--batch", "64", "--users", "5", "--mode", "eager", "--trials", "1")
    assert ikbo("verify", *small, cwd=tmp_path).returncode == 0
    assert ikbo("verify", fast, *small).returncode == 0
    original.write_bytes(b"changed")
    run = ikbo("verify", fast)
    assert run.returncode == 2
    assert run.stderr.count("sha256") == 1


def test_doctor_and_explain():
    assert "torch" in ikbo("doctor").stdout
    assert "IKB101" in ikbo("explain").stdout
    assert ikbo("explain", "IKB999").returncode == 2
