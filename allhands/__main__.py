"""`python -m allhands` is the command `allhands`."""

import sys

from allhands.command import main

if __name__ == "__main__":
    sys.exit(main())
