import json
import os
import stat
import zipfile

import pytest
import torch
from program_files import example_inputs, export_ranker, records

from ikbo_cli import program
from ikbo_cli.errors import OutputExists, UsageError

MANIFEST = {"schema_version": 1, "note": "für später", "sites": [1, 2]}


def test_round_trip(ranker, tmp_path):
    path = tmp_path / "out.pt2"
    program.save(ranker, path, manifest=MANIFEST)
    loaded = program.load(path)
    args, kwargs = example_inputs(batch=11)
    torch.testing.assert_close(loaded.module()(*args, **kwargs), ranker.module()(*args, **kwargs), rtol=0, atol=0)
    assert loaded.manifest == MANIFEST
    assert loaded.exported.state_dict.keys() == ranker.state_dict.keys()
    assert loaded.exported.call_spec == ranker.call_spec
    kinds = [(spec.kind, spec.target, spec.persistent) for spec in loaded.exported.graph_signature.input_specs]
    assert kinds == [(spec.kind, spec.target, spec.persistent) for spec in ranker.graph_signature.input_specs]


def test_plain_torch_reads_program_and_manifest(ranker, tmp_path):
    path = tmp_path / "out.pt2"
    program.save(ranker, path, manifest=MANIFEST)
    extra = {"ikbo.json": ""}
    exported = torch.export.load(str(path), extra_files=extra)
    assert json.loads(extra["ikbo.json"]) == MANIFEST
    args, kwargs = example_inputs(batch=3)
    torch.testing.assert_close(exported.module()(*args, **kwargs), ranker.module()(*args, **kwargs), rtol=0, atol=0)


def test_examples_are_left_out_of_the_file_alone(tmp_path):
    exported = export_ranker()
    before = exported.example_inputs
    program.save(exported, tmp_path / "out.pt2", manifest={})
    assert exported.example_inputs is before
    assert before is not None
    assert records(tmp_path / "out.pt2")["data/sample_inputs/model.pt"] == b""


class Shared(torch.nn.Module):
    """Tensors of all kinds of storage: tied, a view into a larger one, transposed, empty, of 16 bits."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        base = torch.arange(12.0)
        self.register_buffer("tail", base[6:9])
        self.register_buffer("head", base[:3])
        self.register_buffer("turned", torch.arange(9.0).reshape(3, 3).t())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        x = self.second(self.first(x)) @ self.turned + self.tail * self.head + self.narrow
        return torch.cat([x, self.empty])


@pytest.mark.filterwarnings("ignore:No complete tensor found")  # torch, of the views into a larger tensor
def test_every_kind_of_storage_is_written_as_torch_writes_it(tmp_path):
    exported = torch.export.export(Shared(), (torch.randn(2, 3),))
    ours, theirs = tmp_path / "a" / "m.pt2", tmp_path / "b" / "m.pt2"
    ours.parent.mkdir()
    theirs.parent.mkdir()
    program.save(exported, ours, manifest={})
    torch.export.save(exported, str(theirs))
    found, expected = records(ours), records(theirs)
    names = [name for name in expected if name.startswith(("data/weights/", "data/constants/"))]
    assert len(names) > 5
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_existing_file_is_kept(ranker, tmp_path):
    path = tmp_path / "out.pt2"
    path.write_bytes(b"mine")
    with pytest.raises(OutputExists):
        program.save(ranker, path, manifest={})
    assert path.read_bytes() == b"mine"
    program.save(ranker, path, manifest={}, force=True)
    assert program.detect_format(path) == "pt2"


def test_folders_and_missing_folders(ranker, tmp_path):
    with pytest.raises(UsageError, match="folder"):
        program.save(ranker, tmp_path, manifest={}, force=True)
    with pytest.raises(UsageError, match="no folder"):
        program.save(ranker, tmp_path / "none" / "out.pt2", manifest={})


@pytest.mark.parametrize("failing", ["save", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(failing, ranker, tmp_path, monkeypatch):
    path = tmp_path / "out.pt2"
    path.write_bytes(b"mine")

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.export if failing == "save" else os, failing, fail)
    with pytest.raises(KeyboardInterrupt):
        program.save(ranker, path, manifest={}, force=True)
    assert path.read_bytes() == b"mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.pt2"]


def test_file_has_ordinary_permissions_and_root_folder(ranker, tmp_path):
    path, other = tmp_path / "out.pt2", tmp_path / "other"
    program.save(ranker, path, manifest={})
    other.write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    with zipfile.ZipFile(path) as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {"out"}


def test_read_manifest_elsewhere_is_none(ranker_file, tmp_path):
    assert program.read_manifest(ranker_file) is None
    assert program.read_manifest(tmp_path / "none.pt2") is None
    (tmp_path / "text").write_text("no archive")
    assert program.read_manifest(tmp_path / "text") is None
