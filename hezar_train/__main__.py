"""`python -m hezar_train`: the command line without its script."""

from __future__ import annotations

from hezar_train.cli import main

if __name__ == "__main__":
    main()
