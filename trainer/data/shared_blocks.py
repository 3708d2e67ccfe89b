"""Blocks of a stream that the ranks of one host tokenise for each other, each once; why is told in streams.py."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import psutil
from filelock import FileLock, Timeout

from trainer.config import UserError
from trainer.data.samples import Sample

# Blocks that are made ahead of the one needed: enough for every rank of a host to have one in work.
AHEAD = 32
# Blocks that stay behind the one needed, for ranks that are slower and for a step that is repeated.
KEPT = 64
POLL_SECONDS = 0.005
Records = list[dict[str, Any]]


def folder_of_host(key: str) -> Path:
    """Where the ranks that one launcher started on this host find each other's blocks; removed when one ends."""
    parent = psutil.Process(os.getppid())
    base = Path(tempfile.gettempdir()) / f"zerolora-{os.getuid()}"
    folder = base / f"{key}-{parent.pid}-{parent.create_time():.0f}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class SharedBlocks:
    """The documents of the blocks of one pass over a source. Without a folder this process makes them all."""

    def __init__(
        self, records: Iterator[Records], encode: Callable[[int, Records], list[Sample]], folder: Path | None
    ) -> None:
        self._records, self._encode, self._folder = records, encode, folder
        self._read = 0  # blocks of records that were read
        self._ahead: dict[int, Records] = {}
        self._bad: set[int] = set()
        self._failure: UserError | None = None

    def documents(self, number: int) -> list[Sample] | None:
        """The documents of a block, or None behind the last; numbers never go back."""
        for passed in [passed for passed in self._ahead if passed < number]:
            del self._ahead[passed]
        records = self._records_of(number, number)
        if records is None:
            return None
        if self._folder is None:
            return self._encode(number, records)
        while True:
            found = _read_block(self._file(number))
            if found is not None:
                for file in (self._file(number - KEPT), self._lock_file(number - KEPT)):
                    file.unlink(missing_ok=True)
                return found
            if not self._make_one(number):
                time.sleep(POLL_SECONDS)

    def _make_one(self, needed: int) -> bool:
        """Tokenise the first block from `needed` on that nobody makes; whether there was one."""
        for number in range(needed, needed + AHEAD):
            records = self._records_of(number, needed)
            if records is None:
                return False
            if self._file(number).exists() or (number in self._bad and number > needed):
                continue
            try:
                self._file(number).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with FileLock(self._lock_file(number), blocking=False):
                    if not self._file(number).exists():
                        _write_block(self._file(number), self._encode(number, records))
                    return True
            except Timeout:
                continue
            except UserError:
                # A bad record is told when it is needed: by all ranks, in the same step.
                if number == needed:
                    raise
                self._bad.add(number)
            except OSError as error:
                raise UserError(
                    f"dataset.streaming=true: what the ranks tokenise for each other cannot be written to "
                    f"{self._folder} ({error.strerror}); make room there, or name another folder with TMPDIR"
                ) from None
        return False

    def _records_of(self, number: int, needed: int) -> Records | None:
        """The records of a block, read up to it; those before `needed` are not kept."""
        while self._read <= number:
            if self._failure is None:
                try:
                    block = next(self._records, None)
                except UserError as error:
                    self._failure = error
            if self._failure is not None:
                if number == needed:
                    raise self._failure
                return None
            if block is None:
                return None
            if self._read >= needed:
                self._ahead[self._read] = block
            self._read += 1
        return self._ahead[number]

    def _file(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"block-{number:09d}.npz"

    def _lock_file(self, number: int) -> Path:
        return self._file(number).with_suffix(".lock")


def _write_block(file: Path, documents: list[Sample]) -> None:
    """Beside its place and renamed there, so that nobody reads half of it."""
    beside = file.with_suffix(f".{os.getpid()}.npz")
    np.savez(
        beside,
        input_ids=np.array([token for document in documents for token in document.input_ids], dtype=np.int32),
        trained=np.array([flag for document in documents for flag in document.trained], dtype=bool),
        lengths=np.array([len(document.input_ids) for document in documents], dtype=np.int64),
    )
    os.replace(beside, file)


def _read_block(file: Path) -> list[Sample] | None:
    """None if it is not there, or no longer."""
    try:
        with np.load(file) as block:
            bounds = np.cumsum(block["lengths"])[:-1]
            parts = zip(np.split(block["input_ids"], bounds), np.split(block["trained"], bounds), strict=True)
            documents = [Sample(ids.tolist(), trained.tolist(), [len(ids)]) for ids, trained in parts]
            return documents if len(block["lengths"]) else []
    except (OSError, ValueError, BadZipFile):
        file.unlink(missing_ok=True)
        return None
