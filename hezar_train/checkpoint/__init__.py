"""Checkpoints: written whole or not at all, proven before they are believed, read without running anybody's code.

The layout
----------

A run keeps its checkpoints in one folder, each in a folder named after its step; any zero padding is read:

    checkpoints/00000120/
        model.safetensors        the bare model's tensors by name; tied tensors once
        optimizer.safetensors    the optimizer's tensors ("state.0.exp_avg"), and under "extra." all others
        trainer_state.json       {"state": ..., "model": ..., "optimizer": ..., "extra": ...}
        train_config.yaml        the config as it was asked for
        base_model.json          if only what is trained is held: the frozen base model that it stands on
        preprocessor/ ...        whatever the caller's folder writers wrote
        manifest.json            {"format": 1, "step": 120, "files": {path: {"size", "sha256"}}, "sha256": of all this}

Where processes have a share of the model each, theirs lie beside them (`shard_files.py`), under the same manifest.

In `trainer_state.json`, "state" is the trainer's state; "model" says which names are tied (`aliases`), which modules
have a state of a later form (`versions`), and what modules keep besides tensors (`extra`); "optimizer" and "extra" are
the trees of state dicts with each tensor replaced by its name. Plain JSON stands for itself and every other type has a
tag (`format.py` lists them), so a tuple comes back as a tuple, the key 0 as an int, NaN as NaN. Tensors are safetensors
(complex128, which that format lacks, as pairs of float64 that the header lists). Nothing in a checkpoint is code, names
code, or is a pickle. Opening one reads every node of the JSON and the headers of all tensors, and refuses whatever this
package cannot have written; tensors are read when they are asked for.

`manifest["sha256"]` is the SHA-256 of the manifest without that entry, as JSON with sorted keys and no spaces. The
first four files must be listed. A file that is not listed is ignored, one that is a link is refused.

Why a crash cannot hurt
-----------------------

A checkpoint exists when it has its name and its manifest verifies. It gets there in this order:

    1. a hidden folder `.tmp-...` beside its final place (a rename is atomic only within one file system)
    2. every file: written, fsynced; its hash is that of the bytes that were meant
    3. the manifest: written, fsynced; then the hidden folder itself, so that all names in it are on disk
    4. `before_commit`: the logs are made durable, so no checkpoint is ever ahead of its logs
    5. the rename, then fsync of the parent
    6. read back and verified
    7. retention: what goes is renamed to `.trash-...`, then deleted

Killed or cut from power before 5, there is a hidden folder that nobody reads and `clean` removes. After 5, the
checkpoint is complete, because everything in it was on disk before its name was. Between 5 and 7, there is one too
many. During 7, a half deleted folder no longer has a checkpoint's name. So at every moment the newest checkpoint that
had been finished is still there, whole; and if the disk itself fails, the hashes say so and the one before is taken.

A checkpoint that verifies is never written again: a resumed run that comes by the same step would write the same bytes.
One that does not verify is set aside as `.damaged-...`, never deleted.

A full disk stops a save, not the training: the hidden folder is removed, a warning is logged, the next save tries
again.

What a save costs
-----------------

In the background, training stalls for one copy of the tensors into host buffers that were made and touched beforehand
(`CheckpointWriter.reserve`); one thread then hashes and writes, both without Python's global lock. A save that falls
due before the last one is finished waits for it and says so. In line (`background=False`) no buffers are needed:
tensors leave the device one at a time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hezar_train.checkpoint.format import JSON, pack, read_tensors, unpack
    from hezar_train.checkpoint.lock import RunLock
    from hezar_train.checkpoint.manifest import (
        CONFIG_FILE,
        MANIFEST_FILE,
        MODEL_FILE,
        OPTIMIZER_FILE,
        STATE_FILE,
        verify,
    )
    from hezar_train.checkpoint.modules import load_module_state, module_state, unwrap
    from hezar_train.checkpoint.peft_adapters import (
        base_of,
        has_adapters,
        merged_copy,
        refuse_shared_prompts,
        write_adapter_configs,
    )
    from hezar_train.checkpoint.shard_files import local_part, whole
    from hezar_train.checkpoint.sharded import (
        SavingGroup,
        SharedStore,
        export_model,
        gather_shards,
        gather_whole,
        load_shards,
        share_of,
    )
    from hezar_train.checkpoint.standalone import Checkpointer
    from hezar_train.checkpoint.store import Checkpoint, CheckpointStore, Contents, Rejected, SnapshotBuffers, to_delete
    from hezar_train.checkpoint.trained_part import (
        BaseRecord,
        HeldPart,
        TrainedPart,
        base_differences,
        files_for_others,
        other_base,
        refuse_other_base,
    )
    from hezar_train.checkpoint.weights import (
        WeightReport,
        initial_weights,
        load_round,
        round_tensors,
        save_round,
        write_round,
    )
    from hezar_train.checkpoint.writer import CheckpointWriter

__all__ = [
    "CONFIG_FILE",
    "JSON",
    "MANIFEST_FILE",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "STATE_FILE",
    "BaseRecord",
    "Checkpoint",
    "CheckpointStore",
    "CheckpointWriter",
    "Checkpointer",
    "Contents",
    "HeldPart",
    "Rejected",
    "RunLock",
    "SavingGroup",
    "SharedStore",
    "SnapshotBuffers",
    "TrainedPart",
    "WeightReport",
    "base_differences",
    "base_of",
    "export_model",
    "files_for_others",
    "gather_shards",
    "gather_whole",
    "has_adapters",
    "initial_weights",
    "load_module_state",
    "load_round",
    "load_shards",
    "local_part",
    "merged_copy",
    "module_state",
    "other_base",
    "pack",
    "read_tensors",
    "refuse_other_base",
    "refuse_shared_prompts",
    "round_tensors",
    "save_round",
    "share_of",
    "to_delete",
    "unpack",
    "unwrap",
    "verify",
    "whole",
    "write_adapter_configs",
    "write_round",
]

_NAMES_OF_MODULE = {
    "standalone": ("Checkpointer",),
    "format": ("JSON", "pack", "read_tensors", "unpack"),
    "lock": ("RunLock",),
    "manifest": ("CONFIG_FILE", "MANIFEST_FILE", "MODEL_FILE", "OPTIMIZER_FILE", "STATE_FILE", "verify"),
    "modules": ("load_module_state", "module_state", "unwrap"),
    "peft_adapters": ("base_of", "has_adapters", "merged_copy", "refuse_shared_prompts", "write_adapter_configs"),
    "sharded": (
        "SavingGroup",
        "SharedStore",
        "export_model",
        "gather_shards",
        "gather_whole",
        "load_shards",
        "share_of",
    ),
    "shard_files": ("local_part", "whole"),
    "trained_part": (
        "BaseRecord",
        "HeldPart",
        "TrainedPart",
        "base_differences",
        "files_for_others",
        "other_base",
        "refuse_other_base",
    ),
    "store": ("Checkpoint", "CheckpointStore", "Contents", "Rejected", "SnapshotBuffers", "to_delete"),
    "weights": ("WeightReport", "initial_weights", "load_round", "round_tensors", "save_round", "write_round"),
    "writer": ("CheckpointWriter",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: what only looks at manifests needs no torch."""
    for module, names in _NAMES_OF_MODULE.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
