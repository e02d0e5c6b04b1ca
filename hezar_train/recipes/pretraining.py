"""A base model that one recipe trains and another one fine-tunes: trained once, kept in the user's cache.

Its training is a run like any other, killable and exact. It lies in the folder `pretrained` beside `trusted.json`,
under the name of its `output_dir` and a hash of recipe, config and options: what has changed is trained anew. When the
run is finished, its model is written beside it, whole or not at all. A folder that is deleted is made again; on the
same machine with the same weights, and a run that stands on them compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hezar_train.recipes.build import build_trainer
from hezar_train.recipes.recipe import LoadedRecipe, hash_of, hash_of_parts, load_recipe
from hezar_train.user_cache import cache_folder

__all__ = ["pretrained_by"]

KEPT = "pretrained"
RUN, MODEL, UNFINISHED = "run", "model", "model.unfinished"
NUM_HASH_DIGITS = 16


def pretrained_by(recipe: str | Path, overrides: Iterable[str] = ()) -> Path:
    """Return the folder of the model that a recipe makes, as its library loads it; train it, if that is not done yet.

    `recipe` is a name, a folder or a config file, as for `hezar-train train`. All processes of a run call this
    together. What is drawn at random afterwards does not depend on whether the model was trained or found.
    """
    loaded = load_recipe(recipe, overrides)
    folder = cache_folder() / KEPT / f"{Path(loaded.config.output_dir).name}-{_hash_of(loaded)}"
    if not (folder / MODEL).is_dir():
        _train(loaded, folder)
    return folder / MODEL


def _hash_of(loaded: LoadedRecipe) -> str:
    """Return a hash of all that decides what is trained."""
    fields = {name: value for name, value in loaded.config.to_dict().items() if name != "output_dir"}
    settings = json.dumps([fields, loaded.options], sort_keys=True)
    return hash_of_parts({"recipe": hash_of(loaded.folder), "settings": settings})[:NUM_HASH_DIGITS]


def _train(loaded: LoadedRecipe, folder: Path) -> None:
    """Train a recipe in a folder, or go on with it there, and write its model beside the run."""
    import torch

    from hezar_train.data import preserved_randomness
    from hezar_train.runtime import use_threads
    from hezar_train.runtime.logging import logger, make_visible

    make_visible(logger)
    logger.info("first, the base model is trained: %s, once, in %s", loaded.folder / loaded.config_name, folder)
    num_threads = torch.get_num_threads()
    config = replace(loaded.config, output_dir=str(folder / RUN), resume_from_checkpoint=True)
    with preserved_randomness():
        trainer = build_trainer(replace(loaded, config=config))
        trainer.train()
        trainer.save(folder / UNFINISHED, merge=True)
        trainer.runtime.processes.on_main(lambda: os.replace(folder / UNFINISHED, folder / MODEL))
    use_threads(num_threads)  # the run that is built now has a number of its own
