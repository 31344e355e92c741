"""The `limelight` command: serve, chat, generate, inspect, quantize, draft and bench.

Nothing heavy is imported before a command runs, so that the help answers at once.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from limelight import SamplingParams, StructuredOutputsParams, __version__
from limelight.bench import decode, ops, prefill, serve, spec, startup
from limelight.checkpoint import BUNDLED_PARSERS
from limelight.config import PARSERS, EngineConfig, ServerConfig, check_parsers
from limelight.flags import (
    add_config_flags,
    add_foreign_flags,
    check_foreign,
    check_leftover,
    config_from,
    json_object,
    merge,
    new_file,
    spell,
)
from limelight.parallel.torchrun import started_by_torchrun
from limelight.training.settings import DraftSettings

if TYPE_CHECKING:
    from limelight.training.acceptance import Acceptance

FORMATS = ("gguf-nvfp4", "modelopt-nvfp4", "mxfp8")
# A bundled model has its parsers unless one of these is given.
READING = ("reasoning_parser", "tool_call_parser", "enable_auto_tool_choice")
BENCHES = {
    "decode": decode, "prefill": prefill, "serve": serve, "spec": spec, "ops": ops,
    "startup": startup,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv`; returns its exit code: 2 for a user's mistake, 1 for a failure."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse(argv)
        for line in check_foreign(args):
            print(f"limelight: warning: {line}", file=sys.stderr)
        return args.run(args)
    except (ValueError, argparse.ArgumentError) as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: Exception | str, code: int) -> int:
    print(f"limelight: error: {error}", file=sys.stderr)
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of `argv`; `run` among them is the command's function."""
    parser = _parser("limelight", "Serve the Flint and Beam model families.")
    parser.add_argument("--version", action="version", version=f"limelight {__version__}")
    parser.set_defaults(parser=parser, run=None)
    commands = _commands(parser)
    for name, (text, add_flags, run) in COMMANDS.items():
        command = _add(commands, name, text)
        # Those of all commands take longer to make than the help may take.
        if name in argv:
            add_flags(command)
        if run is not None:
            command.set_defaults(run=run)
    args, leftover = parser.parse_known_args(spell(argv))
    check_leftover(leftover, args.parser)
    if args.run is None:
        raise ValueError(f"give a command; `{args.parser.prog} --help` lists them")
    args.argv = argv
    return args


def _parser(prog: str, text: str) -> argparse.ArgumentParser:
    # Errors are raised, and nothing is required, so that every mistake is told in our one line.
    return argparse.ArgumentParser(prog, description=text, allow_abbrev=False, exit_on_error=False)


def _commands(parser: argparse.ArgumentParser):
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def _add(commands, name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False, exit_on_error=False
    )
    command.set_defaults(parser=command)
    return command


def _engine_flags(parser: argparse.ArgumentParser):
    default = EngineConfig.model
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS,
        help=f"bundled model, local folder or hub id (default: {default})",
    )  # fmt: skip
    add_config_flags(parser, EngineConfig, title="engine")
    add_foreign_flags(parser)


def _serve_flags(parser: argparse.ArgumentParser):
    _engine_flags(parser)
    add_config_flags(parser, ServerConfig, title="server")


def _sampling_flags(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0, the likeliest")
    group.add_argument(
        "--sampling", type=json_object, action="append", default=[], metavar="JSON",
        help="other fields of SamplingParams; also --sampling.top_p 0.9",
    )  # fmt: skip


def _generate_flags(parser: argparse.ArgumentParser):
    parser.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more texts to go on")
    parser.add_argument("--json", action="store_true", help="print one JSON list of answers")
    _sampling_flags(parser)
    _engine_flags(parser)


def _chat_flags(parser: argparse.ArgumentParser):
    parser.add_argument("--system", metavar="TEXT", help="system message to begin with")
    for name, what in (("--reasoning-parser", "reasoning"), ("--tool-call-parser", "calls")):
        parser.add_argument(
            name, choices=("auto", "none", *PARSERS), default="auto",
            help=f"format of the {what} in answers (default: auto, what the model writes)",
        )  # fmt: skip
    _sampling_flags(parser)
    _engine_flags(parser)


def _inspect_flags(parser: argparse.ArgumentParser):
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _engine_flags(parser)


def _quantize_flags(parser: argparse.ArgumentParser):
    parser.add_argument(
        "source", nargs="?", metavar="SRC", help="bundled model, local folder or hub id"
    )
    parser.add_argument(
        "into", nargs="?", metavar="DST", help="file NAME.gguf or folder to be made"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="one GGUF file, or a folder: ModelOpt's NVFP4, or MXFP8"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where to compute (default: auto, a GPU if there is one)",
    )  # fmt: skip


def _bench_flags(parser: argparse.ArgumentParser):
    benches = _commands(parser)
    for name, bench in BENCHES.items():
        text = (bench.__doc__ or "").partition(": ")[2].splitlines()[0]
        command = _add(benches, name, text)
        for flag, what in (
            ("--json", "write one JSON object to"),
            ("--plot", "draw the figures into"),
        ):
            command.add_argument(flag, type=new_file, metavar="FILE", help=f"{what} FILE")
        bench.add_flags(command)
        if bench is not serve:
            _engine_flags(command)
        command.set_defaults(run=_bench, bench=name)


def _draft_flags(parser: argparse.ArgumentParser):
    commands = _commands(parser)
    train = _add(commands, "train", "Train a drafter for a model on what the model says itself.")
    _engine_flags(train)
    add_config_flags(train, DraftSettings, title="training")
    train.add_argument(
        "--json", type=new_file, metavar="FILE", help="write one JSON object to FILE"
    )
    train.set_defaults(run=_draft_train)
    judge = _add(commands, "eval", "Tell how many drafts of a drafter a model would accept.")
    _engine_flags(judge)
    judge.add_argument(
        "drafter", nargs="?", metavar="DRAFTER", help="bundled drafter, local folder or hub id"
    )
    judge.add_argument("--data", metavar="FILE", help="JSON lines of prompts or messages")
    judge.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="default: all that its block has"
    )
    judge.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    judge.add_argument(
        "--json", type=new_file, metavar="FILE", help="write one JSON object to FILE"
    )
    judge.set_defaults(run=_draft_eval)


def _serve(args: argparse.Namespace) -> int:
    engine, server = configs_of(args)
    if (torchrun := started_by_torchrun()) is not None:
        torchrun.check(engine, server)
        if torchrun.rank > 0:
            from limelight.engine.worker import follow

            return follow(engine, torchrun)
    if server.ray:
        return _serve_by_ray(engine, server)
    from limelight.server.app import run

    return run(engine, server, torchrun)


def _serve_by_ray(engine: EngineConfig, server: ServerConfig) -> int:
    try:
        from limelight.deploy import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ValueError('--ray needs Ray Serve: pip install "limelight-serve[ray]"') from error
    return run(engine, server)


def configs_of(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """What the flags of `serve` say."""
    engine = config_from(args, EngineConfig)
    reading = _reading(args, engine.model)
    server = config_from(args, ServerConfig, **reading)
    if reading:
        print(
            f"limelight: {engine.model} has the parsers {server.reasoning_parser} and "
            "--enable-auto-tool-choice of itself; --no-enable-auto-tool-choice serves plain text"
        )
    return engine, server


def _reading(args: argparse.Namespace, model: str) -> dict[str, object]:
    """How the answers of a bundled model are read, where the command line says nothing of it."""
    parser = BUNDLED_PARSERS.get(model)
    if parser is None or any(hasattr(args, name) for name in READING):
        return {}
    return dict(zip(READING, (parser, parser, True), strict=True))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling flags as `SamplingParams`; `ValueError` for a field that it does not have."""
    values: dict[str, object] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    values |= merge(args.sampling)
    known = [item.name for item in fields(SamplingParams)]
    for name in values:
        if name not in known:
            raise ValueError(f"--sampling has no key {name!r}; it has {', '.join(known)}")
    if isinstance(given := values.get("structured_outputs"), dict):
        names = [item.name for item in fields(StructuredOutputsParams)]
        for name in given:
            if name not in names:
                raise ValueError(f"structured_outputs has no {name!r}; it has {', '.join(names)}")
        values["structured_outputs"] = StructuredOutputsParams(**given)
    make: Callable[..., SamplingParams] = SamplingParams
    return make(**values)


def _generate(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if not args.prompt:
        raise ValueError("give --prompt TEXT")
    config = config_from(args, EngineConfig)
    from limelight.engine.llm import LLM

    with LLM(**asdict(config)) as llm:
        answers = llm.generate(args.prompt, params)
    rows = [
        {
            "prompt": prompt,
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
        }
        for prompt, answer in zip(args.prompt, answers, strict=True)
        for choice in answer.outputs
    ]
    print(json.dumps(rows, indent=1) if args.json else "\n".join(row["text"] for row in rows))
    failed = [choice.error for answer in answers for choice in answer.outputs if choice.error]
    return _fail("; ".join(failed), 1) if failed else 0


def _chat(args: argparse.Namespace) -> int:
    named = (args.reasoning_parser, args.tool_call_parser)
    reasoning, calls = (None if name == "none" else name for name in named)
    check_parsers(reasoning, calls)
    from limelight.chat import run

    return run(
        config_from(args, EngineConfig),
        sampling_params(args),
        system=args.system,
        reasoning_parser=reasoning,
        tool_call_parser=calls,
    )


def _inspect(args: argparse.Namespace) -> int:
    from limelight.inspection import inspect, show

    report = inspect(config_from(args, EngineConfig))
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0


def _quantize(args: argparse.Namespace) -> int:
    if not (args.source and args.into and args.format):
        raise ValueError(f"give SRC, DST and --format, one of {', '.join(FORMATS)}")
    from limelight.progress import Progress
    from limelight.quantize import quantize, show

    show(
        quantize(
            args.source, args.into, format=args.format, device=args.device, progress=Progress()
        )
    )
    return 0


def _draft_train(args: argparse.Namespace) -> int:
    settings = config_from(args, DraftSettings)
    from limelight.progress import Progress
    from limelight.training.course import train

    config = config_from(args, EngineConfig)
    found = train(config, settings, progress=Progress())
    return _tell_acceptance(args, config.model, str(settings.out), found)


def _draft_eval(args: argparse.Namespace) -> int:
    if not args.drafter or not args.data:
        raise ValueError("give MODEL, DRAFTER and --data FILE")
    from limelight.progress import Progress
    from limelight.training.trial import evaluate

    config = config_from(args, EngineConfig)
    found = evaluate(
        config, args.drafter, args.data,
        drafts=args.num_speculative_tokens, max_tokens=args.max_tokens, progress=Progress(),
    )  # fmt: skip
    return _tell_acceptance(args, config.model, args.drafter, found)


def _tell_acceptance(
    args: argparse.Namespace, model: str, drafter: str, found: "dict[str, Acceptance]"
) -> int:
    from limelight.bench.record import record, save
    from limelight.training.trial import rows, show

    report = rows(found)
    show(report)
    if args.json:
        names: dict[str, object] = {"model": model, "drafter": drafter}
        save(args.json, record("spec", args.argv, [names | row for row in report]))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from limelight.bench.record import record, save, show

    # A start takes minutes on some machines: say what it is at.
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%X")
    logging.getLogger("limelight").setLevel(logging.INFO)
    rows = BENCHES[args.bench].run(args)
    show(args.bench, rows)
    if args.json:
        save(args.json, record(args.bench, args.argv, rows))
    if args.plot:
        from limelight.bench.plot import draw

        draw(args.plot, args.bench, rows)
    return 0


COMMANDS = {
    "serve": ("Serve a model over the OpenAI HTTP API.", _serve_flags, _serve),
    "chat": ("Talk with a model in the terminal.", _chat_flags, _chat),
    "generate": ("Complete prompts and print the texts.", _generate_flags, _generate),
    "inspect": ("Tell what a model holds and whether it fits.", _inspect_flags, _inspect),
    "quantize": ("Write a checkpoint anew in NVFP4 or MXFP8.", _quantize_flags, _quantize),
    "draft": ("Train or judge a drafter.", _draft_flags, None),
    "bench": ("Measure speed and write it down.", _bench_flags, None),
}
