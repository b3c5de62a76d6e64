import importlib

import pytest
import torch

from ikbo_cli import api, errors, program
from samples.common import export

SMALL = {
    "mlp_ranker": ({"user": 40, "cand": 24, "hidden": (16, 8)}, ("user_*",), {"IKB101"}),
    "din": (
        {"items": 50, "users": 20, "dim": 8, "length": 6, "unit": (8, 4), "tower": (8,)},
        ("user_*",),
        {"IKB101", "IKB104"},
    ),
    "target_attention": ({"dim": 16, "heads": 2, "length": 9}, (), {"IKB103"}),
    "lce_ranker": ({"user_fields": 9, "cand_fields": 5, "dim": 8, "compressed": 6}, (), {"IKB102"}),
    "dlrm": ({"user_fields": 5, "cand_fields": 4, "rows": 30, "dim": 8}, (), {"IKB106"}),
    "two_tower": ({"user": 20, "cand": 12, "dim": 8}, (), {"IKB101", "IKB107"}),
    "three_level_vendor": ({"user": 12, "vendor": 8, "item": 6, "dim": 8}, (), {"IKB101"}),
}


def saved(name, folder, **override):
    sizes, users, rules = SMALL[name]
    path = folder / f"{name}.pt2"
    torch.export.save(export(importlib.import_module(f"samples.{name}").build, **{**sizes, **override}), str(path))
    return path, api.Declarations(user_inputs=users), rules


@pytest.mark.parametrize("name", SMALL)
def test_samples_through_all_three_commands(name, tmp_path):
    path, declarations, rules = saved(name, tmp_path)
    found = api.analyze(path, declarations=declarations, threads=1)
    assert found.sites
    assert [site.id for site in found.sites] == [f"S{i}" for i in range(1, len(found.sites) + 1)]
    assert all(site.source and site.source.startswith(name) for site in found.sites)
    out = tmp_path / "fast.pt2"
    made = api.transform(path, out, declarations=declarations, policy="always", threads=1)
    assert made.changed
    assert made.verify.passed
    assert rules <= {site.rule for site in made.rewritten}
    result = api.verify(path, out, batch=40, users=6, modes=(), threads=1)
    assert result.passed, result.worst


def test_plain_torch_loads_and_runs_the_result(tmp_path):
    path, declarations, _ = saved("din", tmp_path)
    out = tmp_path / "fast.pt2"
    api.transform(path, out, declarations=declarations, policy="always")
    original, fast = torch.export.load(path).module(), torch.export.load(out).module()
    batch = {
        "user_history": torch.randint(0, 50, (4, 6)).repeat_interleave(3, 0),
        "user_length": torch.randint(1, 7, (4,)).repeat_interleave(3, 0),
        "user_id": torch.arange(4).repeat_interleave(3, 0),
        "cand_id": torch.randint(0, 50, (12,)),
    }
    inputs = api.compact_inputs(batch, program.read_manifest(out))
    assert inputs["user_id"].shape == (4,)
    torch.testing.assert_close(fast(**inputs), original(**batch))


def test_compact_inputs_from_request_ids_in_any_order(tmp_path):
    path, declarations, _ = saved("mlp_ranker", tmp_path)
    out = tmp_path / "fast.pt2"
    api.transform(path, out, declarations=declarations, policy="always")
    users = torch.randn(3, 40)
    ids = torch.tensor([7, 5, 7, 9, 5])
    rows = torch.tensor([1, 0, 1, 2, 0])
    batch = {"user_features": users[rows], "cand_features": torch.randn(5, 24)}
    manifest = program.read_manifest(out)
    inputs = api.compact_inputs(batch, manifest, ids)
    torch.testing.assert_close(torch.export.load(out).module()(**inputs), torch.export.load(path).module()(**batch))
    with pytest.raises(errors.InvalidInput, match="user_features"):
        api.compact_inputs({**batch, "user_features": torch.randn(5, 40)}, manifest, ids)


@pytest.mark.parametrize(("batch", "users"), [(1, 1), (5, 1), (4, 4), (3, 8), (0, 2)])
def test_sizes_stay_independent(tmp_path, batch, users):
    path, declarations, _ = saved("din", tmp_path)
    out = tmp_path / "fast.pt2"
    api.transform(path, out, declarations=declarations, policy="always", check=False)
    index = torch.randint(0, users, (batch,))
    compact = (torch.randint(0, 50, (users, 6)), torch.randint(1, 7, (users,)), torch.randint(0, 20, (users,)))
    cand = torch.randint(0, 50, (batch,))
    names = ("user_history", "user_length", "user_id")
    got = torch.export.load(out).module()(
        **dict(zip(names, compact, strict=True)), cand_id=cand, cand_to_user_index=index
    )
    assert got.shape == (batch,)
    if batch:
        full = torch.export.load(path).module()(
            **{n: t[index] for n, t in zip(names, compact, strict=True)}, cand_id=cand
        )
        torch.testing.assert_close(got, full)


def test_skip_only_and_declined_keep_the_signature(tmp_path):
    path, declarations, _ = saved("din", tmp_path)
    for options in ({"skip": ("IKB101",)}, {"only": ("S4",)}, {"skip": ("S1", "S2", "S3", "S4", "S5")}):
        made = api.transform(
            path, tmp_path / "o.pt2", declarations=declarations, policy="always", force=True, **options
        )
        assert made.verify.passed
        assert [i.name for i in made.signature][-1] == "cand_to_user_index"
        assert made.declined


def test_fastest_declines_at_ratio_one(tmp_path):
    path, declarations, _ = saved("target_attention", tmp_path, dim=64, length=40)
    made = api.transform(path, tmp_path / "o.pt2", declarations=declarations, batch=256, ratio=1, threads=1)
    assert made.verify.passed
    assert made.declined
    assert not made.rewritten


def test_output_is_never_the_model_nor_overwritten(tmp_path):
    path, declarations, _ = saved("mlp_ranker", tmp_path)
    before = path.read_bytes()
    with pytest.raises(errors.UsageError, match="itself"):
        api.transform(path, path, declarations=declarations, force=True)
    other = tmp_path / "o.pt2"
    other.write_text("mine")
    with pytest.raises(errors.OutputExists):
        api.transform(path, other, declarations=declarations)
    assert (path.read_bytes(), other.read_text()) == (before, "mine")
    api.transform(path, tmp_path / "dry.pt2", declarations=declarations, dry_run=True)
    assert not (tmp_path / "dry.pt2").exists()


def test_declarations_that_do_not_fit(tmp_path):
    path, _, _ = saved("mlp_ranker", tmp_path)
    with pytest.raises(errors.UsageError, match="matches no input"):
        api.analyze(path, declarations=api.Declarations(user_inputs=("nobody_*",)))
    with pytest.raises(errors.UsageError, match="nothing is left"):
        api.analyze(path, declarations=api.Declarations(user_inputs=("*",)))
    with pytest.raises(errors.UsageError, match="exclude"):
        api.analyze(path, ratio=3, users=4)


def test_static_export_names_the_way_out(tmp_path):
    from samples.mlp_ranker import build

    model, inputs, _ = build(40, 24, (16,))
    path = tmp_path / "static.pt2"
    torch.export.save(torch.export.export(model.eval(), (), inputs), path)
    with pytest.raises(errors.UnsupportedProgram, match="dynamic candidate axis") as caught:
        api.transform(path, tmp_path / "o.pt2", declarations=api.Declarations(user_inputs=("user_*",)))
    assert "dynamic_shapes" in caught.value.hint


def test_index_name_clash_takes_a_suffix(tmp_path):
    class Clash(torch.nn.Module):
        def forward(self, user, cand_to_user_index):
            return (user * cand_to_user_index).sum(-1)

    batch = torch.export.Dim("B")
    shapes = {"user": {0: batch}, "cand_to_user_index": {0: batch}}
    path = tmp_path / "clash.pt2"
    args = {"user": torch.randn(4, 3), "cand_to_user_index": torch.randn(4, 3)}
    torch.export.save(torch.export.export(Clash(), (), args, dynamic_shapes=shapes), path)
    made = api.transform(
        path, tmp_path / "o.pt2", declarations=api.Declarations(user_inputs=("user",)), policy="always"
    )
    assert made.signature[-1].name == "cand_to_user_index_1"


def test_check_index():
    api.check_index(torch.tensor([0, 2]), 3)
    with pytest.raises(errors.InvalidInput, match=r"index\[1\] is 3"):
        api.check_index(torch.tensor([0, 3]), 3)


def test_every_rule_explains_itself():
    for code, name, _ in api.rule_codes():
        text = api.explain(code)
        assert name in text
        for word in ("before:", "after:", "Valid when:", "Saves:", "Numerics:", "Source:"):
            assert word in text
