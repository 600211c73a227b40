"""`python -m ziggurat`, for torchrun and machines where scripts are not on the path."""

import sys


def run() -> int:
    """Run the command line of this process; Ctrl-C while it is still imported ends it without a traceback."""
    try:
        from ziggurat.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
