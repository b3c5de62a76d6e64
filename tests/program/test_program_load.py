import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from program_files import Ranker, example_inputs, records, with_program, with_records

from ikbo_cli import program
from ikbo_cli.errors import (
    CorruptModel,
    ForeignModel,
    IkboError,
    MissingOperator,
    ModelNotFound,
    NewerModel,
    TruncatedModel,
)


def test_load_gives_the_program(ranker, ranker_file):
    loaded = program.load(ranker_file)
    assert (loaded.path, loaded.format, loaded.manifest) == (ranker_file, "pt2", None)
    assert loaded.sha256 == program.sha256_of(ranker_file)
    args, kwargs = example_inputs(batch=9)
    expected = ranker.module()(*args, **kwargs)
    torch.testing.assert_close(loaded.module()(*args, **kwargs), expected, rtol=0, atol=0)


def test_inputs_in_flat_order(ranker_file):
    loaded = program.load(ranker_file)
    size = loaded.inputs[0].shape[0]
    assert isinstance(size, str)
    found = [(i.name, i.shape, i.dtype, i.is_tensor) for i in loaded.inputs]
    assert found == [
        ("rows", (size, 4), torch.float32, True),
        ("extra_offset", (1,), torch.int64, True),
        ("weight", (size, 1), torch.float32, True),
    ]
    assert [i.name for i in loaded.inputs] == [n.name for n in loaded.module().graph.nodes if n.op == "placeholder"]


def test_nodes_know_their_source(ranker_file):
    nodes = {node.name: node for node in program.load(ranker_file).module().graph.nodes}
    lines = Path(sys.modules[Ranker.__module__].__file__).read_text().splitlines()
    name, _, line = program.source_location(nodes["linear"]).partition(":")
    assert name == "program_files.py"
    assert "self.tower(" in lines[int(line) - 1]
    assert program.module_path(nodes["linear"]) == "tower.0"
    assert program.module_path(nodes["linear_1"]) == "head"
    assert program.source_location(nodes["rows"]) is None
    assert program.module_path(nodes["rows"]) is None


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ('File "/home/me/torch/model.py", line 7, in forward', "model.py:7"),
        (
            'File "/home/me/model.py", line 7, in f\nFile "/x/site-packages/torch/nn/linear.py", line 9, in g',
            "model.py:7",
        ),
        ('File "/x/site-packages/torch/nn/linear.py", line 9, in g', None),
        ('File "torch/fx/passes/runtime_assert.py", line 24, in insert', None),
        ('File "C:\\\\me\\\\model.py", line 3, in f', "model.py:3"),
        ("", None),
    ],
)
def test_source_location_skips_torch_alone(trace, expected):
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    assert program.source_location(node) == expected


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def torchscript():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"m/{name}", b"x")
    return buffer.getvalue()


def aoti():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data/aotinductor/model/model.so", b"x")
    return buffer.getvalue()


ONNX = b"\x08\x0a\x12\x07pytorch\x1a\x052.13.0"  # ir_version 10, producer_name, producer_version

FOREIGN = {
    "torchscript": (torchscript(), ForeignModel, "TorchScript"),
    "state_dict": (saved({"a": torch.ones(2)}), ForeignModel, r"torch\.save"),
    "aoti": (aoti(), ForeignModel, "AOTInductor"),
    "onnx": (ONNX, ForeignModel, "ONNX"),
    "pickle": (pickle.dumps({"a": 1}), ForeignModel, "pickle"),
    "unknown": (b"hello, this is no model", ForeignModel, "no model file"),
    "empty": (b"", TruncatedModel, "empty"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_files_have_their_own_message(kind, tmp_path):
    content, error, message = FOREIGN[kind]
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    assert program.detect_format(path) == kind
    with pytest.raises(error, match=message) as caught:
        program.load(path, trust=True)
    assert caught.value.hint


def test_format_is_told_by_content(ranker_file, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(ranker_file.read_bytes())
    assert program.detect_format(path) == "pt2"
    assert program.load(path).format == "pt2"


def test_missing_and_folder(tmp_path):
    with pytest.raises(ModelNotFound, match="no such file"):
        program.load(tmp_path / "none.pt2")
    with pytest.raises(ForeignModel, match="folder"):
        program.load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(ranker_file, tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(ranker_file.read_bytes())
    path.chmod(0)
    with pytest.raises(ModelNotFound, match="cannot be opened"):
        program.load(path)


def test_newer_schema(ranker_file, tmp_path):
    def change(document):
        document["schema_version"]["major"] = 99

    with pytest.raises(NewerModel, match="schema 99") as caught:
        program.load(with_program(ranker_file, tmp_path / "newer.pt2", change))
    assert torch.__version__ in caught.value.hint  # the torch that wrote it


def test_newer_archive(ranker_file, tmp_path):
    with pytest.raises(NewerModel, match="archive version 7"):
        program.load(with_records(ranker_file, tmp_path / "newer.pt2", {"archive_version": b"7"}))


def test_older_schema(ranker_file, tmp_path):
    def change(document):
        document["schema_version"]["major"] = 5

    with pytest.raises(ForeignModel, match="schema 5") as caught:
        program.load(with_program(ranker_file, tmp_path / "older.pt2", change))
    assert torch.__version__ in caught.value.hint


def test_missing_operator_is_named(ranker_file, tmp_path):
    def change(document):
        for node in document["graph_module"]["graph"]["nodes"]:
            if node["target"] == "torch.ops.aten.mul.Tensor":
                node["target"] = "torch.ops.my_company.fancy.default"

    with pytest.raises(MissingOperator, match="my_company::fancy,") as caught:
        program.load(with_program(ranker_file, tmp_path / "op.pt2", change))
    assert "--import" in caught.value.hint
    assert "--load-library" in caught.value.hint


def test_missing_weights_are_corrupt_and_quiet(ranker_file, tmp_path, capfd):
    contents = records(ranker_file)
    config = json.loads(contents["data/weights/model_weights_config.json"])
    next(iter(config["config"].values()))["path_name"] = "weight_77"
    path = with_records(
        ranker_file,
        tmp_path / "lost.pt2",
        {"data/weights/model_weights_config.json": json.dumps(config).encode()},
    )
    with pytest.raises(CorruptModel, match="cannot load"):
        program.load(path)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_program_that_contradicts_itself(ranker_file, tmp_path):
    def change(document):
        document["graph_module"]["module_call_graph"].pop(0)

    loaded = program.load(with_program(ranker_file, tmp_path / "odd.pt2", change))
    with pytest.raises(CorruptModel, match="cannot build"):
        loaded.module()


def test_records_that_are_no_json(ranker_file, tmp_path):
    for name, content in [
        ("models/model.json", b"{"),
        ("models/model.json", b"[" * 100_000),
        ("models/model.json", b"[]"),
    ]:
        with pytest.raises(CorruptModel):
            program.load(with_records(ranker_file, tmp_path / "broken.pt2", {name: content}))


def test_flipped_bit_in_a_weight(ranker_file, tmp_path):
    content = bytearray(ranker_file.read_bytes())
    with zipfile.ZipFile(ranker_file) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("weights/weight_0"))
        weight = archive.read(info)
    content[content.index(weight) + 5] ^= 16
    path = tmp_path / "flipped.pt2"
    path.write_bytes(content)
    with pytest.raises(CorruptModel, match=r"checksum of '.*weight_0'"):
        program.load(path, trust=True)


def broken(content, rng):
    if rng.random() < 0.25:
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    if rng.random() < 0.5:  # the table of contents, where a flip does most
        at = rng.randrange(content.index(b"PK\x01\x02"), len(content))
    else:
        at = rng.randrange(len(content))
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_broken_files_are_refused_or_load_equal(seed, ranker_file, tmp_path):
    rng = random.Random(seed)
    content = ranker_file.read_bytes()
    args, kwargs = example_inputs()
    expected = program.load(ranker_file).module()(*args, **kwargs)
    path = tmp_path / "broken.pt2"
    refused = 0
    for _ in range(60):
        path.write_bytes(broken(content, rng))
        try:
            loaded = program.load(path)
        except IkboError as error:
            assert error.hint
            refused += 1
            continue
        torch.testing.assert_close(loaded.module()(*args, **kwargs), expected, rtol=0, atol=0)
    assert refused > 30


def test_plain_python_process_prints_nothing(tmp_path):
    path = tmp_path / "bad.pt2"
    path.write_bytes(b"PK\x03\x04")
    lines = (
        "from ikbo_cli import program",
        f"try: program.load({str(path)!r})",
        "except Exception as e: print(e.exit_code)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2\n", "")
