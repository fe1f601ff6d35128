"""``python -m runtime.engine.native build``: compiles the CPU kernels for this machine, once."""

import argparse
import sys

from runtime.engine.native import BuildError, build, find


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.engine.native", description=__doc__)
    parser.add_argument("command", choices=("build", "where"))
    parser.add_argument("--force", action="store_true", help="build even where a library for this machine is there")
    arguments = parser.parse_args()
    found = find()
    if arguments.command == "where":
        print(found or "not built")
        return 0 if found else 1
    if found and not arguments.force:
        print(f"{found} is up to date")
        return 0
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(f"The CPU kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
