"""The command ``shardplan``, and ``python -m shardplan``. It handles Ctrl-C while the command line is still loading."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs one command and returns its exit code."""
    try:
        from shardplan.shell import interrupts

        with interrupts.heard():
            from shardplan.shell.cli import main as command

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("shardplan: interrupted while loading: nothing was done\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
