"""The program of a rank; it trains by trainer/rank.py.

deepspeed --module trainer.train CONFIG [key=value ...]      or      torchrun -m trainer.train CONFIG [key=value ...]
"""

from trainer.ranks.training_process import begin


def main(argv: list[str] | None = None) -> int:
    """Train; exit code 0 done, 1 failed or hung, 2 usage, 75 preempted and saved, 128+signal after a save."""
    begin()
    from trainer.rank import main as train

    return train(argv)


if __name__ == "__main__":
    code = main()
    from trainer.ranks.group import end_process

    end_process(code)
