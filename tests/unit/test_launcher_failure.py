"""What is shown of a failed run's logs."""

from pathlib import Path

import pytest

from launcher.failure import describe_exit, last_traceback, log_sizes, tell_failure

CHAINED = """\
some line
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
KeyError: 'x'

The above exception was the direct cause of the following exception:

[rank1]: Traceback (most recent call last):
[rank1]:   File "b.py", line 2, in h
[rank1]:     raise RuntimeError("first line\\nsecond line")
[rank1]: RuntimeError: first line
[rank1]: second line

a warning at exit
"""
OWN = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: own mistake\n'
PEER = 'Traceback (most recent call last):\n  File "c.py", line 9, in g\nRuntimeError: Connection closed by peer\n'


def test_the_last_traceback_is_taken_without_rank_marks() -> None:
    assert last_traceback(CHAINED) == [
        "Traceback (most recent call last):",
        '  File "b.py", line 2, in h',
        '    raise RuntimeError("first line\\nsecond line")',
        "RuntimeError: first line",
        "second line",
    ]


def test_a_deep_traceback_keeps_its_innermost_frames() -> None:
    frames = "".join(f'  File "deep.py", line {n}, in f\n    f({n})\n' for n in range(40))
    lines = last_traceback(f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n")
    assert len(lines) <= 14
    assert lines[1] == "  ..." and lines[-2:] == ["    f(39)", "RecursionError: too deep"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ended with exit code 1"),
        (247, "killed by signal 9 (SIGKILL); usually host memory"),
        (249, "killed by signal 7 (SIGBUS); usually /dev/shm"),
        (-9, "killed by signal 9"),
        (0, "without saying that every rank succeeded"),
        (75, "ended with exit code 75"),
    ],
)
def test_exit_codes_are_put_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_the_rank_with_a_mistake_of_its_own_is_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").write_text(PEER)
    (tmp_path / "rank-1.log").write_text(OWN)
    tell_failure(tmp_path, {}, {0: 1.0, 1: 1.2}, 1)
    shown = capsys.readouterr().err
    assert shown.startswith("the run failed: rank 1 ended") and "own mistake" in shown and "peer" not in shown


def test_what_an_earlier_run_wrote_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").write_text(OWN)
    sizes = log_sizes(tmp_path)
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write(PEER)
    tell_failure(tmp_path, sizes, {0: 1.0}, 1)
    shown = capsys.readouterr().err
    assert "Connection closed by peer" in shown and "own mistake" not in shown
