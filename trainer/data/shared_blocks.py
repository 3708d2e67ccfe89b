"""Blocks of a stream, each tokenized once by one rank for all; streams.py explains why.

A block belongs to the rank that created its claim file (O_EXCL, which network file systems support). A lock would be
released if its holder died, but not every file system has locks across hosts. So a rank that has waited long for a
block makes it itself. This only costs time: blocks are renamed into place, and do not depend on their maker.
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
from trainer.contract.rendezvous import host_name
from trainer.data.samples import Sample, document_lengths

# Blocks made ahead of the needed one, and so the number of ranks that tokenize at the same time.
AHEAD = 32
# Blocks kept behind the needed one, for slower ranks and for repeated steps.
KEPT = 64
POLL_S, LONGEST_POLL_S = 0.005, 0.1
# For a claimed block: far longer than any takes.
PATIENCE_S = 60.0
Records = list[dict[str, Any]]
Block = tuple[list[Sample], int]
"""The documents of a block and the number of its skipped records."""


def host_blocks_folder(key: str) -> Path:
    """Return the folder of blocks for the ranks of one launcher on this host; removed when one of them ends."""
    parent = psutil.Process(os.getppid())
    base = Path(tempfile.gettempdir()) / f"zerolora-{os.getuid()}"
    folder = base / f"{key}-{parent.pid}-{parent.create_time():.0f}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run_blocks_folder(logs: Path, token: str, *, is_main: bool) -> Path:
    """Return the folder of blocks for the ranks of all hosts, in the logs of the run with the lock `token`.

    Rank 0 removes those of earlier runs, and this one at the end.
    """
    folder = logs / f"stream-{token}"
    if is_main:
        for left in logs.glob("stream-*"):
            if left != folder:
                shutil.rmtree(left, ignore_errors=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class SharedBlocks:
    """Blocks of one pass over a source. Without a folder, this process makes them all."""

    def __init__(
        self, records: Iterator[Records], encode: Callable[[int, Records], Block], folder: Path | None
    ) -> None:
        self._records, self._encode, self._folder = records, encode, folder
        self._read = 0  # blocks of records read
        self._ahead: dict[int, Records] = {}
        self._bad: set[int] = set()
        self._failure: UserError | None = None

    def block(self, number: int) -> Block | None:
        """Return a block, or None after the last; numbers must not decrease.

        Raises UserError in the same step on all ranks. Other ranks may have read records that this one can no longer
        read, such as those of a deleted file, so this rank waits for them before it gives up.
        """
        for passed in [passed for passed in self._ahead if passed < number]:
            del self._ahead[passed]
        try:
            records = self._take_records(number, number)
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
        """Return a block made by another rank, or None if it is missing after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while (made := self._read_block(number)) is None and time.monotonic() < deadline:
            time.sleep(LONGEST_POLL_S)
        return made

    def _made(self, needed: int, records: Records) -> Block:
        """Return a block once some rank has made it, and make others meanwhile."""
        deadline, pause = time.monotonic() + PATIENCE_S, POLL_S
        while (found := self._read_block(needed)) is None:
            if time.monotonic() > deadline:
                self._write_block(needed, records)
            elif not self._make_one(needed):
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
                with suppress(FileNotFoundError):
                    os.listdir(self._folder)  # makes network file systems refresh
        return found

    def _make_one(self, needed: int) -> bool:
        """Tokenize the first unclaimed block from `needed` on; return whether there was one."""
        for number in range(needed, needed + AHEAD):
            records = self._take_records(number, needed)
            if records is None:
                return False
            if self._file(number).exists() or (number in self._bad and number > needed) or not self._claim(number):
                continue
            try:
                self._write_block(number, records)
                return True
            except UserError:
                self._claim_file(number).unlink(missing_ok=True)
                # A bad record is reported when it is needed: by all ranks, in the same step.
                if number == needed:
                    raise
                self._bad.add(number)
        return False

    def _claim(self, number: int) -> bool:
        """Claim a block; return whether this rank is to make it."""
        with self._explain_unwritable():
            file = self._claim_file(number)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with file.open("x") as claim:
                    claim.write(f"{host_name()} {os.getpid()}\n")
            except FileExistsError:
                return False
        return True

    def _take_records(self, number: int, needed: int) -> Records | None:
        """Return the records of a block, dropping those before `needed`."""
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
        """Write a block and rename it into place, so that no rank reads half of it."""
        (documents, skipped), file = self._encode(number, records), self._file(number)
        temporary = file.with_suffix(f".{host_name()}-{os.getpid()}.npz")
        with self._explain_unwritable():
            np.savez(
                temporary,
                input_ids=np.array([token for document in documents for token in document.input_ids], dtype=np.int32),
                trained=np.array([weight for document in documents for weight in document.trained], dtype=np.float32),
                lengths=np.array([len(document.input_ids) for document in documents], dtype=np.int64),
                rejected=np.array([sum(document.document_lengths[1:]) for document in documents], dtype=np.int64),
                skipped=skipped,
            )
            os.replace(temporary, file)

    def _read_block(self, number: int) -> Block | None:
        """Return a block, or None if it is missing; damaged blocks are removed."""
        try:
            with np.load(self._file(number)) as block:
                bounds = np.cumsum(block["lengths"])[:-1]
                parts = (np.split(block[name], bounds) for name in ("input_ids", "trained"))
                documents = [
                    Sample(ids.tolist(), trained.tolist(), document_lengths(len(ids), rejected))
                    for ids, trained, rejected in zip(*parts, block["rejected"].tolist(), strict=False)
                ]
                return documents, int(block["skipped"])
        except OSError:
            return None
        except (ValueError, KeyError, EOFError, BadZipFile):
            for file in (self._file(number), self._claim_file(number)):
                file.unlink(missing_ok=True)
            return None

    @contextmanager
    def _explain_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"dataset.streaming=true: data that ranks share cannot be written to {self._folder} ({error.strerror}"
                "); make room there, or set another folder with TMPDIR (several hosts: output_dir)"
            ) from None
