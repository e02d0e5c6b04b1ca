"""What to compare with: the base model, asked the held-out questions, and given the beginning of each answer.

python recipes/finetune_lora/baseline.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from recipe import STATEMENTS, Fact, facts, pretrained

from hezar_train.recipes import build_trainer, load_recipe

NUM_NEW_TOKENS = 40


def asked() -> dict[str, float]:
    """Evaluate the base as a run does: adapters that have learnt nothing add nothing."""
    with tempfile.TemporaryDirectory() as run:
        return build_trainer(load_recipe(Path(__file__).parent, [f"output_dir={run}"])).evaluate()


def known(held_out: list[Fact]) -> float:
    """Return the share of facts that the base tells rightly if it is given the statement up to what was asked for."""
    network, tokenizer = pretrained(None, None)
    network.eval()
    return sum(completed(fact, network, tokenizer) == fact.told() for fact in held_out) / len(held_out)


@torch.no_grad()
def completed(fact: Fact, network: torch.nn.Module, tokenizer: object) -> str:
    """Return a statement as the base ends it."""
    beginning = STATEMENTS[fact.form][0].partition("{1}")[0].format(fact.about).rstrip()
    beginning = beginning[0].upper() + beginning[1:]
    ids = tokenizer(beginning, return_tensors="pt")  # type: ignore[operator]
    written = network.generate(**ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)  # type: ignore[operator]
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)  # type: ignore[attr-defined]
    return text


if __name__ == "__main__":
    listed = "  ".join(f"{name} {value:.3f}" for name, value in asked().items())
    sys.stdout.write(f"asked                {listed}\n")
    sys.stdout.write(f"given the beginning  exact_match {known([fact for fact in facts() if fact.is_held_out]):.3f}\n")
