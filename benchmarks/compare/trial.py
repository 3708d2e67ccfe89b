"""Program of one run of a comparison, with the arguments of a rank: `CONFIG [key=value ...]`."""

from trainer.parallel.ranks.training_process import set_up_process

if __name__ == "__main__":
    set_up_process()
    from benchmarks.compare.measured_run import main
    from trainer.parallel.ranks.group import exit_process

    exit_process(main())
