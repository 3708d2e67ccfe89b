"""Program of one run of a comparison, with the arguments of a rank: `CONFIG [key=value ...]`."""

from trainer.parallel.ranks.training_process import begin

if __name__ == "__main__":
    begin()
    from benchmarks.compare.measured_run import main
    from trainer.parallel.ranks.group import exit_process

    exit_process(main())
