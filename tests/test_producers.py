"""The programs that write adapters, judging what we make of them.

Each adapter here is trained for real: by PEFT, or by PEFT with unsloth_zoo's own forward, each version unpacked beside
the tests and run in a process of its own. Converted, an adapter must do what its producer's forward did, and add to
every weight what its producer's merge adds; read with the other packing it must not. What we write is given back to
PEFT 0.21.2. Without a package index that has these packages the tests fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lora_builders import BIT_FOR_BIT, LABEL, unpack_wheel
from producer_builders import VARIANTS, read_logits
from product_builders import Product, add_deltas, convert, load_by_peft, read_served_deltas

from tasks.lora.convert import convert_adapter
from tasks.lora.errors import LayoutConflict
from tasks.lora.inspect import Inspection
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.packing import Source
from tasks.lora.plan import plan_control
from tasks.lora.trainers import TrainingStatement

pytestmark = pytest.mark.real

# Relative errors of the right reading, at most, and of the other one, at least. A forward in bfloat16 is compared with
# the same numbers in float32: there it may differ by what bfloat16 rounds.
RIGHT, WRONG, BF16_FORWARD = 1e-5, 0.5, 3e-2
# Parameters with in = out. unsloth_zoo up to 2026.9.7 trains them in the other orientation than it merges them in.
SQUARES = {"square_gate_up", "square_down", "lone_square"}
EVERY = tuple(name for name in VARIANTS if name != "named_projections")
ONE_OF_EACH = ("whole", "small", "stack", "gate_up_only", "down_only", "square_down")


@dataclass(frozen=True)
class Producer:
    """Versions; what their files are, and which evidence settles it; what they train."""

    peft: str
    packing: Packing
    orientation: Orientation
    decided_by: Source
    variants: tuple[str, ...] = EVERY
    unsloth_zoo: str | None = None
    layout_setting: str | None = None


OLD, OLD_SWAPPED = "unsloth_zoo-2026.9.5", "unsloth_zoo-2026.9.5-peft-0.18.1"
NEW, TOLD = "unsloth_zoo-2026.9.6", "unsloth_zoo-2026.9.6-told-grouped"
AGAIN = "whole-again"  # 2026.9.6 saves what 2026.9.5 trained
_RANK_MAJOR, _GROUPED = Packing.RANK_MAJOR, Packing.GROUPED_BY_EXPERT
_STANDARD, _SWAPPED = Orientation.STANDARD, Orientation.SWAPPED
PRODUCERS = {
    "peft-0.21.2": Producer("0.21.2", _RANK_MAJOR, _STANDARD, Source.TENSORS, tuple(VARIANTS)),
    "peft-0.19.0": Producer("0.19.0", _RANK_MAJOR, _SWAPPED, Source.TENSORS, tuple(VARIANTS)),
    "peft-0.18.1": Producer("0.18.1", _RANK_MAJOR, _SWAPPED, Source.TENSORS),
    OLD: Producer("0.21.2", _GROUPED, _STANDARD, Source.FINGERPRINT, unsloth_zoo="2026.9.5"),
    OLD_SWAPPED: Producer("0.18.1", _GROUPED, _SWAPPED, Source.FINGERPRINT, ONE_OF_EACH, "2026.9.5"),
    NEW: Producer("0.21.2", _RANK_MAJOR, _STANDARD, Source.MARKER, unsloth_zoo="2026.9.6"),
    TOLD: Producer("0.21.2", _GROUPED, _STANDARD, Source.MARKER, ("whole",), "2026.9.6", _GROUPED),
}
PRODUCTS = [(name, variant) for name, producer in PRODUCERS.items() for variant in producer.variants]
CONSISTENT = [
    (name, variant) for name, variant in PRODUCTS if not PRODUCERS[name].unsloth_zoo or variant not in SQUARES
]


def run_producer(producer: Producer, packages: list[Path], folder: Path, *more: str) -> Path:
    """Train all that one producer makes, in a process of its own, and return the folder of its products."""
    folder.mkdir()
    zoo = producer.unsloth_zoo
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("UNSLOTH_")}
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, [*packages, Path(__file__).parent])),
        "OMP_NUM_THREADS": "1",  # tiny tensors: a second thread only waits
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_ZOO_DISABLE_GPU_INIT": "1",
        "UNSLOTH_MOE_BACKEND": "native_torch",
        "UNSLOTH_COMPILE_LOCATION": str(folder / "compiled"),
    }
    if producer.layout_setting is not None:
        settings["UNSLOTH_MOE_LORA_B_LAYOUT"] = producer.layout_setting
    script = Path(__file__).with_name("producer_peft.py" if zoo is None else "producer_unsloth.py")
    done = subprocess.run(
        [sys.executable, script, folder, *producer.variants, *more],
        env=inherited | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == " ".join(filter(None, [producer.peft, zoo]))
    return folder


@pytest.fixture(scope="session")
def produced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each producer's products, all made at once: two processes at a time.

    unsloth_zoo 2026.9.6 also saves again what 2026.9.5 trained, so it waits for that.
    """
    root = tmp_path_factory.mktemp("producers")
    wanted = {("peft", each.peft) for each in PRODUCERS.values()}
    wanted |= {("unsloth_zoo", each.unsloth_zoo) for each in PRODUCERS.values() if each.unsloth_zoo}
    unpacked = {
        (name, version): unpack_wheel(name, version, root / "packages") for name, version in sorted(wanted)
    }
    running: dict[str, Future[Path]] = {}

    def produce(name: str) -> Path:
        producer = PRODUCERS[name]
        packages = [unpacked["peft", producer.peft]]
        if producer.unsloth_zoo is not None:
            packages.append(unpacked["unsloth_zoo", producer.unsloth_zoo])
        more = []
        if name == NEW:
            more = [f"{AGAIN}={running[OLD].result() / 'whole' / 'adapter'}"]
        return run_producer(producer, packages, root / name, *more)

    with ThreadPoolExecutor(2) as pool:
        for name in PRODUCERS:
            running[name] = pool.submit(produce, name)
    return {name: future.result() for name, future in running.items()}


def read_weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def look_decided(product: Product, facts: Producer) -> Inspection:
    """The product with the right packing; forced where nothing in it tells."""
    found = product.look()
    return product.look(forced=facts.packing) if found.undecided else found


@pytest.mark.parametrize(("name", "variant"), PRODUCTS)
def test_its_files_tell_what_they_are(produced: dict[str, Path], name: str, variant: str) -> None:
    facts, found = PRODUCERS[name], Product(produced[name] / variant, variant).look()
    assert found.orientation is facts.orientation
    for decision in found.packing:
        said = [item.says for item in decision.evidence if item.source is Source.TENSORS]
        if variant == "small" and said == [None]:  # 12 columns are few
            assert decision.undecided == (facts.decided_by is Source.TENSORS)
            continue
        assert said == [facts.packing]
        assert (decision.value, decision.decided_by) == (facts.packing, facts.decided_by)


@pytest.mark.parametrize(("name", "variant"), PRODUCTS)
def test_its_merge_adds_what_we_serve(
    produced: dict[str, Path], tmp_path: Path, name: str, variant: str
) -> None:
    product = Product(produced[name] / variant, variant)
    found = look_decided(product, PRODUCERS[name])
    served, theirs = read_served_deltas(convert(found, tmp_path / "made")), product.deltas
    for module, delta in theirs.items():
        assert delta.norm() > 0.1, f"{module}: nothing was trained"
        assert (served[module] - delta).norm() <= RIGHT * delta.norm(), module
    assert not any(delta.any() for module, delta in served.items() if module not in theirs)
    convert_adapter(found.files, plan_control(found.layout), tmp_path / "control")
    assert product.measure_experts(read_served_deltas(tmp_path / "control")) > WRONG


@pytest.mark.parametrize(("name", "variant"), CONSISTENT)
def test_its_forward_does_what_we_serve(
    produced: dict[str, Path], tmp_path: Path, name: str, variant: str
) -> None:
    """Merged into the base by the engine's names, and loaded by PEFT 0.21.2, from both target formats."""
    product = Product(produced[name] / variant, variant)
    native = product.measure_logits(product.theirs["logits"])
    assert native <= (BF16_FORWARD if variant == "bf16" else RIGHT)
    if "merged_logits" in product.theirs:
        assert product.measure_logits(product.theirs["merged_logits"]) <= RIGHT
    found = look_decided(product, PRODUCERS[name])
    convert_adapter(found.files, plan_control(found.layout), tmp_path / "control")
    for folder, least, most in (
        (convert(found, tmp_path / "made"), 0.0, RIGHT),
        # Less than the experts' own error: the attention is right in both.
        (tmp_path / "control", 0.3, 2.0),
    ):
        merged = add_deltas(product.build_base(), read_served_deltas(folder))
        assert least <= product.measure_logits(read_logits(merged)) <= most
    for format in BIT_FOR_BIT:
        folder = convert(found, tmp_path / format, format)
        loaded = load_by_peft(product.build_base(), folder)
        assert product.measure_logits(read_logits(loaded)) <= RIGHT, format
        # Our own output is an adapter too, and says itself what it is.
        again = product.look(folder)
        assert {decision.decided_by for decision in again.packing} <= {Source.MARKER}
        assert read_weights(convert(again, tmp_path / f"again-{format}")) == read_weights(tmp_path / "made")


@pytest.mark.parametrize(("name", "variant"), sorted(set(PRODUCTS) - set(CONSISTENT)))
def test_unsloth_disagrees_with_itself_about_square_parameters(
    produced: dict[str, Path], name: str, variant: str
) -> None:
    """So no reading could do what both its forward and its merge do; ours is the merge's.

    Qwen3-30B-A3B has no such parameter. Source: unsloth_zoo temporary_patches/moe_utils.py,
    extract_moe_lora_weights_for_grouped_mm, where both shapes match; 2026.9.8 mended it.
    """
    product = Product(produced[name] / variant, variant)
    merged = add_deltas(product.build_base(), product.deltas)
    assert product.measure_logits(read_logits(merged)) > WRONG


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in {"down_only", "lone_square"}])
def test_what_peft_saves_again_is_the_same_adapter(
    produced: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    """PEFT turns per-expert files into stacked ones of twice the rank, gate and up in blocks of their own.

    Without gate and up the blocks are zeros, and nothing tells them from zeros of twice the rank.
    """
    product = Product(produced["peft-0.21.2"] / variant, variant)
    made = convert(look_decided(product, PRODUCERS["peft-0.21.2"]), tmp_path / "made")
    loaded = load_by_peft(product.build_base().to(VARIANTS[variant].dtype), made)
    loaded.save_pretrained(tmp_path / "saved")
    found = product.look(tmp_path / "saved")
    assert found.layout.block_diagonal
    again = convert(found, tmp_path / "again")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (again / file).read_bytes() == (made / file).read_bytes()


def test_an_old_adapter_saved_again_carries_a_false_marker(produced: dict[str, Path], tmp_path: Path) -> None:
    """unsloth_zoo 2026.9.6 to 2026.9.9 stamps rank_major on whatever it saves; here on what 2026.9.5 trained."""
    old, stamped = Product(produced[OLD] / "whole", "whole"), Product(produced[NEW] / AGAIN, "whole")
    with pytest.raises(LayoutConflict) as caught:
        stamped.look()
    for part in (LABEL, "gate_up_proj", "rank_major", "grouped_by_expert", "marker"):
        assert part in str(caught.value)
    found = stamped.look(forced=Packing.GROUPED_BY_EXPERT)
    served = read_served_deltas(convert(found, tmp_path / "made"))
    assert old.measure_logits(read_logits(add_deltas(old.build_base(), served))) <= RIGHT
    # The program that stamped it reads it wrong, too.
    assert old.measure_logits(stamped.theirs["logits"]) > WRONG


@pytest.mark.parametrize("name", [OLD, OLD_SWAPPED, NEW])
def test_the_trainers_name_and_version_say_the_same(produced: dict[str, Path], name: str) -> None:
    facts, product = PRODUCERS[name], Product(produced[name] / "whole", "whole")
    for decision in product.look(training=TrainingStatement("unsloth_zoo", facts.unsloth_zoo)).packing:
        said = [item.says for item in decision.evidence if item.source is Source.TRAINING]
        assert said == [facts.packing]
        assert decision.value is facts.packing


@pytest.mark.parametrize("name", [NEW, TOLD])
def test_the_marker_is_the_programs_own(produced: dict[str, Path], name: str) -> None:
    for decision in Product(produced[name] / "whole", "whole").look().packing:
        nested = f"unsloth_fused_expert_lora.parameters.{decision.parameter}.lora_B_layout"
        assert decision.evidence[0].detail == nested
