"""Merged checkpoints of the real unsloth_zoo, of before and after its change of packing, against adapters as read.

Both are trained here, each by its version unpacked beside the tests; unsloth_zoo's own merge says what it adds to every
expert. Without a package index that has these packages the tests fail.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_builders import LABEL, unpack_wheel
from product_builders import Product, add_deltas, load_by_peft
from test_producers import NEW, OLD, PRODUCERS, run_producer
from transformers import PreTrainedModel

from tasks.lora.errors import LayoutConflict
from tasks.lora.inspect import Inspection
from tasks.merged_reference import Uncompared, merged_check

pytestmark = pytest.mark.real

VARIANT = "whole"


@pytest.fixture(scope="module", params=[OLD, NEW])
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Product:
    facts, root = PRODUCERS[request.param], tmp_path_factory.mktemp("producer")
    packages = [unpack_wheel("peft", facts.peft, root / "packages")]
    packages.append(unpack_wheel("unsloth_zoo", str(facts.unsloth_zoo), root / "packages"))
    made = run_producer(replace(facts, variants=(VARIANT,)), packages, root / "made")
    return Product(made / VARIANT, VARIANT)


def judge(found: Inspection, base: Path, model: PreTrainedModel, folder: Path) -> tuple[bool, type | None]:
    """Whether the check passed, and its error."""
    model.save_pretrained(folder)
    result = merged_check(found.files, found.layout, folder, base)
    assert not isinstance(result, Uncompared)
    assert found.label == LABEL and dict(result.figures)["matrices"] > 24
    return result.passed, result.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_own_merge_agrees_with_what_it_trained(
    product: Product, tmp_path: Path, dtype: torch.dtype
) -> None:
    product.build_base().to(dtype).save_pretrained(tmp_path / "base")
    start = product.build_base().to(dtype).float()
    merged = add_deltas(start, product.deltas).to(dtype)
    found = product.look()
    assert judge(found, tmp_path / "base", merged, tmp_path / "merged") == (True, None)
    packing = found.packing[0].value
    assert packing is not None
    misread = product.look(forced=packing.other)
    assert judge(misread, tmp_path / "base", merged, tmp_path / "again") == (False, LayoutConflict)


def test_pefts_merge_of_it_is_right_only_since_the_change(product: Product, tmp_path: Path) -> None:
    """unslothai/unsloth#6930: PEFT merges what unsloth_zoo trained as if it were rank-major."""
    product.build_base().save_pretrained(tmp_path / "base")
    merged = load_by_peft(product.build_base(), product.folder / "adapter").merge_and_unload()
    found = product.look()
    is_grouped = found.packing[0].value == "grouped_by_expert"
    assert judge(found, tmp_path / "base", merged, tmp_path / "merged") == (
        (False, LayoutConflict) if is_grouped else (True, None)
    )
