"""Entry point of `python -m stress`, the same as `elastic-mbs stress`."""

import sys

from elastic_mbs.cli.command import main

if __name__ == "__main__":
    sys.exit(main(["stress", *sys.argv[1:]]))
