"""What all verbs of `crt` have in common."""

import argparse
from typing import TypeAlias

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def verb(verbs: Verbs, name: str, help: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Add a verb whose help keeps its line breaks."""
    return verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
