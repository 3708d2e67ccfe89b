"""Blocks of a stream that ranks tokenise for each other, each once; why is told in streams.py.

A block belongs to whoever created its claim (O_EXCL, which network file systems do as well). A lock would die with its
holder, but not every file system has locks between hosts. So a rank that has waited long for a block makes it itself,
which costs nothing but time: blocks come to their places whole, and are the same whoever made them.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import psutil

from trainer.config import UserError
from trainer.contract.rank_variables import host_name
from trainer.data.samples import Sample

# Blocks that are made ahead of the one needed, and so the number of ranks that tokenise at the same time.
AHEAD = 32
# Blocks that stay behind the one needed, for ranks that are slower and for a step that is repeated.
KEPT = 64
POLL_S, LONGEST_POLL_S = 0.005, 0.1
# For a block that somebody has claimed: far longer than any takes.
PATIENCE_S = 60.0
Records = list[dict[str, Any]]
Block = tuple[list[Sample], int]
"""The documents of a block, and how many of its records were skipped."""


def folder_of_host(key: str) -> Path:
    """Where the ranks that one launcher started on this host find each other's blocks; removed when one ends."""
    parent = psutil.Process(os.getppid())
    base = Path(tempfile.gettempdir()) / f"zerolora-{os.getuid()}"
    folder = base / f"{key}-{parent.pid}-{parent.create_time():.0f}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def folder_of_run(logs: Path, token: str, *, is_main: bool) -> Path:
    """Where the ranks of all hosts find each other's blocks: in the logs of the run that holds the lock `token`.

    Rank 0 removes what earlier runs have left, and this one at its end.
    """
    folder = logs / f"stream-{token}"
    if is_main:
        for left in logs.glob("stream-*"):
            if left != folder:
                shutil.rmtree(left, ignore_errors=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class SharedBlocks:
    """The documents of the blocks of one pass over a source. Without a folder this process makes them all."""

    def __init__(
        self, records: Iterator[Records], encode: Callable[[int, Records], Block], folder: Path | None
    ) -> None:
        self._records, self._encode, self._folder = records, encode, folder
        self._read = 0  # blocks of records that were read
        self._ahead: dict[int, Records] = {}
        self._bad: set[int] = set()
        self._failure: UserError | None = None

    def block(self, number: int) -> Block | None:
        """Return a block, or None behind the last; numbers never go back.

        Raises UserError in the same step on all ranks. Other ranks may have read records that this one can no longer
        read, such as those of a deleted file, so it waits for them to make the block before it gives up.
        """
        for passed in [passed for passed in self._ahead if passed < number]:
            del self._ahead[passed]
        try:
            records = self._records_of(number, number)
        except UserError:
            made = self._wait_for(number) if self._folder is not None else None
            if made is None:
                raise
            return made
        if records is None:
            return None
        if self._folder is None:
            return self._encode(number, records)
        found = self._made(number, records)
        for file in (self._file(number - KEPT), self._claim_file(number - KEPT)):
            file.unlink(missing_ok=True)
        return found

    def _wait_for(self, number: int) -> Block | None:
        """Return a block that another rank makes, or None if nobody has made it within PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while (made := self._read_block(number)) is None and time.monotonic() < deadline:
            time.sleep(LONGEST_POLL_S)
        return made

    def _made(self, needed: int, records: Records) -> Block:
        """A block, once somebody has made it; meanwhile others are made here."""
        deadline, pause = time.monotonic() + PATIENCE_S, POLL_S
        while (found := self._read_block(needed)) is None:
            if time.monotonic() > deadline:
                self._write_block(needed, records)
            elif not self._make_one(needed):
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
                with suppress(FileNotFoundError):
                    os.listdir(self._folder)  # lets network file systems ask their server for what is new
        return found

    def _make_one(self, needed: int) -> bool:
        """Tokenise the first block from `needed` on that nobody makes; whether there was one."""
        for number in range(needed, needed + AHEAD):
            records = self._records_of(number, needed)
            if records is None:
                return False
            if self._file(number).exists() or (number in self._bad and number > needed) or not self._claim(number):
                continue
            try:
                self._write_block(number, records)
                return True
            except UserError:
                self._claim_file(number).unlink(missing_ok=True)
                # A bad record is told when it is needed: by all ranks, in the same step.
                if number == needed:
                    raise
                self._bad.add(number)
        return False

    def _claim(self, number: int) -> bool:
        """Whether this rank is the one to make a block."""
        with self._told_if_unwritable():
            file = self._claim_file(number)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with file.open("x") as claim:
                    claim.write(f"{host_name()} {os.getpid()}\n")
            except FileExistsError:
                return False
        return True

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

    def _claim_file(self, number: int) -> Path:
        return self._file(number).with_suffix(".claim")

    def _write_block(self, number: int, records: Records) -> None:
        """Beside its place and renamed there, so that nobody reads half of it."""
        (documents, skipped), file = self._encode(number, records), self._file(number)
        beside = file.with_suffix(f".{host_name()}-{os.getpid()}.npz")
        with self._told_if_unwritable():
            np.savez(
                beside,
                input_ids=np.array([token for document in documents for token in document.input_ids], dtype=np.int32),
                trained=np.array([flag for document in documents for flag in document.trained], dtype=bool),
                lengths=np.array([len(document.input_ids) for document in documents], dtype=np.int64),
                skipped=skipped,
            )
            os.replace(beside, file)

    def _read_block(self, number: int) -> Block | None:
        """None if it is not there, or no longer; a damaged one is made again."""
        try:
            with np.load(self._file(number)) as block:
                bounds = np.cumsum(block["lengths"])[:-1]
                parts = zip(np.split(block["input_ids"], bounds), np.split(block["trained"], bounds), strict=True)
                documents = [Sample(ids.tolist(), trained.tolist(), [len(ids)]) for ids, trained in parts]
                return documents if len(block["lengths"]) else [], int(block["skipped"])
        except OSError:
            return None
        except (ValueError, KeyError, EOFError, BadZipFile):
            for file in (self._file(number), self._claim_file(number)):
                file.unlink(missing_ok=True)
            return None

    @contextmanager
    def _told_if_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"dataset.streaming=true: what the ranks tokenise for each other cannot be written to {self._folder} "
                f"({error.strerror}); make room there, or name another folder: TMPDIR, of several hosts output_dir"
            ) from None
