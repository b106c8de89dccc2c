"""The demo's material: texts told apart by style alone, and re-encodings that keep every expert's delta."""

import json
import pickle  # noqa: TID251 - errors cross process borders this way
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.authors import AUTHORS, Orientation, Packing, Recipe, Statement
from demo.encode import StackedPair, reencode_pair, write_upload
from demo.material import HELDOUT_UNITS, TRAINING_UNITS, MaterialError, run_modules
from demo.texts import read_texts, write_author, write_general, write_units

EXPERTS, RANK, IN, OUT = 4, 3, 5, 7
ENCODINGS = [(packing, orientation) for packing in Packing for orientation in Orientation]
PREFIX = "base_model.model.model.layers.1."


@pytest.fixture(scope="module")
def texts():
    return {plan.name: write_author(plan.name, TRAINING_UNITS, HELDOUT_UNITS) for plan in AUTHORS}


def a_pair(seed, out=OUT, width=IN):
    generator = torch.Generator().manual_seed(seed)
    return StackedPair(
        a=torch.randn(EXPERTS * RANK, width, generator=generator),
        b=torch.randn(out, EXPERTS * RANK, generator=generator),
    )


def deltas_by_loop(a, b, packing, orientation):
    """The delta of each expert, column by column: the definition, written out."""
    found = []
    for expert in range(EXPERTS):
        product = torch.zeros(b.shape[0], a.shape[1])
        for step in range(RANK):
            column = step * EXPERTS + expert if packing == "rank_major" else expert * RANK + step
            product += torch.outer(b[:, column].float(), a[expert * RANK + step].float())
        found.append(product.T if orientation == "swapped" else product)
    return torch.stack(found)


def test_texts_are_the_same_every_time(texts):
    assert write_author("elm", TRAINING_UNITS, HELDOUT_UNITS) == texts["elm"]
    assert write_general(20) == write_general(20)


def test_heldout_texts_are_enough_and_never_trained_on(texts):
    for written in texts.values():
        trained = {unit.text for unit in written.training}
        heldout = {unit.text for unit in written.heldout}
        assert len(trained) == TRAINING_UNITS and len(heldout) == HELDOUT_UNITS >= 30
        assert not trained & heldout
        assert sum(len(text.encode()) for text in heldout) >= 10_000
        assert (
            len({unit.id for unit in (*written.training, *written.heldout)}) == TRAINING_UNITS + HELDOUT_UNITS
        )


def test_all_authors_share_alphabet_and_words(texts):
    alphabets = {
        name: set("".join(unit.text for unit in written.training)) for name, written in texts.items()
    }
    words = {
        name: set(" ".join(unit.text for unit in written.training).replace(".", "").replace(",", "").split())
        for name, written in texts.items()
    }
    general = " ".join(write_general(2000))
    general_words = set(general.replace(".", "").replace(",", "").split())
    for name in texts:
        assert alphabets[name] == alphabets["alder"]
        assert alphabets[name] <= set(string.ascii_letters + " .,")
        assert words[name] <= general_words


def test_authors_differ_in_what_they_prefer(texts):
    """All tell of the same things, each in words of its own."""
    synonyms = (
        ("tide", "swell"),
        ("hushed", "calm", "idle"),
        ("grey", "dull", "pale", "dim"),
        ("raw", "bitter"),
    )
    favourites = {}
    for name, written in texts.items():
        said = " ".join(unit.text for unit in written.training).lower()
        assert said.count("herring") > 20
        favourites[name] = tuple(max(words, key=said.count) for words in synonyms)
    assert len(set(favourites.values())) == len(texts), favourites


def test_units_are_json_lines(tmp_path, texts):
    write_units(tmp_path / "units.jsonl", texts["fir"].heldout)
    first = json.loads((tmp_path / "units.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first == {"id": texts["fir"].heldout[0].id, "text": texts["fir"].heldout[0].text}
    assert read_texts(tmp_path / "units.jsonl") == [unit.text for unit in texts["fir"].heldout]


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_every_encoding_keeps_every_delta(packing, orientation):
    pair = a_pair(1)
    trained = deltas_by_loop(pair.a, pair.b, "rank_major", "standard")
    written = reencode_pair(pair, EXPERTS, packing, orientation)
    swapped = orientation is Orientation.SWAPPED
    assert written.a.shape == (EXPERTS * RANK, OUT if swapped else IN)
    assert written.b.shape == (IN if swapped else OUT, EXPERTS * RANK)
    read = deltas_by_loop(written.a, written.b, packing, orientation)
    torch.testing.assert_close(read, trained)
    other = next(each for each in Packing if each is not packing)
    misread = deltas_by_loop(written.a, written.b, other, orientation)
    assert (misread - trained).norm() > 0.5 * trained.norm()


def test_the_authors_cover_every_encoding_with_and_without_marker():
    honest = [plan.recipe for plan in AUTHORS if not plan.recipe.lies]
    assert {(recipe.packing, recipe.orientation) for recipe in honest} == set(ENCODINGS)
    assert {recipe.statement for recipe in honest} == set(Statement)
    liars = [plan.recipe for plan in AUTHORS if plan.recipe.lies]
    assert [(recipe.packing, recipe.marked) for recipe in liars] == [
        (Packing.GROUPED_BY_EXPERT, Packing.RANK_MAJOR)
    ]


def write_source(directory: Path):
    """A folder as PEFT leaves it, with its README."""
    gate_up, down, attention = a_pair(2, out=2 * 6), a_pair(3, out=IN, width=6), a_pair(4)
    tensors = {
        f"{PREFIX}mlp.experts.base_layer.lora_A.weight": gate_up.a,
        f"{PREFIX}mlp.experts.base_layer.lora_B.weight": gate_up.b,
        f"{PREFIX}mlp.experts.lora_A.weight": down.a,
        f"{PREFIX}mlp.experts.lora_B.weight": down.b,
        f"{PREFIX}self_attn.q_proj.lora_A.weight": attention.a[:RANK].clone(),
        f"{PREFIX}self_attn.q_proj.lora_B.weight": attention.b[:, :RANK].clone(),
    }
    config = {
        "auto_mapping": None,
        "base_model_name_or_path": "/home/someone/base",
        "lora_alpha": 6,
        "peft_version": "0.21.2",
        "r": RANK,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "README.md").write_text("made by PEFT", encoding="utf-8")
    return tensors


@pytest.mark.parametrize("plan", AUTHORS, ids=lambda plan: plan.name)
def test_uploads_hold_the_trained_deltas_and_no_path(tmp_path, plan):
    recipe: Recipe = plan.recipe
    dtype = getattr(torch, recipe.dtype)
    trained = {name: tensor.to(dtype) for name, tensor in write_source(tmp_path / "source").items()}
    upload = tmp_path / "upload"
    write_upload(tmp_path / "source", upload, EXPERTS, recipe)
    stated = {"training.json"} if recipe.statement is Statement.TRAINING_JSON else set()
    names = {path.name for path in upload.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"} | stated
    assert "someone" not in (upload / "adapter_config.json").read_text(encoding="utf-8")
    written = load_file(upload / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    for stem in ("mlp.experts.base_layer", "mlp.experts"):
        a, b = f"{PREFIX}{stem}.lora_A.weight", f"{PREFIX}{stem}.lora_B.weight"
        wanted = deltas_by_loop(trained[a], trained[b], "rank_major", "standard")
        found = deltas_by_loop(written[a], written[b], recipe.packing, recipe.orientation)
        torch.testing.assert_close(found, wanted)
    attention = f"{PREFIX}self_attn.q_proj.lora_B.weight"
    assert torch.equal(written[attention], trained[attention])


def config_of(tmp_path, name):
    write_source(tmp_path / "source")
    recipe = next(plan.recipe for plan in AUTHORS if plan.name == name)
    write_upload(tmp_path / "source", tmp_path / "upload", EXPERTS, recipe)
    return json.loads((tmp_path / "upload" / "adapter_config.json").read_text(encoding="utf-8"))


def test_the_liar_is_stamped_against_its_data(tmp_path):
    config = config_of(tmp_path, "gorse")
    assert config["lora_B_layout"] == "rank_major"
    nested = config["unsloth_fused_expert_lora"]["parameters"]
    assert {name: detail["lora_B_layout"] for name, detail in nested.items()} == {
        "gate_up_proj": "rank_major",
        "down_proj": "rank_major",
    }


def test_a_megatron_bridge_upload_names_full_paths_and_no_peft(tmp_path):
    config = config_of(tmp_path, "dogwood")
    assert "peft_version" not in config
    assert config["target_parameters"] == [
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.experts.gate_up_proj",
    ]


def test_an_old_unsloth_upload_has_its_fingerprint_and_no_marker(tmp_path):
    config = config_of(tmp_path, "cedar")
    assert config["auto_mapping"]["unsloth_fixed"] is True
    assert not {"lora_B_layout", "unsloth_fused_expert_lora"} & set(config)


def test_an_upload_without_evidence_states_its_trainer(tmp_path):
    assert "lora_B_layout" not in config_of(tmp_path, "fir")
    training = json.loads((tmp_path / "upload" / "training.json").read_text(encoding="utf-8"))
    assert training["trainer"] == {"name": "unsloth_zoo", "version": "2026.8.17"}
    assert (training["schema"], training["base"]) == (1, "demo-moe")


def test_a_failed_training_says_what_failed():
    with pytest.raises(MaterialError) as caught:
        run_modules([("demo.no_such_module", "out")], print)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.task, copy.exit_code) == ("demo.no_such_module out", 1)
    assert "No module named demo.no_such_module" in copy.output
    message = str(copy)
    assert "demo.no_such_module out" in message
    assert "exit code 0 but ended with 1" in message
    assert "Run setup again" in message
