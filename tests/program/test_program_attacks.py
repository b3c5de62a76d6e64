"""Files that would execute code while they are loaded. Each attack only sets a flag in a module of this test."""

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import zipfile

import pytest
import torch
from program_files import export_ranker, records, with_program, with_records, write_records
from torch.export.pt2_archive import constants

from ikbo_cli import program
from ikbo_cli.errors import CorruptModel, ForeignModel, IkboError, UnsafeModel

FIRE = "__import__('os').environ.__setitem__('IKBO_TEST_FIRED', '1')"


BOMB = "ikbo_test_bomb"  # a module that sets the flag when it is imported


class Payload:
    def __reduce__(self):
        return eval, (FIRE,)


@pytest.fixture(autouse=True)
def unfired(monkeypatch, tmp_path):
    monkeypatch.delenv("IKBO_TEST_FIRED", raising=False)
    monkeypatch.delitem(sys.modules, BOMB, raising=False)
    folder = tmp_path / "importable"
    folder.mkdir()
    (folder / f"{BOMB}.py").write_text(FIRE + "\n")
    monkeypatch.syspath_prepend(str(folder))
    yield
    os.environ.pop("IKBO_TEST_FIRED", None)
    sys.modules.pop(BOMB, None)


def fired():
    return "IKBO_TEST_FIRED" in os.environ


def torch_pickle(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def in_expression(expression):
    def change(document):
        values = document["graph_module"]["graph"]["tensor_values"]
        values["rows"]["sizes"][0]["as_expr"]["expr_str"] = expression

    return change


def in_guard(document):
    document["guards_code"] = [f"{FIRE} is None"]


def in_placeholder(document):
    evil = f"weight={FIRE}"  # the last input: an argument with a default value cannot stand before others
    honest, changed = ({"as_tensor": {"name": name}} for name in ("weight", evil))
    text = json.dumps(document).replace(json.dumps(honest), json.dumps(changed))
    document.clear()
    document.update(json.loads(text))
    values = document["graph_module"]["graph"]["tensor_values"]
    values[evil] = values.pop("weight")


def in_argument_names(document):
    # The name is written twice: the quotes turn what stands between into a string.
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    signature["forward_arg_names"][-1] = f"weight={FIRE}):\n    ''' #"


def in_buffer_name(document):
    for spec in document["graph_module"]["signature"]["input_specs"]:
        if "buffer" in spec:
            spec["buffer"]["buffer_name"] = f'x", {FIRE}) or ("'


def in_function(document):
    node = document["graph_module"]["graph"]["nodes"][-1]
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "", "arg": {"as_string": "true"}, "kind": 1}]


def in_keyword_name(document):
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    signature["in_spec"] = signature["in_spec"].replace("weight", "weight' + x + '")


def in_default_factory(document):
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    leaf = {"type": None, "context": None, "children_spec": []}
    context = {"default_factory_module": BOMB, "default_factory_name": "x", "dict_context": ["a"]}
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}
    signature["out_spec"] = json.dumps([1, tree])


def in_enum(document):
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    leaf = {"type": None, "context": None, "children_spec": []}
    context = json.dumps([{"__enum__": True, "fqn": f"{BOMB}:X", "name": "a"}])
    signature["out_spec"] = json.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": [leaf]}])


PROGRAM_ATTACKS = {
    "expression": (in_expression(FIRE), "size expression"),
    "nested-string": (in_expression(f'Max("{FIRE}", Integer(1))'), "size expression"),
    "symbol-name": (in_expression('Symbol("a").__class__'), "size expression"),
    "float-string": (in_expression(f'Float("{FIRE}")'), "size expression"),
    "lambda": (in_expression("(lambda: Integer(1))()"), "size expression"),
    "guard": (in_guard, "guards"),
    "placeholder": (in_placeholder, "a name would become code"),
    "argument-name": (in_argument_names, "a name would become code"),
    "buffer-name": (in_buffer_name, "module path"),
    "function": (in_function, "no tensor operator"),
    "keyword-name": (in_keyword_name, "import a module"),
    "default-factory": (in_default_factory, "import a module"),
    "enum": (in_enum, "import a module"),
}


@pytest.mark.parametrize("name", PROGRAM_ATTACKS)
def test_program_that_contains_code_is_refused(name, ranker_file, tmp_path):
    change, message = PROGRAM_ATTACKS[name]
    path = with_program(ranker_file, tmp_path / "evil.pt2", change)
    with pytest.raises(UnsafeModel, match=message) as caught:
        program.load(path)
    assert "--trust" in caught.value.hint
    assert not fired()


@pytest.mark.parametrize("name", ["expression", "nested-string", "argument-name", "default-factory", "enum"])
def test_the_attacks_are_real(name, ranker_file, tmp_path):
    """Without the check (`trust`) the code does run, so the tests above are not about harmless files."""
    path = with_program(ranker_file, tmp_path / "evil.pt2", PROGRAM_ATTACKS[name][0])
    with contextlib.suppress(IkboError):
        program.load(path, trust=True).module()
    assert fired()


def pickled_example_inputs(files):
    return {"data/sample_inputs/model.pt": torch_pickle(((Payload(),), {}))}


def legacy_weights(files):
    return {"data/weights/model.pt": torch_pickle({"a": Payload()})}


def legacy_constants(files):
    return {"data/constants/model.pt": torch_pickle({"a": Payload()})}


def changed_config(files, folder, payload, path_name, **fields):
    name = f"data/{folder}/model_{folder}_config.json"
    config = json.loads(files[name])
    entry = next(iter(config["config"].values()))
    entry.update(path_name=path_name, **fields)
    return {name: json.dumps(config).encode(), f"data/{folder}/{path_name}": payload}


def pickled_weight(files):
    return changed_config(files, "weights", torch_pickle(Payload()), "weight_99", use_pickle=True)


def pickled_constant(files):
    return changed_config(files, "constants", torch_pickle(Payload()), "tensor_99", use_pickle=True)


def opaque_constant(files):
    return changed_config(files, "constants", pickle.dumps(Payload()), "opaque_obj_0", use_pickle=True)


def custom_object(files):
    return changed_config(files, "constants", b"", "custom_obj_0")


def second_program(files):
    """A program under a name that does not end in .json: torch loads it all the same."""
    evil = json.loads(files["models/model.json"])
    in_expression(FIRE)(evil)
    evil = json.dumps(evil).encode()
    same = {
        f"data/{f}/other_{f}_config.json": files[f"data/{f}/model_{f}_config.json"] for f in ("weights", "constants")
    }
    return {"models/otherXjson": evil, "data/sample_inputs/other.pt": b"", **same}


ARCHIVE_ATTACKS = {
    pickled_example_inputs: "its example inputs are a pickle",
    legacy_weights: "its tensors are a pickle",
    legacy_constants: "its tensors are a pickle",
    pickled_weight: "the tensor .* is a pickle",
    pickled_constant: "the tensor .* is a pickle",
    opaque_constant: "is a pickled object",
    custom_object: "is a pickled object",
    second_program: "size expression",
}


@pytest.mark.parametrize("attack", ARCHIVE_ATTACKS)
def test_pickle_that_torch_would_execute_is_refused(attack, ranker_file, tmp_path):
    path = with_records(ranker_file, tmp_path / "evil.pt2", attack(records(ranker_file)))
    with pytest.raises(UnsafeModel, match=ARCHIVE_ATTACKS[attack]) as caught:
        program.load(path)
    assert "--trust" in caught.value.hint
    assert not fired()


@pytest.mark.parametrize("attack", [pickled_example_inputs, legacy_weights, pickled_weight, opaque_constant])
def test_the_pickles_are_real(attack, ranker_file, tmp_path):
    if attack is opaque_constant and not hasattr(constants, "OPAQUE_OBJ_FILENAME_PREFIX"):
        pytest.skip("this torch knows no opaque constants")
    path = with_records(ranker_file, tmp_path / "evil.pt2", attack(records(ranker_file)))
    with contextlib.suppress(IkboError):
        program.load(path, trust=True)
    assert fired()


def test_old_layout_is_never_unpickled(tmp_path):
    path = tmp_path / "old.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.1")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", torch_pickle({"a": Payload()}))
    with pytest.raises(ForeignModel, match=r"torch 2\.7"):
        program.load(path, trust=True)
    assert not fired()


def two_tables(path, shown_to_torch, shown_to_python):
    """An archive whose table of contents depends on who looks: Python takes the one before the end record, torch the
    one at the offset that this record names. Both archives must have the same layout."""
    for name, contents in (("torch", shown_to_torch), ("python", shown_to_python)):
        write_records(path.with_name(name), contents)
    first, second = path.with_name("torch").read_bytes(), path.with_name("python").read_bytes()
    end_first, end_second = first.rindex(b"PK\x05\x06"), second.rindex(b"PK\x05\x06")
    start_first = struct.unpack("<I", first[end_first + 16 : end_first + 20])[0]
    path.write_bytes(first[:end_first] + second[: end_second + 16] + struct.pack("<I", start_first) + b"\0\0")
    return path


def pickles_of_one_length():
    """A harmless file of torch.save and an evil one of the same length."""

    def saved(value):
        buffer = io.BytesIO()
        torch.save(value, buffer, _use_new_zipfile_serialization=False)
        return buffer.getvalue()

    benign = saved(torch.zeros(8, 4))
    return benign, next(e for n in range(len(benign)) if len(e := saved([Payload(), "x" * n])) == len(benign))


def torch_sees_an_expression(files):
    evil = json.loads(files["models/model.json"])
    in_expression(FIRE)(evil)
    evil, benign = json.dumps(evil).encode(), files["models/model.json"]
    length = max(len(evil), len(benign))
    return {"models/model.json": evil.ljust(length)}, {"models/model.json": benign.ljust(length)}


def torch_sees_a_pickled_weight(files):
    benign, evil = pickles_of_one_length()
    config = changed_config(files, "weights", benign, "weight_99", use_pickle=True)
    return {**config, "data/weights/weight_99": evil}, config


def torch_sees_a_pickle_named_like_a_weight(files):
    """The program `weight_0` has its weights in `data/weights/weight_0.pt`."""
    benign, evil = pickles_of_one_length()
    renamed = {
        "models/weight_0.json": files["models/model.json"],
        "data/sample_inputs/weight_0.pt": b"",
        "data/constants/weight_0_constants_config.json": files["data/constants/model_constants_config.json"],
    }
    return {**renamed, "data/weights/weight_0.pt": evil}, {**renamed, "data/weights/weight_0.pt": benign}


@pytest.mark.parametrize(
    "attack", [torch_sees_an_expression, torch_sees_a_pickled_weight, torch_sees_a_pickle_named_like_a_weight]
)
def test_two_tables_of_contents(attack, ranker_file, tmp_path):
    files = records(ranker_file)
    seen_by_torch, seen_by_python = attack(files)
    path = two_tables(tmp_path / "both.pt2", {**files, **seen_by_torch}, {**files, **seen_by_python})
    with pytest.raises(CorruptModel, match="ambiguous"):
        program.load(path)
    assert not fired()


def test_record_outside_the_folder(ranker_file, tmp_path):
    path = tmp_path / "outside.pt2"
    write_records(path, records(ranker_file))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("version", "8.1")
    with pytest.raises(CorruptModel, match="outside the folder"):
        program.load(path)


def test_guards_are_not_executed_even_with_trust(ranker_file, tmp_path):
    path = with_program(ranker_file, tmp_path / "guard.pt2", in_guard)
    program.load(path, trust=True).module()
    assert not fired()


def test_example_inputs_of_an_honest_file_are_accepted(tmp_path):
    exported = export_ranker()
    assert exported.example_inputs is not None
    torch.export.save(exported, str(tmp_path / "m.pt2"))
    assert program.load(tmp_path / "m.pt2").exported.example_inputs is not None
