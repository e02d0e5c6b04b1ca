"""Start a loopback Hub for a person who wants to try without an account: `python -m tests.hub.server`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import threading
from pathlib import Path

from .loopback_hub import LoopbackHub

WELCOME = """\
A Hub is running; its repositories are in {folder}. In another terminal:

export HF_ENDPOINT={url}
export HF_TOKEN={token}

hf auth whoami
hf upload {user}/trial README.md
hf download {user}/trial README.md --local-dir /tmp/trial
hezar-train train image_classification push_to_hub=true hub_model_id={user}/digits

Ctrl-C ends it; the repositories stay.
"""


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.hub.server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="the port to listen at (default: any free one)")
    default = Path(tempfile.gettempdir(), "loopback_hub")
    parser.add_argument("--folder", type=Path, default=default, help="for the repositories (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), LoopbackHub(arguments.folder, arguments.port) as hub:
        print(WELCOME.format(folder=arguments.folder, url=hub.url, token=hub.token, user=hub.user), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
