"""``python -m drivetrain.checkpoint``: inspect, verify and convert checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from drivetrain.checkpoint import consolidate, convert, show, verify
from drivetrain.errors import DrivetrainError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Returns:
        0 on success, 1 if files are damaged, 2 on an error.
    """
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except DrivetrainError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command == "show":
        print(show(options.path))
    elif options.command == "consolidate":
        print(consolidate(options.path, options.out, options.averaged, overwrite=options.overwrite))
    elif options.command == "convert":
        print(convert(options.path, options.out, prefix=options.prefix, to=options.to, averaged=options.averaged))
    else:
        lines = verify(options.path)
        print("\n".join(lines) or f"{options.path} is intact.")
        return 1 if lines else 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m drivetrain.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.add_argument("path", metavar="PATH", help="a path or an fsspec URL")
        return subparser

    command("verify", "Read a whole checkpoint and list every missing, truncated or altered file.")
    command("show", "Print a checkpoint's training progress, file sizes and a table of its tensors.")
    consolidate_parser = command("consolidate", "Write a checkpoint's weights into one safetensors file.")
    consolidate_parser.add_argument(
        "out", metavar="OUT", help="the .safetensors file to write, or a folder in which model.safetensors is written"
    )
    consolidate_parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    convert_parser = command(
        "convert",
        "Convert another library's file to a checkpoint, or a checkpoint to the Hugging Face layout.",
    )
    convert_parser.add_argument("out", metavar="OUT", help="the checkpoint or folder to write")
    convert_parser.add_argument(
        "--prefix", default="", help="convert only tensors whose names begin with this prefix, and remove the prefix"
    )
    convert_parser.add_argument(
        "--to",
        choices=["checkpoint", "hf"],
        default="checkpoint",
        help="format to write; hf is the folder layout that Hugging Face's from_pretrained reads",
    )
    for writing in (consolidate_parser, convert_parser):
        writing.add_argument(
            "--averaged",
            action=argparse.BooleanOptionalAction,
            help="write the averages, or the trained weights; by default those that the run evaluated with",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
