"""The Hub: pushes from a run's folder, in the background or at once, and downloads that are believed only when proven.

Importing this package imports no client and opens no socket; both happen when something is really sent or fetched.
"""

from __future__ import annotations

from hezar_train.hub.addresses import HubAddress, is_hub_address, names_hub_weights, parse_address, parse_repo_id
from hezar_train.hub.fetch import fetch_checkpoint, fetch_file, fetch_records, fetch_weights
from hezar_train.hub.layout import PushNames
from hezar_train.hub.model_config import MODEL_CONFIG_FOLDER, model_config_writer
from hezar_train.hub.pace import Pace
from hezar_train.hub.push import PushTarget, push_files, push_run
from hezar_train.hub.pusher import Pusher
from hezar_train.hub.recipes import FetchedRecipe, fetch_recipe
from hezar_train.hub.record import HubRecord, PushOutcome
from hezar_train.hub.redaction import redact
from hezar_train.hub.trust import named_code, refuse_foreign_code

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
]
