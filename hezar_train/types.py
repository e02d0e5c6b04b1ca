"""Words that a config may use, as string enums: tasks, optimizers, schedules, precisions, metrics, modes.

Every member equals its plain string, so users may write either.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["LRSchedulerType", "MetricType", "Mode", "OptimizerType", "PrecisionType", "TaskType"]


class TaskType(StrEnum):
    """What a model is trained for; it chooses the metrics and what a loss is the mean of."""

    AUDIO_CLASSIFICATION = "audio_classification"
    BACKBONE = "backbone"
    IMAGE2TEXT = "image2text"
    IMAGE_CLASSIFICATION = "image_classification"
    LANGUAGE_MODELING = "language_modeling"
    MASK_FILLING = "mask_filling"
    REGRESSION = "regression"
    SEQUENCE_LABELING = "sequence_labeling"
    SPEECH_RECOGNITION = "speech_recognition"
    TEXT_CLASSIFICATION = "text_classification"
    TEXT_DETECTION = "text_detection"
    TEXT_GENERATION = "text_generation"


class OptimizerType(StrEnum):
    """The optimizers that Hezar names; a config takes every class of torch.optim."""

    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"


class LRSchedulerType(StrEnum):
    """The short names of learning-rate schedules; a config takes the classes of torch as well."""

    CONSTANT = "constant"
    LAMBDA = "lambda"
    STEP = "step"
    REDUCE_ON_PLATEAU = "reduce_on_plateau"
    MULTI_STEP = "multi_step"
    ONE_CYCLE = "one_cycle"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    CYCLIC = "cyclic"
    SEQUENTIAL = "sequential"
    POLYNOMIAL = "polynomial"
    COSINE_ANNEALING = "cosine_annealing"
    TRIANGULAR = "triangular"
    INV_TRIANGULAR = "inv_triangular"
    TRIANGULAR_EXP = "triangular_exp"
    TRIANGULAR2 = "triangular2"
    TRIANGULAR2_EXP = "triangular2_exp"
    WARM_RESTARTS = "warm_restarts"
    LINEAR_DECAY = "linear_decay"
    LOG_DECAY = "log_decay"
    EXPONENTIAL_DECAY = "exponential_decay"
    STEP_DECAY = "step_decay"
    EPOCH_SET = "epoch_set"
    DECAY_TO_EPOCH = "decay_to_epoch"
    DECAY_WHEN_EPOCH = "decay_when_epoch"
    DECAY_WHEN_ACC = "decay_when_acc"
    TRIANGULAR_DECAY_WHEN_ACC = "triangular_decay_when_acc"
    WARMUP_COSINE = "warmup_cosine"
    WARMUP_COSINE_ANNEALING = "warmup_cosine_annealing"
    WARMUP_STEP = "warmup_step"
    WARMUP_MULTI_STEP = "warmup_multi_step"
    WARMUP_EXPONENTIAL = "warmup_exponential"
    WARMUP_POLYNOMIAL = "warmup_polynomial"
    WARMUP_LINEAR = "warmup_linear"
    WARMUP_NOAM = "warmup_noam"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    INVERSE_SQRT = "inverse_sqrt"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"


class PrecisionType(StrEnum):
    """What to compute in; `no` and `full` both mean float32."""

    NO = "no"
    FULL = "full"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class MetricType(StrEnum):
    """The metrics that can be asked for by name."""

    ACCURACY = "accuracy"
    AUROC = "auroc"
    BLEU = "bleu"
    CER = "cer"
    CHRF = "chrf"
    CONFUSION_MATRIX = "confusion_matrix"
    EXACT_MATCH = "exact_match"
    F1 = "f1"
    MAE = "mae"
    MATTHEWS = "matthews"
    MSE = "mse"
    PEARSON = "pearson"
    PERPLEXITY = "perplexity"
    PRECISION = "precision"
    R2 = "r2"
    RECALL = "recall"
    RMSE = "rmse"
    ROUGE = "rouge"
    SEQEVAL = "seqeval"
    SPEARMAN = "spearman"
    TOKEN_ACCURACY = "token_accuracy"
    TOP_K_ACCURACY = "top_k_accuracy"
    WER = "wer"


class Mode(StrEnum):
    """What a routine does; train and finetune learn, val and test only look."""

    TRAIN = "train"
    FINETUNE = "finetune"
    VAL = "val"
    TEST = "test"
