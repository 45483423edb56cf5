"""Time per training step: by hand, keras_mirror, DataParallel and one device.

    python benchmarks/step.py [--models mlp,cnn] [--rounds R] [--steps S]
                              [--json] [--plot out.png]

All in one run: in each round every contender trains for the same steps on the same
data in host memory, in another order each round. On a machine without accelerators
it uses four virtual CPU devices; fewer cores than devices make it noisy, which the
quartiles show. Tables go to stdout, progress to stderr. An aim that is not met does
not make the exit code differ from 0.
"""

import argparse
import json
import sys
from typing import Any

import environment

MODELS = ("mlp", "mlp_bn", "cnn", "transformer")
# With 32 steps in flight XLA's CPU client can deadlock (see `handwritten.py`), and
# neither DataParallel nor plain `fit` bounds how far it runs ahead within an epoch.
MOST_STEPS = 30


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument(
        "--steps", type=int, default=MOST_STEPS, help=f"of one fit, 3 to {MOST_STEPS}"
    )
    parser.add_argument("--json", action="store_true", help="print one object instead")
    parser.add_argument("--plot", metavar="PATH", help="write a bar chart")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only compare the hand-written loop with one device, on every model "
        "whose replicas compute what one device does",
    )
    found = parser.parse_args(arguments)
    found.models = found.models.split(",")
    unknown = sorted(set(found.models) - set(MODELS))
    if unknown:
        parser.error(f"unknown models {unknown}; there are {list(MODELS)}")
    if not 3 <= found.steps <= MOST_STEPS:
        parser.error(f"--steps must be 3 to {MOST_STEPS}. Received: {found.steps}")
    if found.rounds < 1:
        parser.error(f"--rounds must be at least 1. Received: {found.rounds}")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    environment.prepare()
    # From here on JAX is imported, with what was just set.
    from rich.console import Console

    progress = Console(stderr=True)
    if options.check:
        return run_checks(progress)
    return run(options, progress)


def run_checks(console: Any) -> int:
    import models
    from measuring import check

    for case in models.CASES.values():
        if not case.is_random:
            console.print(f"{case.title}: largest weight difference {check(case):.1e}")
    return 0


def run(options: argparse.Namespace, progress: Any) -> int:
    import models
    import reporting
    from measuring import check, measure
    from rich.console import Console

    check(models.CASES["mlp"])
    results = {}
    for name in options.models:
        case = models.CASES[name]
        with progress.status(case.title) as status:
            results[name] = measure(case, options.rounds, options.steps, status.update)
        if not options.json:
            reporting.print_tables(Console(), name, results[name])
    if options.plot:
        reporting.save_plot(options.plot, results)
    if options.json:
        print(json.dumps(as_json(results, options), indent=2))
    else:
        reporting.print_aims(Console(), results)
    return 0


def as_json(results: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    import jax
    import reporting

    return {
        "devices": [str(device) for device in jax.local_devices()],
        "rounds": options.rounds,
        "steps": options.steps,
        "models": {name: reporting.figures(found) for name, found in results.items()},
        "aims": [
            asdict(aim)
            for name, found in results.items()
            for aim in reporting.aims(name, found)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
