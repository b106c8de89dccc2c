"""Run with an unpacked lm-evaluation-harness on the path: `producer_lm_eval.py TASK.json`, prints its figures as JSON.

The task: {"base", "adapter" or null, "max_length", "texts": […], "answers": [[prompt, text], …]}. The harness loads,
tokenises, cuts and scores by itself; its own metric makes bits per byte of its own log-likelihoods.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from lm_eval.api.metrics import bits_per_byte
from lm_eval.models.huggingface import HFLM


def main(path: str) -> None:
    task = json.loads(Path(path).read_text())

    def load(*, bos: bool) -> HFLM:
        options = {
            "max_length": task["max_length"],
            "add_bos_token": bos,
            "device": "cpu",
            "dtype": "float32",
        }
        return HFLM(pretrained=task["base"], peft=task["adapter"], batch_size=1, **options)

    # Before a whole text it puts the BOS by itself; with add_bos_token there would be two.
    rolling = load(bos=False).loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in task["texts"]])
    pairs = [SimpleNamespace(args=(prompt, text)) for prompt, text in task["answers"]]
    after = [likelihood for likelihood, _ in load(bos=True).loglikelihood(pairs)]
    said = {}
    for name, found, texts in (
        ("texts", rolling, task["texts"]),
        ("answers", after, [text for _, text in task["answers"]]),
    ):
        sizes = [len(text.encode()) for text in texts]
        said[name] = {"loglikelihoods": found, "bpb": bits_per_byte(list(zip(found, sizes, strict=True)))}
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
