"""``python -m drivetrain.checkpoint``: look at checkpoints, compare them, carry their weights elsewhere."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from drivetrain.checkpoint import consolidate, convert, diff, show, verify
from drivetrain.errors import DrivetrainError


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return 0, 1 where something differs or is damaged, 2 where it cannot be done."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):  # names that a file gives may be no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(options)
    except DrivetrainError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stderr.close()
        return 0


def _run(options: argparse.Namespace) -> int:
    if options.command == "show":
        print(show(options.path))
    elif options.command == "consolidate":
        print(consolidate(options.path, options.out))
    elif options.command == "convert":
        given = {"prefix": options.prefix, "to": options.to, "config": options.config}
        print(convert(options.path, options.out, **given, max_shard_size=options.max_shard_size))
    else:
        verifying = options.command == "verify"
        lines = verify(options.path, options.digest) if verifying else diff(options.path, options.other)
        print("\n".join(lines) or f"{options.path} is {'whole' if verifying else f'equal to {options.other}'}.")
        return 1 if lines else 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m drivetrain.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("path", metavar="PATH", help="a path or an fsspec URL")
        return added

    verifying = command("verify", "Read all of a checkpoint and name every missing, truncated or altered file.")
    verifying.add_argument("--digest", choices=["sha256"], help="require that every file has one")
    command("show", "Print progress, sizes and a table of tensors.")
    command("diff", "Compare two checkpoints by name.").add_argument("other", metavar="OTHER")
    command("consolidate", "Write the weights into one safetensors file.").add_argument("out", metavar="OUT")
    converting = command(
        "convert",
        "Turn what another library saved into a checkpoint of weights, or the other way round.",
    )
    converting.add_argument("out", metavar="OUT")
    converting.add_argument("--prefix", default="", help="take names that begin so, and leave it out")
    converting.add_argument("--to", choices=["checkpoint", "hf"], default="checkpoint", help="hf: for from_pretrained")
    converting.add_argument("--config", help="with --to hf: a config.json, in place of the checkpoint's")
    converting.add_argument("--max-shard-size", default="50GB", help="with --to hf: of a file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
