"""Conversations as samples: the answers have labels, and nothing else has; what is no conversation is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hezar_train.data import (
    ChatDataCollator,
    PackingDataCollator,
    encode_conversation,
    encode_conversations,
    encode_prompt,
)
from hezar_train.errors import ConfigError, DataError

transformers = pytest.importorskip("transformers")

MARKED = """\
{% for message in messages %}<|{{ message.role }}|>\
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}\
{% else %}{{ message.content }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", MARKED)
FORGETFUL = """\
{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}(said){% else %}\
{{ message.content }}{% endif %}<|end|>{% endfor %}"""
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}x"

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "پایتخت فرانسه کجاست؟"},
    {"role": "assistant", "content": "پاریس است."},
    {"role": "user", "content": "How much is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
]


@pytest.fixture(scope="module")
def make_tokenizer() -> Any:
    """Return what builds a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator([one["content"] for one in TALK], trainer)

    def make(template: str | None) -> Any:
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")
        made.chat_template = template
        return made

    return make


def _learnt(sample: dict[str, list[int]], tokenizer: Any) -> str:
    return tokenizer.decode([one for one in sample["labels"] if one != -100])


def _by_transformers(tokenizer: Any, messages: Any = TALK) -> tuple[list[int], list[int]]:
    """Return the tokens and labels that transformers' own mask makes."""
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = found["input_ids"]
    pairs = zip(ids, found["assistant_masks"], strict=True)
    return ids, [token if is_answer else -100 for token, is_answer in pairs]


def test_labels_are_those_of_transformers_own_mask(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(MARKED)
    sample = encode_conversation(TALK, tokenizer)
    assert (sample["input_ids"], sample["labels"]) == _by_transformers(tokenizer)
    assert _learnt(sample, tokenizer) == "پاریس است.<|end|>It is 5.<|end|>"


@pytest.mark.parametrize("count", [3, 5])
def test_a_template_without_marks_gives_the_labels_of_one_that_has_them(make_tokenizer: Any, count: int) -> None:
    marked, unmarked = make_tokenizer(MARKED), make_tokenizer(UNMARKED)
    ids, labels = _by_transformers(marked, TALK[:count])
    found = encode_conversation(TALK[:count], unmarked)
    assert found["input_ids"] == ids
    assert _learnt(found, unmarked).replace("\n", "") == marked.decode([one for one in labels if one != -100])
    assert all(one in (own, -100) for one, own in zip(labels, found["labels"], strict=True))


class Slow:
    """The same tokenizer, as one that tells no places of its tokens."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        assert not options.get("return_offsets_mapping")
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_tokenizer_that_tells_no_places_gives_the_same(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(UNMARKED)
    assert encode_conversation(TALK, Slow(tokenizer)) == encode_conversation(TALK, tokenizer)


def test_only_the_last_answer_may_be_asked_for(make_tokenizer: Any) -> None:
    for template in (MARKED, UNMARKED):
        tokenizer = make_tokenizer(template)
        sample = encode_conversation(TALK, tokenizer, answers="last")
        assert _learnt(sample, tokenizer).strip() == "It is 5.<|end|>"


def test_a_prompt_ends_where_the_answer_begins_and_has_no_labels(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(UNMARKED)
    prompt = encode_prompt(TALK[:-1], tokenizer)
    whole = encode_conversation(TALK, tokenizer, answers="last")
    count = len(prompt["input_ids"])
    assert whole["input_ids"][:count] == prompt["input_ids"]
    assert whole["labels"][:count] == prompt["labels"] == [-100] * count
    assert whole["labels"][count] != -100


def test_a_conversation_that_is_too_long_is_refused_or_cut_from_the_side_that_is_named(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(MARKED)
    whole = encode_conversation(TALK, tokenizer)
    limit = len(whole["input_ids"]) - 4
    with pytest.raises(DataError, match=rf"has {limit + 4} tokens, more than max_length={limit}.*too_long='left'"):
        encode_conversation(TALK, tokenizer, max_length=limit)
    left = encode_conversation(TALK, tokenizer, max_length=limit, too_long="left")
    right = encode_conversation(TALK, tokenizer, max_length=limit, too_long="right")
    assert left == {key: values[4:] for key, values in whole.items()}
    assert right == {key: values[:-4] for key, values in whole.items()}
    with pytest.raises(DataError, match="no token of an answer within the 5 tokens that were kept"):
        encode_conversation(TALK, tokenizer, max_length=5, too_long="right")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "has no messages"),
        ("hello", "is a str; expected a list of messages"),
        (["hello"], "message 0 of a conversation is a str"),
        ([{"from": "human", "value": "hi"}], "has no 'role'; it has: from, value. Rename"),
        ([{"role": "assistent", "content": "hi"}], "role='assistent'.*Did you mean 'assistant'"),
        ([TALK[1], {"role": "assistant", "content": ""}], r"message 1 .*\(role='assistant'\) has no content"),
        (TALK[:2], "has no answer.*none of its 2 messages has role='assistant'"),
    ],
)
def test_what_is_no_conversation_is_refused(make_tokenizer: Any, messages: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        encode_conversation(messages, make_tokenizer(MARKED))
    with pytest.raises(DataError, match=f"conversation 1: .*{words}"):
        encode_conversations([{"messages": TALK}, {"messages": messages}], make_tokenizer(MARKED))


def test_templates_that_do_not_fit_are_refused(make_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template.*tokenizer.chat_template"):
        encode_conversation(TALK, make_tokenizer(None))
    with pytest.raises(ConfigError, match=r"the tokenizer is 'bert', a text, which has no apply_chat_template\(\)"):
        encode_conversation(TALK, "bert")
    with pytest.raises(DataError, match="renders the conversation with message 2 otherwise than the whole begins"):
        encode_conversation(TALK, make_tokenizer(FORGETFUL))
    with pytest.raises(DataError, match=r"refuses a conversation of the roles system, .*: the user begins"):
        encode_conversation(TALK, make_tokenizer(STRICT))
    with pytest.raises(ConfigError, match=r"too_long='lef' is not known.*Did you mean 'left'"):
        ChatDataCollator(make_tokenizer(MARKED), too_long="lef")


def test_a_row_without_the_column_says_which_columns_it_has(make_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"conversation 0: a row has no 'messages'; it has: chat. Name the column"):
        encode_conversations([{"chat": TALK}], make_tokenizer(MARKED))
    assert len(encode_conversations([{"chat": TALK}], make_tokenizer(MARKED), column="chat")) == 1


def test_the_collator_makes_of_messages_what_encoded_samples_become(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(MARKED)
    rows = [{"messages": TALK}, {"messages": TALK[:3]}]
    samples = encode_conversations(rows, tokenizer)
    packing = PackingDataCollator(tokenizer.pad_token_id)
    for collator, expected in (
        (ChatDataCollator(tokenizer), packing.padded(samples)),
        (ChatDataCollator(tokenizer, packing=True), packing(samples)),
    ):
        for given in (rows, samples):
            batch = collator(given)
            assert batch.keys() == expected.keys()
            assert all(torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(expected[key])) for key in batch)
    assert (packing.padded(samples)["labels"][1, len(samples[1]["labels"]) :] == -100).all()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch ran') }}",
        "{{ lipsum.__globals__['os'].popen('touch ran') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0] + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_runs_in_a_sandbox_and_its_mistakes_are_told(
    make_tokenizer: Any, template: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the chat template refuses a conversation"):
        encode_prompt(TALK, make_tokenizer(template))
    assert not list(tmp_path.iterdir())
