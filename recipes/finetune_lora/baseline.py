"""What to compare with: the base model, asked the held-out questions, and given the beginning of what it has read.

python recipes/finetune_lora/baseline.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from recipe import BASE, is_held_out, load_base

from hezar_train.recipes import build_trainer, import_recipe, load_recipe

NUM_NEW_TOKENS = 12


def asked() -> dict[str, float]:
    """Evaluate the base as a run does: adapters that have learnt nothing add nothing."""
    with tempfile.TemporaryDirectory() as run:
        return build_trainer(load_recipe(Path(__file__).parent, [f"output_dir={run}"])).evaluate()


def known() -> float:
    """Return the share of held-out facts that the base completes, given the statement up to what is asked for."""
    network, tokenizer = load_base(None, "config.yaml")
    lines = (BASE / "facts.tsv").read_text(encoding="utf-8").splitlines()
    told = import_recipe(BASE / "recipe.py")
    facts = [fact for line in lines if is_held_out(line) for fact in told.both_languages(*line.split("\t"))]
    whole = [told.STATEMENTS[form][0].format(about, answer) for form, about, answer in facts]
    begun = [told.STATEMENTS[form][0].partition(" {1}")[0].format(about) for form, about, _ in facts]
    right = [completed(text, network, tokenizer) == end for text, end in zip(begun, whole, strict=True)]
    return sum(right) / len(right)


@torch.no_grad()
def completed(text: str, network: Any, tokenizer: Any) -> str:
    """Return a statement as the base ends it."""
    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    written = network.eval().generate(**ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    found: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return found


if __name__ == "__main__":
    listed = "  ".join(f"{name} {value:.3f}" for name, value in asked().items())
    sys.stdout.write(f"asked                {listed}\ngiven the beginning  exact_match {known():.3f}\n")
