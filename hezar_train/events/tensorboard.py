"""TensorBoard: event files of our own, or everything passed on to a `SummaryWriter` that the user made.

Owns the event format: scalars, images as PNG, histograms as counts. Refuses to decide what is logged and when.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from hezar_train.errors import MissingDependencyError
from hezar_train.events.storage import Histogram, Image, Row
from hezar_train.events.writers import AppendFile, EventWriter, FileWriter
from hezar_train.run_layout import EVENTS_PREFIX

__all__ = ["SummaryWriterAdapter", "TensorBoardWriter", "TensorboardXWriter"]

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # by number of channels: grey, RGB, RGB with transparency


class TensorBoardWriter(FileWriter):
    """Write one TensorBoard event per row, with every value of the row in it, into a new event file of `folder`.

    After a resume at step s (`resumed`) `purge_step=s` is written, and the kept rows of step s again. TensorBoard's
    readers then forget what earlier files of the folder hold from step s on, so every value is there once.

    Records go straight to the file, in the caller's thread: TensorBoard's own `EventFileWriter` hands each event to a
    thread, which costs two to four times as much as writing it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingDependencyError("tensorboard", "all", "writing TensorBoard events") from error
        self._event, self._summary, self._counts = Event, Summary, HistogramProto
        super().__init__(_new_event_path(Path(folder)))
        self._records: Any = RecordWriter(_AppendStream(self._file))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._file.flush()

    @classmethod
    def resumed(cls, folder: str | os.PathLike[str], kept: Sequence[Row], step: int) -> Self:
        """Go on after a resume at `step`, with the rows that were kept until then."""
        writer = cls(folder, purge_step=step)
        writer.write([row for row in kept if row.step == step])
        return writer

    def write(self, rows: Sequence[Row]) -> None:
        value = self._summary.Value
        for row in rows:
            values = [value(tag=name, simple_value=number) for name, number in row.values.items()]
            self._add(self._event(wall_time=row.time, step=row.step, summary=self._summary(value=values)))

    def write_images(self, images: Sequence[Image]) -> None:
        for image in images:
            channels, height, width = image.pixels.shape
            picture = self._summary.Image(
                height=height, width=width, colorspace=channels, encoded_image_string=_png(image)
            )
            self._add_value(image, image=picture)

    def write_histograms(self, histograms: Sequence[Histogram]) -> None:
        for one in histograms:
            counts = self._counts(
                min=one.min, max=one.max, num=one.num, sum=one.sum, sum_squares=one.sum_squares,
                bucket_limit=one.bucket_limits, bucket=one.bucket_counts,
            )  # fmt: skip
            self._add_value(one, histo=counts)

    def _add_value(self, put: Image | Histogram, **value: Any) -> None:
        summary = self._summary(value=[self._summary.Value(tag=put.name, **value)])
        self._add(self._event(wall_time=put.time, step=put.step, summary=summary))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


TensorboardXWriter = TensorBoardWriter
"""LiBai's name for it."""


class SummaryWriterAdapter(EventWriter):
    """Pass everything on to a `SummaryWriter` of torch or tensorboardX; whoever made it closes it."""

    def __init__(self, tb_writer: Any) -> None:
        self._tb_writer = tb_writer

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._tb_writer.add_scalar(name, value, row.step, walltime=row.time)

    def write_images(self, images: Sequence[Image]) -> None:
        for image in images:
            self._tb_writer.add_image(image.name, image.pixels.cpu().numpy(), image.step, walltime=image.time)

    def write_histograms(self, histograms: Sequence[Histogram]) -> None:
        for one in histograms:
            self._tb_writer.add_histogram_raw(
                one.name, one.min, one.max, one.num, one.sum, one.sum_squares, one.bucket_limits, one.bucket_counts,
                global_step=one.step, walltime=one.time,
            )  # fmt: skip

    def flush(self) -> None:
        self._tb_writer.flush()


class _AppendStream:
    """The little of a file that TensorBoard's record writer needs."""

    def __init__(self, file: AppendFile) -> None:
        self.write = file.append
        self.flush = file.flush
        self.close = file.close


def _png(image: Image) -> bytes:
    """Encode as PNG; a few lines here, instead of a package for pictures."""
    channels, height, width = image.pixels.shape
    rows = image.pixels.permute(1, 2, 0).reshape(height, width * channels).cpu().numpy()
    unfiltered = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOUR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(unfiltered)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(_png_chunk(kind, data) for kind, data in parts)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _new_event_path(folder: Path) -> Path:
    """Name an event file so that it sorts after those that are there: readers take them in that order."""
    stamps = [path.name.split(".")[3] for path in folder.glob(f"{EVENTS_PREFIX}*")]
    # By now of ten digits; a name that somebody made up must not lead the next ones astray.
    newest = max((int(stamp) for stamp in stamps if re.fullmatch("[0-9]{1,10}", stamp)), default=0)
    stamp = max(int(time.time()), newest + 1)
    return folder / f"{EVENTS_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
