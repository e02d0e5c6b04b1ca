"""`report` and `push`: publish a run as a page, or to the Hub."""

from __future__ import annotations

from pathlib import Path

import click

from hezar_train.cli.exit_codes import NotUploadedError
from hezar_train.cli.options import debug_option, plain_warnings, refuse_unwritable_file, run_argument
from hezar_train.cli.output import echo
from hezar_train.config.fields import HUB_STRATEGIES
from hezar_train.errors import ConfigError, HubError
from hezar_train.run_layout import COMPARISON_FILE, REPORT_FILE

__all__ = [
    "push",
    "report",
]


@click.command("report", short_help="Write a page with the curves of a run, or of several.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help=f"The page; else RUN/{REPORT_FILE} or {COMPARISON_FILE}.",
)
@debug_option
def report(runs: tuple[str, ...], out: str | None) -> None:
    """Write one HTML page without network: curves, results, config, checkpoints; also of a run that is under way.

    Several runs are compared on one page, ./comparison.html.

    \b
    Examples:
      hezar-train report runs/image_classification
      hezar-train report runs/first runs/second --out compared.html
    """
    from hezar_train.report import write_report

    usual = Path(runs[0], REPORT_FILE) if len(runs) == 1 else COMPARISON_FILE
    refuse_unwritable_file(usual if out is None else out, "--out FILE")
    echo(f"Open it in a browser: {write_report(runs, out)}")


@click.command("push", short_help="Push a run to the Hugging Face Hub.")
@run_argument
@click.option("--repo", metavar="OWNER/NAME", help="The repository; else the run's hub_model_id.")
@click.option("--revision", metavar="BRANCH", help="The branch; else the run's hub_revision, else the main one.")
@click.option("--strategy", type=click.Choice(HUB_STRATEGIES), help="What to push; else the run's hub_strategy.")
@click.option("--private/--public", default=None, help="If the repository has to be made; else as your account says.")
@click.option("--message", metavar="TEXT", help="The message of the commit.")
@debug_option
def push(
    run: str, repo: str | None, revision: str | None, strategy: str | None, private: bool | None, message: str | None
) -> None:
    """Push a run from its folder alone and wait for it: model, model card, records, checkpoints by the strategy.

    It finishes or repeats what a training could not upload. The token comes from the environment (HF_TOKEN) or from
    `hf auth login`.

    \b
    Examples:
      hezar-train push runs/image_classification
      hezar-train push runs/image_classification --repo me/digits --strategy best
    """
    from hezar_train.hub import push_run
    from hezar_train.recipes import run_config

    with plain_warnings():
        config = run_config(run)
    if repo is None and config.get("hub_model_id") is None:
        raise ConfigError(f"the config of {run} names no repository (hub_model_id). Name one: --repo OWNER/NAME")
    try:
        outcome = push_run(run, repo, revision=revision, strategy=strategy, private=private, commit_message=message)
    except HubError as error:
        raise NotUploadedError(str(error)) from error
    echo(f"{outcome}\n{outcome.url}")
