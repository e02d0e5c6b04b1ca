"""The model card: metadata that the Hub understands and a page that a person can trust, from a run's folder alone.

The page has metrics with their intervals, how to load the model, the curves, settings, data, hardware and versions.
What is written here stands between two markers; everything outside of them, and every entry of the metadata that a run
does not know better, is somebody's own and is kept.
"""

from __future__ import annotations

import html
import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml import YAMLError

from hezar_train.config.files import read_json, refuse_endless_yaml
from hezar_train.errors import ConfigError, DataError, printable
from hezar_train.events import read_rows, read_starts
from hezar_train.hub.client import names_hub_weights, parse_address, parse_repo_id, redact
from hezar_train.hub.pushed_files import CARD_FILE, TRAIN_FOLDER, SavedRun
from hezar_train.report.read import LARGEST, is_moment, is_number
from hezar_train.run_layout import (
    ADAPTER_CONFIG_FILE,
    BASE_FILE,
    CURVES_FILE,
    HEZAR_CONFIG_FILE,
    METRICS_FILE,
    MODEL_FILE,
    TRAINED_FILE,
)
from hezar_train.types import TaskType

__all__ = [
    "BEGIN",
    "END",
    "Measured",
    "RunFacts",
    "render_card",
]

PIPELINE_TAGS = {
    TaskType.AUDIO_CLASSIFICATION: "audio-classification",
    TaskType.BACKBONE: "feature-extraction",
    TaskType.IMAGE2TEXT: "image-to-text",
    TaskType.IMAGE_CLASSIFICATION: "image-classification",
    TaskType.LANGUAGE_MODELING: "text-generation",
    TaskType.MASK_FILLING: "fill-mask",
    TaskType.SEQUENCE_LABELING: "token-classification",
    TaskType.SPEECH_RECOGNITION: "automatic-speech-recognition",
    TaskType.TEXT_CLASSIFICATION: "text-classification",
    TaskType.TEXT_GENERATION: "text-generation",
}
"""The Hub's words for tasks; it has none for the others."""

SHOWN_SETTINGS = (
    "num_epochs", "max_steps", "batch_size", "global_batch_size", "gradient_accumulation_steps", "optimizer",
    "learning_rate", "weight_decay", "momentum", "lr_scheduler", "warmup_steps", "max_grad_norm", "mixed_precision",
    "criterion", "seed", "deterministic",
)  # fmt: skip

BEGIN = "<!-- hezar-train: begin (written anew at each push; write outside of the two markers) -->"
END = "<!-- hezar-train: end -->"
BEGIN_MARK, END_MARK = "<!-- hezar-train: begin", "<!-- hezar-train: end -->"
LIBRARY = "hezar-train"
UNKNOWN_DATA = "unknown"
MARKUP = re.compile(r"[\\`*\[\]<>&|~]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.")
BACKTICKS = re.compile("`+")
OTHER_TASK = "other"

logger = logging.getLogger(__name__)


def render_card(
    facts: RunFacts,
    repo_id: str,
    files: Mapping[str, Path],
    existing: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """Return the card's text; `files` are those of the push, `metadata` is what the user says (`hub_card`)."""
    from huggingface_hub import ModelCard

    old = _parsed(existing)
    data = _metadata(facts, repo_id, files, old, metadata or {})
    body = _merged_body("" if old is None else str(old.text), _page(facts, repo_id, files))
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n{body}")
    return redact(str(card.content))


def _parsed(existing: str | None) -> Any:
    """Read a card that is there, which may be anybody's; one whose metadata cannot be read is kept as text."""
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if existing is None or not existing.strip():
        return None
    try:
        if block := REGEX_YAML_BLOCK.search(existing):
            refuse_endless_yaml(block[2])
        return ModelCard(existing, ignore_metadata_errors=True)
    except (ValueError, TypeError, LookupError, AttributeError, YAMLError) as error:
        logger.warning("the metadata of the existing %s cannot be read and is replaced: %s", CARD_FILE, error)
        parts = existing.split("\n---", 1) if existing.lstrip().startswith("---") else ["", existing]
        card = ModelCard("---\n{}\n---\n")
        card.text = parts[-1].lstrip("\n")
        return card


def _metadata(facts: RunFacts, repo_id: str, files: Mapping[str, Path], old: Any, given: Mapping[str, Any]) -> Any:
    """Join what the run knows with what somebody wrote: `hub_card` wins, then the card that is there, then guesses."""
    from huggingface_hub import EvalResult, ModelCardData

    written = {} if old is None else vars(old.data)
    kept = {key: value for key, value in written.items() if value is not None and not hasattr(ModelCardData, key)}
    others = kept.pop("eval_results", None)
    others = [one for one in others if isinstance(one, EvalResult)] if isinstance(others, list) else []
    names = [str(one["dataset_name"]) for one in facts.data().values() if "dataset_name" in one]
    guessed = {
        "base_model": _base_model(files) or facts.base_model(),
        "datasets": list(dict.fromkeys(names)) or None,
        "pipeline_tag": facts.pipeline_tag,
        "library_name": _library(files),
        "tags": [*_adapter_tags(files), LIBRARY],
    }
    known = {key: value for key, value in guessed.items() if value is not None} | kept | dict(given)
    known["tags"] = list(dict.fromkeys([*_listed(known.get("tags")), LIBRARY]))
    known["model_name"] = repo_id.rpartition("/")[2]
    results = _eval_results(facts, known)
    own = {one.unique_identifier for one in results}
    results += [one for one in others if one.unique_identifier not in own]
    known["metrics"] = sorted({*_listed(kept.get("metrics")), *(one.metric_type for one in results)}) or None
    return ModelCardData(**{**known, "eval_results": results or None})


def _eval_results(facts: RunFacts, known: Mapping[str, Any]) -> list[Any]:
    from huggingface_hub import EvalResult

    names = _listed(known.get("datasets"))
    dataset = names[0] if names else str(facts.recipe.get("path", "") or UNKNOWN_DATA).rpartition("/")[2]
    task = known.get("pipeline_tag") or (facts.task or OTHER_TASK).replace("_", "-")
    return [
        EvalResult(
            task_type=str(task),
            dataset_type=dataset,
            dataset_name=f"{dataset}, {one.set_name}" if one.set_name else dataset,
            dataset_split=one.set_name or "evaluation",
            metric_type=one.name,
            metric_name=one.name,
            metric_value=one.value,
        )
        for one in facts.measured()
    ]


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple | set) else [str(value)]


def _merged_body(old: str, page: str) -> str:
    """Put our part where it was before, or behind what somebody wrote."""
    ours = f"{BEGIN}\n{page}\n{END}"
    begin, end = old.find(BEGIN_MARK), old.find(END_MARK)
    if 0 <= begin < end:
        return old[:begin] + ours + old[end + len(END_MARK) :]
    return f"\n{ours}\n" if not old.strip() else f"{old.rstrip()}\n\n{ours}\n"


def _page(facts: RunFacts, repo_id: str, files: Mapping[str, Path]) -> str:
    sections = [
        f"# {repo_id.rpartition('/')[2]}\n\n{_opening(facts)}{_standing(files)}",
        _results(facts),
        f"## Load it\n\n{_fenced(_loading(repo_id, files), 'python')}",
        _curves(files),
        "## Training\n\n" + _table(("setting", "value"), list(facts.training().items())),
        _data(facts),
        _machine(facts),
        _command(facts, repo_id),
    ]
    return "\n\n".join(section for section in sections if section)


def _opening(facts: RunFacts) -> str:
    task = f" for {_plain(facts.task.replace('_', ' '))}" if facts.task else ""
    described = _named(facts.environment.get("model"))
    model, size = described.get("class"), described.get("num_parameters")
    what = f"A {_code(model)}" + (f" with {size:,} parameters" if isinstance(size, int) else "") if model else "A model"
    return f"{what}, trained{task} with {LIBRARY}."


def _standing(files: Mapping[str, Path]) -> str:
    """Say what is missing here: the base model that adapters, or other trained parts, belong to."""
    if BASE_FILE not in files:
        return ""
    kind = str(_json(files.get(ADAPTER_CONFIG_FILE)).get("peft_type") or "")
    what = f"adapters ({_code(kind)})" if kind else "what was trained"
    return f" This repository holds {what}, without the base model beneath: {_named_base(files)}."


def _named_base(files: Mapping[str, Path]) -> str:
    told = _named(_json(files.get(BASE_FILE)).get("base"))
    name, kind = _base_model(files), _code(told.get("class"))
    revision = f", revision {_code(told['revision'])}" if name and told.get("revision") else ""
    return f"{kind} of {_code(name)}{revision}" if name else f"a {kind} of the author's, which has no name on the Hub"


def _base_model(files: Mapping[str, Path]) -> str | None:
    """Return the repository of the base model, where it is one; a folder on somebody's machine is none."""
    name = _named(_json(files.get(BASE_FILE)).get("base")).get("name")
    if not isinstance(name, str):
        return None
    try:
        parse_repo_id(name if "/" in name else f"hub/{name}")  # the oldest repositories have no owner
    except ConfigError:
        return None
    return None if Path(name).exists() else name


def _adapter_tags(files: Mapping[str, Path]) -> list[str]:
    kind = _json(files.get(ADAPTER_CONFIG_FILE)).get("peft_type")
    return [kind.lower()] if isinstance(kind, str) and kind.isidentifier() else []


def _results(facts: RunFacts) -> str:
    measured = facts.measured()
    if not measured:
        return ""
    has_sets = any(one.set_name for one in measured)
    has_intervals = any(one.low is not None for one in measured)
    header = ["metric", *(["set"] if has_sets else []), "value", *(["95 % interval"] if has_intervals else [])]
    rows = [_result_row(one, has_sets, has_intervals) for one in measured]
    note = f"Measured on the whole evaluation set at step {facts.evaluated_step}."
    if facts.evaluated_step != facts.step:
        note += f" The weights are those of step {facts.step}."
    return f"## Results\n\n{note}\n\n{_table(header, rows)}"


def _result_row(one: Measured, has_sets: bool, has_intervals: bool) -> list[str]:
    interval = "" if one.low is None or one.high is None else f"{one.low:.4f} to {one.high:.4f}"
    return [
        one.name, *([one.set_name] if has_sets else []), f"{one.value:.4f}", *([interval] if has_intervals else [])
    ]  # fmt: skip


def _curves(files: Mapping[str, Path]) -> str:
    found = [name for name in files if name.endswith(f"/{CURVES_FILE}")]
    return f"## Curves\n\n![The run's curves]({found[0]})" if found else ""


def _data(facts: RunFacts) -> str:
    rows = [
        [use, one.get("dataset_name", one.get("kind", "")), one.get("size", ""), _code(one.get("fingerprint", ""))]
        for use, one in facts.data().items()
    ]
    return "## Data\n\n" + _table(("used for", "dataset", "samples", "fingerprint"), rows) if rows else ""


def _machine(facts: RunFacts) -> str:
    rows = list(_named(facts.environment.get("hardware")).items())
    if facts.hours is not None:
        rows.append(("hours", f"{facts.hours:.2f}" if facts.hours >= 0.01 else f"{facts.hours:.5f}"))
    rows += list(_named(facts.environment.get("versions")).items())
    return "## Where it was trained\n\n" + _table(("what", "value"), rows) if rows else ""


def _command(facts: RunFacts, repo_id: str) -> str:
    command = facts.environment.get("command")
    parts = [
        f"## Do it again\n\nSeed {_plain(facts.settings.get('seed', '?'))}; the whole config is in `{TRAIN_FOLDER}/`."
    ]
    if command:
        parts.append(_fenced(str(command), "bash"))
    if facts.recipe.get("sha256"):
        parts.append(f"With the same recipe (SHA-256 {_code(facts.recipe['sha256'])}) on this machine:")
        parts.append(_fenced(f"hezar-train reproduce {repo_id}", "bash"))
    return "\n\n".join(parts)


def _library(files: Mapping[str, Path]) -> str | None:
    if ADAPTER_CONFIG_FILE in files:
        return "peft"
    if HEZAR_CONFIG_FILE in files:
        return "hezar"
    return "transformers" if "model_type" in _json(files.get("config.json")) else None


def _loading(repo_id: str, files: Mapping[str, Path]) -> str:
    library = _library(files)
    if library == "peft" or TRAINED_FILE in files:
        return _loading_part(repo_id, files)
    if library == "transformers":
        return _loading_transformers(repo_id, files)
    if library == "hezar" and "model.pt" in files:
        return f'from hezar.models import Model\n\nmodel = Model.load("{repo_id}")'
    fetch = f'load_file(hf_hub_download("{repo_id}", "{_weights_name(files)}"))'
    lines = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file", ""]
    if library == "hezar":
        lines = ["from hezar.builders import build_model", "from hezar.configs import ModelConfig", *lines]
        lines += [f'config = ModelConfig.load("{repo_id}")', "model = build_model(config.name, config)"]
    return "\n".join([*lines, f"model.load_state_dict({fetch})"])


def _loading_part(repo_id: str, files: Mapping[str, Path]) -> str:
    told = str(_named(_json(files.get(BASE_FILE)).get("base")).get("class"))
    kind, name = told if told.isidentifier() else "AutoModel", _base_model(files)
    base = [f'base = {kind}.from_pretrained("{name}")'] if name else [f"base = ...  # the {kind} it was trained on"]
    known = [f"from transformers import {kind}"] if name else []
    if ADAPTER_CONFIG_FILE in files:
        peft = ["from peft import PeftModel", *known, ""]
        return "\n".join([*peft, *base, f'model = PeftModel.from_pretrained(base, "{repo_id}")'])
    lines = [
        "from huggingface_hub import hf_hub_download",
        "from safetensors.torch import load_file",
        *known,
        "",
        *base,
    ]
    trained = f'load_file(hf_hub_download("{repo_id}", "{TRAINED_FILE}"))'
    return "\n".join([*lines, f"base.load_state_dict({trained}, strict=False)"])


def _loading_transformers(repo_id: str, files: Mapping[str, Path]) -> str:
    architectures = _json(files.get("config.json")).get("architectures") or []
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    model = named if named.isidentifier() else "AutoModel"  # it becomes code that a reader copies
    has_tokenizer = _has_any(files, ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model"))
    reader = "AutoTokenizer" if has_tokenizer else "AutoProcessor"
    if not has_tokenizer and not _has_any(files, ("preprocessor_config.json", "processor_config.json")):
        return f'from transformers import {model}\n\nmodel = {model}.from_pretrained("{repo_id}")'
    name = "tokenizer" if has_tokenizer else "processor"
    return (
        f"from transformers import {reader}, {model}\n\n"
        f'{name} = {reader}.from_pretrained("{repo_id}")\n'
        f'model = {model}.from_pretrained("{repo_id}")'
    )


def _has_any(files: Collection[str], names: Collection[str]) -> bool:
    return any(name in files for name in names)


def _weights_name(files: Collection[str]) -> str:
    found = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    return found[0] if found else MODEL_FILE


def _json(path: Path | None) -> dict[str, Any]:
    return {} if path is None else read_json(path)


class _Markup(str):
    """A text that is Markdown already."""


def _code(value: Any) -> _Markup:
    """Return text as code; within a line nothing but a backtick and, in a table, a bar would end it."""
    text = printable(" ".join(str(value or "").replace("`", "'").split()))
    return _Markup(f"`{text}`" if text else "")


def _fenced(text: str, language: str) -> str:
    """Return a block of code, between fences that the text cannot close and without a mark of ours."""
    longest = max((len(run) for run in BACKTICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text).replace('<!--', '<!-')}\n{fence}"


def _plain(value: Any) -> str:
    """Return text on one line that Markdown shows as it is: names and data of others may hold markup."""
    return printable(" ".join(MARKUP.sub(_escaped, str(value)).split()))


def _escaped(found: re.Match[str]) -> str:
    return html.escape(found[0]) if found[0] in "<>&" else f"\\{found[0]}"


def _table(header: Collection[str], rows: Collection[Collection[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return value.replace("|", "\\|") if isinstance(value, _Markup) else _plain(value)


@dataclass(frozen=True)
class Measured:
    """One metric of the evaluation, on the set of that name (empty for a single one)."""

    name: str
    value: float
    set_name: str = ""
    low: float | None = None
    high: float | None = None


class RunFacts:
    """The facts of one run at one of its checkpoints."""

    def __init__(self, run: SavedRun, step: int) -> None:
        self.step, self.settings = step, run.settings
        self.plan = read_json(run.layout.plan)
        self.recipe = read_json(run.layout.recipe)
        starts = read_starts(run.layout.root)
        self.environment: dict[str, Any] = starts[-1] if starts else {}
        self._evaluation = run.evaluation_at(step)
        self.hours = _hours(run, [float(one["time"]) for one in starts if is_moment(one.get("time"))])

    @property
    def task(self) -> str | None:
        """The config's task."""
        task = self.settings.get("task")
        return None if task is None else str(task)

    @property
    def pipeline_tag(self) -> str | None:
        """The Hub's word for the task."""
        return None if self.task not in [*TaskType] else PIPELINE_TAGS.get(TaskType(str(self.task)))

    @property
    def evaluated_step(self) -> int | None:
        """The step whose evaluation the metrics are from."""
        return self._evaluation.get("step")

    def measured(self) -> list[Measured]:
        """Return the metrics of the evaluation, each with its interval where one was computed."""
        found = {
            str(name): float(value)
            for name, value in _named(self._evaluation.get("metrics")).items()
            if is_number(value) and abs(value) <= LARGEST
        }
        bounds = {f"{name}{end}" for name in found for end in (".low", ".high") if f"{name}{end}" in found}
        return [
            Measured(*self._split(name, value), found.get(f"{name}.low"), found.get(f"{name}.high"))
            for name, value in found.items()
            if name not in bounds
        ]

    def training(self) -> dict[str, Any]:
        """Return the settings worth reading, as they were asked for, and what followed from them."""
        found = {name: self.settings[name] for name in SHOWN_SETTINGS if self.settings.get(name) is not None}
        followed = {"samples": "num_samples", "total steps": "total_steps", "total updates": "total_updates"}
        found |= {words: self.plan[name] for words, name in followed.items() if self.plan.get(name) is not None}
        return found | {"step of these weights": self.step}

    def data(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each dataset, by its use."""
        data = _named(self.environment.get("data"))
        found = {"training": _named(data.get("train"))}
        for name, one in _named(data.get("evaluation")).items():
            found[f"evaluation {name}".strip()] = _named(one)
        return {use: one for use, one in found.items() if one}

    def base_model(self) -> str | None:
        """Return the repository that the first weights came from."""
        source = self.settings.get("init_weights_from")
        if not isinstance(source, str):
            return None
        return parse_address(source).repo_id if names_hub_weights(source) else None

    def _split(self, key: str, value: float) -> tuple[str, float, str]:
        """Return (metric, value, set) of a key, which begins with the set's name where there are several."""
        sets = _named(_named(self.environment.get("data")).get("evaluation"))
        for name in sorted(filter(None, sets), key=len, reverse=True):
            if key.startswith(f"{name}."):
                return key.removeprefix(f"{name}."), value, str(name)
        return key, value, ""


def _named(value: Any) -> dict[str, Any]:
    """Return names with values as they are; a record that holds something else in their place holds none."""
    return value if isinstance(value, dict) else {}


def _hours(run: SavedRun, starts: list[float]) -> float | None:
    """Sum, over the starts, the time to the last row that was logged before the next one."""
    times = [moment for path in run.layout.log_files(METRICS_FILE) for moment in _row_times(path)]
    if not times or not starts:
        return None
    total = 0.0
    for begun, following in zip(starts, [*starts[1:], math.inf], strict=True):
        during = [moment for moment in times if begun <= moment < following]
        total += max(during) - begun if during else 0.0
    return total / 3600


def _row_times(path: Path) -> list[float]:
    try:
        return [row.time for row in read_rows(path)]
    except DataError:
        return []
