from __future__ import annotations

import os
import subprocess
import sys

# each scene starts where a fresh interpreter does: no handlers anywhere
SCENES = """
import io, logging, os, sys
from hezar_train.runtime.logging import logger, make_visible

def fresh():
    for log in (logger, logging.getLogger()):
        log.handlers.clear()
    logger.setLevel(logging.NOTSET)
    sys.stderr = io.StringIO()

def scene(name):
    logger.info("hello")
    logger.warning("look out")
    print(name, sys.stderr.getvalue().splitlines())

fresh(); make_visible(logger); make_visible(logger); scene("nothing set up")
fresh(); os.environ["RANK"] = "1"; make_visible(logger); scene("another process"); del os.environ["RANK"]
fresh(); logging.basicConfig(format="mine: %(message)s", level="WARNING"); make_visible(logger); scene("own set-up")
fresh(); logger.addHandler(logging.StreamHandler()); make_visible(logger); scene("own handler")
fresh(); make_visible(logger); old = sys.stderr; sys.stderr = io.StringIO(); scene("moved"); print(old.getvalue())
"""


def test_the_package_is_heard_without_any_set_up_and_never_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCENES],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.splitlines() == [
        "nothing set up ['hello', 'look out']",
        "another process ['look out']",
        "own set-up ['mine: look out']",
        "own handler ['look out']",
        "moved ['hello', 'look out']",
        "",
    ]
