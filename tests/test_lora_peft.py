"""PEFT itself as the judge: what it trains and saves, converted, must act as it did under PEFT.

The installed version only, and few adapters; test_producers.py has the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_builders import BIT_FOR_BIT
from producer_builders import VARIANTS, read_logits
from producer_peft import list_peft_deltas, record, train
from product_builders import Product, add_deltas, convert, load_by_peft, read_served_deltas

from tasks.lora.convert import convert_adapter
from tasks.lora.plan import plan_control

TRAINED = ("whole",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, threads = tmp_path_factory.mktemp("trained"), torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    for name in TRAINED:
        record(train(VARIANTS[name]), root / name, list_peft_deltas, merge=True)
    torch.set_num_threads(threads)
    return root


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize("variant", TRAINED)
def test_a_converted_adapter_acts_as_under_peft(trained: Path, tmp_path: Path, variant: str) -> None:
    product = Product(trained / variant, variant)
    assert product.measure_logits(product.theirs["merged_logits"]) <= 1e-5
    assert product.measure_logits(product.theirs["base_logits"]) == 1
    found = product.look()
    assert [kind.name for kind in found.classes] == ["routed_experts", "router", "attention"]
    served = read_served_deltas(convert(found, tmp_path / "made"))
    assert served.keys() == product.deltas.keys()
    for name, delta in product.deltas.items():
        assert (served[name] - delta).norm() <= 1e-5 * delta.norm() != 0, name
    assert product.measure_logits(read_logits(add_deltas(product.build_base(), served))) <= 1e-5
    convert_adapter(found.files, plan_control(found.layout), tmp_path / "control")
    control = read_served_deltas(tmp_path / "control")
    assert product.measure_experts(control) > 0.5
    assert product.measure_logits(read_logits(add_deltas(product.build_base(), control))) > 0.1
    for format in BIT_FOR_BIT:
        folder = convert(found, tmp_path / format, format)
        loaded = load_by_peft(product.build_base(), folder)
        assert product.measure_logits(read_logits(loaded)) <= 1e-5, format
