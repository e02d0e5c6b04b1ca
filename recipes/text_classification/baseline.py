"""What to compare with: TF-IDF of words and pairs of words, and a logistic regression, on the same split.

    python recipes/text_classification/baseline.py [recipe.data=full recipe.index=Packages]

Its settings are tuned as the encoder's best checkpoint is chosen: by the accuracy on the split "val".
"""

from __future__ import annotations

import sys
from typing import Any

from recipe import SPLITS, Corpus, debian_corpus
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import ParameterGrid
from sklearn.pipeline import Pipeline

GRID = {
    "tfidf__sublinear_tf": [False, True],
    "tfidf__min_df": [1, 2],
    "classifier__C": [1.0, 3.0, 10.0, 30.0, 100.0],
}


def fitted(corpus: Corpus, settings: dict[str, Any]) -> Pipeline:
    """Fit to the training split."""
    texts, labels = zip(*corpus.splits["train"], strict=True)
    steps = [("tfidf", TfidfVectorizer(ngram_range=(1, 2))), ("classifier", LogisticRegression(max_iter=1000))]
    return Pipeline(steps).set_params(**settings).fit(texts, labels)


def scores(corpus: Corpus, split: str, pipeline: Pipeline) -> tuple[float, float]:
    """Return the accuracy and the macro F1 on a split."""
    texts, labels = zip(*corpus.splits[split], strict=True)
    predicted = pipeline.predict(texts)
    return accuracy_score(labels, predicted), f1_score(labels, predicted, average="macro")


def main() -> None:
    """Choose the settings that do best on the split "val", and tell what they do on each split."""
    options = dict(argument.removeprefix("recipe.").split("=", 1) for argument in sys.argv[1:])
    corpus = debian_corpus(**options)
    best = max(ParameterGrid(GRID), key=lambda settings: scores(corpus, "val", fitted(corpus, settings)))
    sys.stdout.write(f"best of {len(ParameterGrid(GRID))}: {best}\n")
    pipeline = fitted(corpus, best)
    for split in SPLITS:
        accuracy, f1 = scores(corpus, split, pipeline)
        count = len(corpus.splits[split])
        sys.stdout.write(f"{split:5}  {count:6,} texts  accuracy {accuracy:.4f}  macro f1 {f1:.4f}\n")


if __name__ == "__main__":
    main()
