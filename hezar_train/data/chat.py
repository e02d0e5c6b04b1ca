"""Conversations as samples: messages rendered by the tokenizer's own chat template, with labels on the answers alone.

A conversation is a list of messages, each with a `role` and its `content`, as datasets for chat have them. The template
that a tokenizer carries makes one text of it. What the assistant says there are the answers: they have labels, all
other tokens have none (-100), so that a model learns to answer, and not to ask.

Where the answers are
---------------------
Templates with `{% generation %}` say it themselves, and transformers makes a mask of that. Of all others it is found by
rendering the conversation up to each answer, with the prompt for an answer behind it, and up to the answer's end: what
the second has more than the first is the answer, with the tokens that end it. Both must be beginnings of the whole
text. A template for which they are not (some leave out of earlier answers what the model thought) is refused.

What is too long is refused, or cut from the left or the right, whichever is asked for; a sample without a single answer
to learn from is refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from hezar_train.data.collators import IGNORED_LABEL, PackingDataCollator, setting_of
from hezar_train.data.failures import shown_of
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, a_kind, choices, suggestion

__all__ = ["ChatDataCollator", "encode_conversation", "encode_conversations", "encode_prompt"]

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Sample: TypeAlias = dict[str, list[int]]
Span: TypeAlias = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_OF_OTHERS = {"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant"}
ANSWERS = ("all", "last")
TOO_LONG = ("refuse", "left", "right")
_ERRORS_OF_TEMPLATES = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
"""What the code of a template raises; it runs in a sandbox of transformers', where no code of Python's is reached."""
_TELLS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(
    messages: Messages,
    tokenizer: Any,
    *,
    answers: str = "all",
    max_length: int | None = None,
    too_long: str = "refuse",
    tools: Sequence[Any] | None = None,
) -> Sample:
    """Return a conversation's `input_ids` and `labels`, which are -100 everywhere but in the answers.

    `answers="last"` gives labels to the last answer alone, which evaluations by generation need. Of one that is longer
    than `max_length`, `too_long` says what becomes: it is refused, or cut from the left (its beginning is lost) or from
    the right (its end is).
    """
    _refuse_unknown(answers=(answers, ANSWERS), too_long=(too_long, TOO_LONG))
    _check(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            "a conversation has no answer, so there is nothing to learn from it: none of its "
            f"{len(messages)} messages has role='assistant'. Leave it out of the data."
        )
    ids, spans = _answers(messages, tokenizer, tools)
    labels = [IGNORED_LABEL] * len(ids)
    for start, end in spans if answers == "all" else spans[-1:]:
        labels[start:end] = ids[start:end]
    return _fitted({"input_ids": ids, "labels": labels}, max_length, too_long)


def encode_conversations(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    column: str = "messages",
    answers: str = "all",
    max_length: int | None = None,
    too_long: str = "refuse",
) -> list[Sample]:
    """Encode the conversations of all rows; an error says which row it was. A row's `tools` go to the template."""
    samples = []
    for number, row in enumerate(rows):
        try:
            samples.append(_encoded_row(row, tokenizer, column, answers, max_length, too_long))
        except DataError as error:
            raise DataError(f"conversation {number}: {error}") from error
    return samples


def encode_prompt(messages: Messages, tokenizer: Any) -> Sample:
    """Return the sample of a conversation that is to be answered: no token of it has a label."""
    _check(messages)
    text = _rendered(messages, tokenizer, None, asks=True)
    ids = _ids(tokenizer(text, add_special_tokens=False))
    return {"input_ids": ids, "labels": [IGNORED_LABEL] * len(ids)}


class ChatDataCollator:
    """Make a batch of rows with `messages`, rendered each time; rows that are encoded already are taken as they are.

    Rows are padded on the right, to the longest; with `packing` they are joined to one row, as `PackingDataCollator`
    does it. For batches by length or by tokens encode the data first (`encode_conversations`): lengths must be known.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        packing: bool = False,
        column: str = "messages",
        answers: str = "all",
        max_length: int | None = None,
        too_long: str = "refuse",
    ) -> None:
        _refuse_unknown(answers=(answers, ANSWERS), too_long=(too_long, TOO_LONG))
        _refuse_without_template(tokenizer)
        self.tokenizer, self.packs, self.column = tokenizer, packing, column
        self._options: tuple[str, int | None, str] = answers, max_length, too_long
        filler = setting_of(tokenizer, "pad_token_id", setting_of(tokenizer, "eos_token_id", 0))
        self._joined = PackingDataCollator(filler)

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        return self._joined(self._encoded(samples)) if self.packs else self.padded(samples)

    def padded(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a row of each sample."""
        return self._joined.padded(self._encoded(samples))

    def _encoded(self, samples: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for number, sample in enumerate(samples):
            try:
                is_done = "input_ids" in sample
                found.append(sample if is_done else _encoded_row(sample, self.tokenizer, self.column, *self._options))
            except DataError as error:
                raise DataError(str(error), (number, len(samples))) from error
        return found


def _encoded_row(
    row: Mapping[str, Any], tokenizer: Any, column: str, answers: str, max_length: int | None, too_long: str
) -> Sample:
    if not isinstance(row, Mapping) or column not in row:
        has = choices(map(str, row)) if isinstance(row, Mapping) else a_kind(row)
        raise DataError(f"a row has no {column!r}; it has: {has}. Name the column of the messages: column=...")
    return encode_conversation(
        row[column], tokenizer, answers=answers, max_length=max_length, too_long=too_long, tools=row.get("tools")
    )


def _answers(messages: Messages, tokenizer: Any, tools: Sequence[Any] | None) -> tuple[list[int], list[Span]]:
    """Return the tokens of a conversation, and from where to where its answers go."""
    _refuse_without_template(tokenizer)
    if _says_itself(tokenizer, tools):
        rendered = _applied(
            messages, tokenizer, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return _ids(rendered), _runs(list(rendered["assistant_masks"]))
    whole = _rendered(messages, tokenizer, tools)
    places = [
        _place(messages, number, whole, tokenizer, tools)
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        return _ids(encoded), [_covered(encoded["offset_mapping"], place) for place in places]
    ids = _ids(tokenizer(whole, add_special_tokens=False))
    return ids, [_counted(whole, place, ids, tokenizer) for place in places]


def _place(messages: Messages, number: int, whole: str, tokenizer: Any, tools: Sequence[Any] | None) -> Span:
    """Return from which to which character of the whole text an answer goes."""
    before = _rendered(messages[:number], tokenizer, tools, asks=True) if number else ""
    after = _rendered(messages[: number + 1], tokenizer, tools) if number + 1 < len(messages) else whole
    for part, what in ((before, "up to"), (after, "with")):
        if not whole.startswith(part):
            raise DataError(
                f"the tokens of an answer cannot be told: the chat template renders the conversation {what} message "
                f"{number} otherwise than the whole begins. Mark the answers in the template by {{% generation %}} and "
                "{% endgeneration %}; or give each answer a conversation of its own, which ends there."
            )
    if len(after) <= len(before):
        raise DataError(f"the chat template writes nothing for message {number}, an answer. Take another template.")
    return len(before), len(after)


def _covered(offsets: Sequence[Span], place: Span) -> Span:
    """Return the tokens of which a character lies in a place; one that began before it is part of it, too."""
    inside = [
        number for number, (start, end) in enumerate(offsets) if start < place[1] and end > place[0] and end > start
    ]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _counted(whole: str, place: Span, ids: list[int], tokenizer: Any) -> Span:
    """Return the tokens of a place by counting those of what is before; for tokenizers that tell no places."""
    counts = []
    for end in place:
        part = _ids(tokenizer(whole[:end], add_special_tokens=False))
        if ids[: len(part)] != part:
            raise DataError(
                "the tokens of an answer cannot be told: the text before it has other tokens alone than with what "
                "follows. Mark the answers in the chat template by {% generation %}, or take the fast tokenizer."
            )
        counts.append(len(part))
    return counts[0], counts[1]


def _runs(mask: Sequence[int]) -> list[Span]:
    """Return from where to where a mask is set, run by run."""
    edges = [number for number, (one, other) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _fitted(sample: Sample, max_length: int | None, too_long: str) -> Sample:
    """Return a sample of at most so many tokens; raise if it has nothing to learn from."""
    length = len(sample["input_ids"])
    if max_length is not None and length > max_length:
        if too_long == "refuse":
            raise DataError(
                f"a conversation has {length} tokens, more than max_length={max_length}. Leave it out, raise "
                "max_length, or have it cut: too_long='left' loses its beginning, 'right' its end."
            )
        kept = slice(length - max_length, length) if too_long == "left" else slice(max_length)
        sample = {key: values[kept] for key, values in sample.items()}
    if all(label == IGNORED_LABEL for label in sample["labels"][1:]):  # the first token is predicted from nothing
        told = "" if len(sample["labels"]) == length else f" within the {max_length} tokens that were kept of {length}"
        raise DataError(
            f"a conversation has no token of an answer{told}, so there is nothing to learn from it. Leave it out, "
            "raise max_length, or cut it from the other side."
        )
    return sample


def _rendered(messages: Messages, tokenizer: Any, tools: Sequence[Any] | None, *, asks: bool = False) -> str:
    """Return messages as text, with the prompt for an answer behind them if one is asked for."""
    _refuse_without_template(tokenizer)
    text: str = _applied(messages, tokenizer, tools, tokenize=False, add_generation_prompt=asks)
    return text


def _applied(messages: Messages, tokenizer: Any, tools: Sequence[Any] | None, **options: Any) -> Any:
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise MissingDependencyError("jinja2", "peft", "chat templates") from error
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], tools=tools, **options)
    except (TemplateError, *_ERRORS_OF_TEMPLATES) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the chat template refuses a conversation of the roles {roles}: {error}. Bring its messages to the order "
            "that the model knows, or take another template."
        ) from error


def _says_itself(tokenizer: Any, tools: Sequence[Any] | None) -> bool:
    """Tell whether the template marks the answers, and the tokenizer can place them."""
    template = tokenizer.get_chat_template(tools=tools)
    return bool(getattr(tokenizer, "is_fast", False) and _TELLS_ANSWERS.search(template))


def _ids(encoded: Any) -> list[int]:
    return list(map(int, encoded["input_ids"]))


def _refuse_without_template(tokenizer: Any) -> None:
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        named = repr(tokenizer) if isinstance(tokenizer, str) else "..."
        raise ConfigError(
            f"the tokenizer is {shown_of(tokenizer)}, which has no apply_chat_template(); expected the tokenizer of a "
            f"chat model. Load one: transformers.AutoTokenizer.from_pretrained({named})."
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer, {a_kind(tokenizer)}, has no chat template, so conversations cannot be rendered. Take that "
            "of a chat model, or set tokenizer.chat_template to a template."
        )


def _refuse_unknown(**given: tuple[Any, tuple[str, ...]]) -> None:
    problems = [
        f"{name}={value!r} is not known. Expected one of: {choices(known)}.{suggestion(str(value), known)}"
        for name, (value, known) in given.items()
        if value not in known
    ]
    if problems:
        raise ConfigError(problems)


def _check(messages: Any) -> None:
    """Raise for what is no conversation, with the first message that is none."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise DataError(f"a conversation is {a_kind(messages)}; expected a list of messages with role and content.")
    if not messages:
        raise DataError("a conversation has no messages. Leave it out of the data.")
    for number, message in enumerate(messages):
        if problem := _problem(message):
            raise DataError(f"message {number} of a conversation {problem}")


def _how_to_name(message: Mapping[Any, Any]) -> str:
    """Say how a message without a role gets one."""
    if {"from", "value"} <= message.keys():
        return "Rename 'from' to 'role', and 'value' to 'content'."
    if "content" not in message and len(message) > 1:
        return "Rename what says who speaks to 'role', and what is said to 'content'."
    named = "" if "content" in message else ", and name its text 'content'"
    return f"Add one to each message: 'role': 'user' for a question, 'assistant' for an answer{named}."


def _problem(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f"is {a_kind(message)}; expected a mapping such as {{'role': 'user', 'content': '...'}}."
    if "role" not in message:
        return f"has no 'role'; it has: {choices(map(str, message))}. {_how_to_name(message)}"
    role = message["role"]
    if role not in ROLES:
        ours = ROLES_OF_OTHERS.get(str(role))
        hint = suggestion(str(role), ROLES) if ours is None else f" Write {ours!r}."
        return f"has role={role!r}; expected one of: {choices(ROLES)}.{hint}"
    others = message.keys() - {"role"}
    if others and not others & {"content", "tool_calls"}:
        return (
            f"(role={role!r}) has no 'content'; it has: {choices(map(str, message))}. Rename what holds its text to "
            "'content'."
        )
    if not message.get("content") and not message.get("tool_calls"):
        return f"(role={role!r}) has no content; expected a text. Leave empty messages out."
    return None
