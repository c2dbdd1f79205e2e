"""`python -m contextready`, which is how `torchrun -m contextready` starts the command."""

import sys

if __name__ == "__main__":
    try:
        from contextready.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
