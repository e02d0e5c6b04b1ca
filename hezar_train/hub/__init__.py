"""The Hugging Face Hub: pushes from a run's folder, in the background or at once; downloads, verified before use.

Importing this package imports no client and opens no socket; both happen when something is really sent or fetched.
"""

from __future__ import annotations

from hezar_train.hub.client import (
    HubAddress,
    Pace,
    is_hub_address,
    names_hub_weights,
    parse_address,
    parse_repo_id,
    redact,
)
from hezar_train.hub.fetch import (
    FetchedRecipe,
    fetch_checkpoint,
    fetch_file,
    fetch_recipe,
    fetch_records,
    fetch_weights,
    named_code,
    refuse_foreign_code,
)
from hezar_train.hub.push import HubRecord, PushOutcome, PushTarget, push_files, push_run
from hezar_train.hub.pushed_files import MODEL_CONFIG_FOLDER, PushNames, model_config_writer, refuse_model_name
from hezar_train.hub.pusher import Pusher

__all__ = [
    "MODEL_CONFIG_FOLDER",
    "FetchedRecipe",
    "HubAddress",
    "HubRecord",
    "Pace",
    "PushNames",
    "PushOutcome",
    "PushTarget",
    "Pusher",
    "fetch_checkpoint",
    "fetch_file",
    "fetch_recipe",
    "fetch_records",
    "fetch_weights",
    "is_hub_address",
    "model_config_writer",
    "named_code",
    "names_hub_weights",
    "parse_address",
    "parse_repo_id",
    "push_files",
    "push_run",
    "redact",
    "refuse_foreign_code",
    "refuse_model_name",
]
