"""The command `allhands`: what a learner says to the course from a shell."""

import argparse
import sys
from collections.abc import Sequence

from allhands import course, lessons


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status: 0, 1 if the system refused it, 2 for what cannot be meant."""
    parser = argparse.ArgumentParser(prog="allhands", description="All Hands: your own copies of the lessons, in work/.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("start", help="copy the lessons that are not there yet (make lab does it)")
    again = commands.add_parser("reset", help="begin a lesson again; what you had is kept beside it")
    again.add_argument("topic", metavar="TOPIC", help="such as ranks_and_messages, or 01")
    options = parser.parse_args(arguments)
    try:
        if options.command == "start":
            lessons.start_all()
        elif options.command == "reset":
            lessons.reset(options.topic)
        else:
            parser.print_help()
    except ValueError as error:
        return _failed(str(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _failed(f"{where}{course.reason(error)}", 1)
    return 0


def _failed(what: str, status: int) -> int:
    print(f"allhands: {what}", file=sys.stderr)
    return status
