"""`rwkv-clip`: one subcommand per job, each in the module that does the work.

A command module offers `add_arguments(parser)` and `run(args) -> int` (the exit status). It is imported only when its
command is called, so that one command's missing dependency never stops another.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from typing import Any, NoReturn

from .errors import UserError, check_flags, report
from .version import __version__

COMMANDS = {
    "pack": ("rwkv_clip.data.pack", "pack images and captions into RecordIO shards"),
    "inspect": ("rwkv_clip.data.inspect", "describe and check a packed data set"),
    "prepare": ("rwkv_clip.data.prepare", "build a ready data set (pictograms, shapes), or fetch one (yfcc15m)"),
    "plan": ("rwkv_clip.training.forecast", "predict a run's memory per GPU, its steps and its time"),
    "evaluate": ("rwkv_clip.evaluation.evaluate", "zero-shot classification and retrieval scores of a model"),
    "export": ("rwkv_clip.model.export", "write a run's weights in the published format"),
    "report": ("rwkv_clip.ops.report", "show which ops can be built here, and why not"),
}


class _Parser(argparse.ArgumentParser):
    """argparse that raises one-line `UserError`s instead of printing the usage, and takes no flag for another."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is None:  # a command's own
            check_flags(args, self._option_string_actions)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    """Parse `argv` (default: the process's own arguments), run one subcommand, return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    # Names of files may hold bytes that are no text; stderr shows them so already.
    with contextlib.suppress(AttributeError):  # a stream of another kind may stand in
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _Parser(prog="rwkv-clip", description="Data, evaluation and export for RWKV-CLIP.")
    parser.add_argument("--version", action="version", version=f"rwkv-clip {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    try:
        for name, (module_name, summary) in COMMANDS.items():
            subparser = subparsers.add_parser(name, help=summary, description=summary)
            if name == chosen:  # which takes seconds where it is PyTorch's
                module = importlib.import_module(module_name)
                module.add_arguments(subparser)
                subparser.set_defaults(run=module.run)
        args = parser.parse_args(argv)
        return args.run(args)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still has to write
        return 141  # as of a process that SIGPIPE ended


if __name__ == "__main__":
    sys.exit(main())
