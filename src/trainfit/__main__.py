"""``python -m trainfit``: the ``trainfit`` command, as torchrun starts it."""

import sys

from trainfit.cli.entry import command

if __name__ == "__main__":
    sys.exit(command())
