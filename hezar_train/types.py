"""Words that a config may use, as string enums: tasks, optimizers, schedulers, precisions, modes.

Every member equals its plain string, so users may write either.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["LRSchedulerType", "MetricType", "Mode", "OptimizerType", "PrecisionType", "TaskType"]


class TaskType(StrEnum):
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
    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"


class LRSchedulerType(StrEnum):
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


class PrecisionType(StrEnum):
    NO = "no"
    FULL = "full"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class MetricType(StrEnum):
    ACCURACY = "accuracy"
    AUROC = "auroc"
    BLEU = "bleu"
    CER = "cer"
    CHRF = "chrf"
    CONFUSION_MATRIX = "confusion_matrix"
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
