"""Metrics handlers: a batch's outputs and labels go in, mergeable counts are kept, one result comes out.

`handler.py` says what a handler is; each other module has those of one family of tasks. Which task has which is said by
`tasks.py` of the package above.
"""

from hezar_train.metrics.handlers.classification import ClassificationHandler
from hezar_train.metrics.handlers.handler import Decode, MetricsHandler
from hezar_train.metrics.handlers.regression import RegressionHandler
from hezar_train.metrics.handlers.texts import (
    GENERATED_KEYS,
    ErrorRateHandler,
    TextGenerationHandler,
    TextHandler,
    without_ignored,
)
from hezar_train.metrics.handlers.tokens import LanguageModelingHandler, SequenceLabelingHandler, TokenHandler
from hezar_train.metrics.handlers.whole_set import WholeSetHandler

__all__ = [
    "GENERATED_KEYS",
    "ClassificationHandler",
    "Decode",
    "ErrorRateHandler",
    "LanguageModelingHandler",
    "MetricsHandler",
    "RegressionHandler",
    "SequenceLabelingHandler",
    "TextGenerationHandler",
    "TextHandler",
    "TokenHandler",
    "WholeSetHandler",
    "without_ignored",
]
