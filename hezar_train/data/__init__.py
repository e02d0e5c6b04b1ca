"""Data: its order, its randomness and its windows, as functions of (seed, epoch, size) wherever that is possible.

The modules:

    splits      what is trained on and what is evaluated on
    loader      any form of data becomes a source of windows
    sampler     the order of an epoch
    lengths     how long each sample is
    by_length   the order, the updates and the micro-batches that lengths decide
    windows     the micro-batches of one update, cut for the processes
    streams     sources of data that keeps its own place
    fetch       from indices to batches, in this process or in workers
    seeding     the seed of every sample and every step
    collators   from samples to a batch
    chat        conversations as samples, with labels on the answers
    failures    errors of a user's own dataset or collator, with the sample they are about
"""

from hezar_train.data.by_length import ByLength, LengthSettings
from hezar_train.data.chat import ChatDataCollator, encode_conversation, encode_conversations, encode_prompt
from hezar_train.data.collators import (
    CharLevelOCRDataCollator,
    ImageCaptioningDataCollator,
    PackingDataCollator,
    SequenceLabelingDataCollator,
    SpeechRecognitionDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
    default_collator,
)
from hezar_train.data.failures import form_of, note_samples, shown_of, unfit_values
from hezar_train.data.lengths import LengthOf, Lengths, length_of_sample
from hezar_train.data.sampler import Permutation, RangedSampler
from hezar_train.data.seeding import (
    preserved_randomness,
    sample_seed,
    seed_device,
    seed_python_numpy_torch,
    step_seed,
    step_seeds,
)
from hezar_train.data.sources import collator_for, is_stream, open_source
from hezar_train.data.splits import SPLITS, Splits, is_splits, parse_splits
from hezar_train.data.windows import Order, Source, Window, batch_length, cut_window, rank_ranges, without_filler

__all__ = [
    "SPLITS",
    "ByLength",
    "CharLevelOCRDataCollator",
    "ChatDataCollator",
    "ImageCaptioningDataCollator",
    "LengthOf",
    "LengthSettings",
    "Lengths",
    "Order",
    "PackingDataCollator",
    "Permutation",
    "RangedSampler",
    "SequenceLabelingDataCollator",
    "Source",
    "SpeechRecognitionDataCollator",
    "Splits",
    "TextGenerationDataCollator",
    "TextPaddingDataCollator",
    "Window",
    "batch_length",
    "collator_for",
    "cut_window",
    "default_collator",
    "encode_conversation",
    "encode_conversations",
    "encode_prompt",
    "form_of",
    "is_splits",
    "is_stream",
    "length_of_sample",
    "note_samples",
    "open_source",
    "parse_splits",
    "preserved_randomness",
    "rank_ranges",
    "sample_seed",
    "seed_device",
    "seed_python_numpy_torch",
    "shown_of",
    "step_seed",
    "step_seeds",
    "unfit_values",
    "without_filler",
]
