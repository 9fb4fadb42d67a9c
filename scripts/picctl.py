"""`picctl`: an operator's view of the chunks that servers keep, and changes of them.

Knows the commands and how the program ends. Each command is in a module of its group. Exit codes:
0 done, 1 something failed or is wrong, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

from sglang_ext.errors import ConfigError, ExtError
from sglang_ext.scripts import (
    picctl_change,
    picctl_doctor,
    picctl_top,
    picctl_verify,
    picctl_view,
    picctl_warm,
)
from sglang_ext.scripts.picctl_options import Context, Parser, common_parser, read_options
from sglang_ext.scripts.picctl_output import Output

GROUPS = (picctl_warm, picctl_view, picctl_top, picctl_change, picctl_verify, picctl_doctor)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = Parser(prog="picctl", description="Look after the chunks that servers keep.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = common_parser()
    for group in GROUPS:
        group.add_commands(commands, common)
    return parser


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Carry out one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    variables = os.environ if environment is None else environment
    out = Output(sys.stdout, sys.stderr, is_json="--json" in words)
    try:
        args = build_parser().parse_args(words)
        context = Context(read_options(args, variables), out, int(time.time() * 1e3))
        run = args.run
        code: int = run(args, context)
        return code
    except ConfigError as exc:
        out.failure(str(exc))
        return 2
    except ExtError as exc:
        out.failure(str(exc))
        return 1
    except KeyboardInterrupt:
        out.note("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run() -> None:
    """The console script."""
    logging.getLogger("sglang_ext").addHandler(logging.NullHandler())  # what fails is told once
    sys.exit(main())


if __name__ == "__main__":
    run()
