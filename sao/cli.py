"""The `sao` command. Each verb imports what it needs when it runs, so that help and refusals are instant.

Exit codes: 0 done, 1 a failure while running, 2 a mistake in the command or the configuration, 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sao.errors import INTERRUPTED, ConfigError, SystemFailure, UserError

EVAL_HELP = "[aime] run=FOLDER (or model=DIRECTORY env=NAME) [env=NAME] [checkpoint=final] [n=4] [temperature=1.0] [tasks=256] and any override of the run's configuration"
OVERRIDES_HELP = "Hydra overrides: group=choice or key=value, for instance experiment=demo train.steps=50"


def _train(args: argparse.Namespace) -> int:
    from sao.multirun import run_sweep

    return run_sweep(args.overrides) if args.multirun else _run(args.overrides, "train")


def _online(args: argparse.Namespace) -> int:
    return _run(args.overrides, "online")


def _run(overrides: Sequence[str], verb: str) -> int:
    """Start a run, or go on with the one that `resume=` names."""
    from sao import resume
    from sao.config_load import compose

    started = _process_start()
    run, overrides = resume.split(overrides)
    config, changes = (compose(overrides), []) if run is None else resume.load(run, overrides)
    if verb == "online" and not config.online.phases:
        raise ConfigError(
            "sao online needs a stream, but online.phases is empty; choose experiment=style_stream or give phases (a fixed task is for sao train)"
        )
    for change in changes:
        print(f"changed: {change}")
    from sao.train import train

    return train(config, overrides, started=started, resume=run is not None, verb=verb)


def _process_start() -> float:
    """When this process began, on the monotonic clock: what a user has waited includes the imports."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def _warmstart(args: argparse.Namespace) -> int:
    from sao.config_load import compose
    from sao.warmstart import warmstart

    config = compose(args.overrides)
    print(warmstart(config))
    return 0


def _eval(args: argparse.Namespace) -> int:
    if args.arguments[:1] == ["aime"]:
        from sao.evals.aime import aime_command

        return aime_command(args.arguments[1:])
    if args.arguments[:1] == ["swebench"]:
        from sao.evals.swebench import swebench_command

        return swebench_command(args.arguments[1:])
    from sao.evals.job import evaluate_command

    return evaluate_command(args.arguments)


def _export(args: argparse.Namespace) -> int:
    from sao.runtime.export import export_command

    return export_command(args.arguments)


def _config(args: argparse.Namespace) -> int:
    from sao.config import Config
    from sao.config_load import compose
    from sao.config_yaml import to_yaml

    if args.keys:
        rows = list(_key_rows(Config()))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        print("\n".join(f"{key:<{widths[0]}}  {kind:<{widths[1]}}  {default}" for key, kind, default in rows))
        return 0
    print(to_yaml(compose(args.overrides)), end="")
    return 0


def _key_rows(section: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, type, default) of every leaf of a section of the schema, in its order; defaults as one would write them in YAML."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _key_rows(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", str(field.type), json.dumps(value)


def _doctor(args: argparse.Namespace) -> int:
    from sao.runtime.doctor import doctor

    return doctor(args.overrides)


def _report(args: argparse.Namespace) -> int:
    from sao.report.html import write_report
    from sao.runtime.saved import run_folder

    print(write_report(run_folder(args.run)))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from sao.report.inspect import main as inspect
    from sao.runtime.saved import run_folder

    inspect(run_folder(args.run), args.episode, step=args.step, dropped=args.dropped)
    return 0


def _episode(text: str) -> tuple[int, int | None]:
    """`6674` or, as the table prints it, `6674.0`: the episode's ordinal, and its attempt if one is given."""
    ordinal, dot, attempt = text.partition(".")
    if not ordinal.isdecimal() or (dot and not attempt.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an episode: write its ordinal, or ordinal.attempt as the table shows it, for instance 98.0"
        )
    return int(ordinal), int(attempt) if dot else None


def _replay(args: argparse.Namespace) -> int:
    from sao.replay.command import replay_command
    from sao.runtime.saved import run_folder

    return replay_command(run_folder(args.run), args.step, as_json=args.json)


def _env(args: argparse.Namespace) -> int:
    if args.action == "make":
        from sao.swe.command import make

        return make(args)
    from sao.environments.command import env_command

    return env_command(args)


def _bench(args: argparse.Namespace) -> int:
    from sao.bench import bench

    return bench(args.ids)


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(prog="sao", description="Single-rollout Asynchronous Optimization of language-model agents.")
    verbs = main_parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str, *, overrides: bool = False) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=run)
        if overrides:
            sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
        return sub

    train = verb("train", _train, "train a policy", overrides=True)
    train.add_argument("-m", "--multirun", action="store_true", help="sweep: key=a,b runs every combination")
    verb("online", _online, "train on a stream that changes without notice, by the same loop, until train.steps or Ctrl-C", overrides=True)
    verb("warmstart", _warmstart, "supervised start from an environment's demonstrations; cached", overrides=True)
    evaluation = verb("eval", _eval, "evaluate a checkpoint of a run, or a Hugging Face directory, on held-out tasks")
    evaluation.add_argument("arguments", nargs="*", metavar="key=value", help=EVAL_HELP)
    export = verb("export", _export, "copy policy and critic of a checkpoint as plain Hugging Face directories")
    export.add_argument("arguments", nargs="*", metavar="key=value", help="run=FOLDER to=FOLDER [checkpoint=final]")
    config = verb("config", _config, "print the resolved configuration", overrides=True)
    config.add_argument("--keys", action="store_true", help="list every key with its type and default")
    verb("doctor", _doctor, "say what this machine can do and what is missing", overrides=True)
    report = verb("report", _report, "write report.html of a run folder")
    report.add_argument("run", metavar="RUN")
    inspect = verb("inspect", _inspect, "look at a run's trajectories token by token, and at what was dropped")
    inspect.add_argument("run", metavar="RUN")
    inspect.add_argument("episode", nargs="?", type=_episode, metavar="EPISODE", help="ORDINAL or ORDINAL.ATTEMPT: show this one token by token")
    inspect.add_argument("--dropped", action="store_true", help="list what was not trained, and every failed attempt, with the reasons")
    inspect.add_argument("--step", type=int, help="the step to list, 0-based, as the files are named; the last one by default")
    replay = verb("replay", _replay, "train one step of a run again and compare it, bit by bit, with what the run recorded")
    replay.add_argument("run", metavar="RUN")
    replay.add_argument("--step", type=int, required=True, help="the step, 0-based, as the files are named")
    replay.add_argument("--json", action="store_true", help="the whole comparison as JSON")
    env = verb("env", _env, "list environments, play one by hand, begin one of your own, or make tasks")
    actions = env.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="what ships, its arguments, how to start it")
    attempt = actions.add_parser("try", help="play one episode without a model: you answer, or a pipe does")
    attempt.add_argument("overrides", nargs="*", metavar="key=value", help="env=NAME or env=module:Class, env.args.*, and any other key")
    attempt.add_argument("--random", action="store_true", help="random answers instead of yours")
    attempt.add_argument("--task", type=int, default=0, metavar="N", help="which task of the stream, 0-based")
    begin = actions.add_parser("init", help="write NAME/, an environment with a test and a configuration that trains at once")
    begin.add_argument("name", metavar="NAME")
    made = actions.add_parser("make", help="make tasks for an environment that needs them")
    made.add_argument("name", choices=["swe"], help="swe: one-line bugs in small packages, each verified")
    made.add_argument(
        "--packages", default="", metavar="A,B", help="names on the package index, source distributions or directories; default: a list of nine"
    )
    made.add_argument("--to", default="runs/swe-tasks", metavar="DIR", help="the task repository to write or to go on with")
    made.add_argument("--tasks", type=int, default=200, metavar="N", help="how many tasks there shall be in all")
    made.add_argument("--held-out", default="", metavar="A,B", help="packages no training task comes from; default: a fifth of them")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--parallel", type=int, default=2, metavar="N", help="candidates tried at once")
    made.add_argument("--minutes", type=float, default=float("inf"), metavar="M", help="stop after so long; the same command goes on")
    made.add_argument("--backend", default="bwrap", help="the sandbox, as env.sandbox.backend")
    bench = verb("bench", _bench, "list the benchmarks, or run those named")
    bench.add_argument("ids", nargs="*", metavar="ID")
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        code = int(args.handler(args))
        sys.stdout.flush()  # what cannot be written shows here, not while the interpreter ends
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemFailure as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 141


def _reader_is_gone() -> bool:
    """Whether the pipe that broke is our output (`sao config --keys | head`); if so, what is left of it goes nowhere, without a complaint at exit."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):  # POLLERR is reported unasked once a pipe has no reader
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


if __name__ == "__main__":
    sys.exit(main())
