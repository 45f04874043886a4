"""The demo: train, kill the job in the middle of a save, resume on other layouts, and compare all of it.

    python examples/nanogpt/demo.py         checkpoints in a folder
    python examples/nanogpt/demo.py --s3    checkpoints on an S3 server, started here for the purpose

It ends with code 0 if every check holds, and with 1 otherwise. What it makes is under demo-out/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from checks import (
    Check,
    check_export,
    check_killed,
    check_losses,
    check_state,
    check_steps,
    check_verify,
    stored_digests,
)
from launch import JobError
from report import checks_table, plot_runs, runs_table
from rich.console import Console
from runs import RUN, SAVE_EVERY, Plan, Run, Site

import vescale_ckpt as vc
from vescale_tools.seaweed import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUT = Path(__file__).parents[2] / "demo-out"
STORE = "store"


def main() -> int:
    """Play the demo and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s3", action="store_true", help="keep the checkpoints on an S3 server on 127.0.0.1")
    use_s3 = parser.parse_args().s3
    # As an exception, it ends every `with` block on the way out, and with it the processes of that block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=None if sys.stdout.isatty() else 100)
    folder = OUT / "s3" if use_s3 else OUT
    for name in (STORE, "runs", "export"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with place_on_s3(folder, console) if use_s3 else nullcontext(str(folder / STORE)) as url:
            return play(Site(vc.open_store(url), folder, console))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except JobError as error:
        console.print("failed:", str(error), style="red", markup=False, highlight=False)
        return 1


def play(site: Site) -> int:
    """Tell the whole story."""
    reference = site.train(Plan(name="undisturbed", dp=2, tp=2, seed=0))
    killed = site.train_and_kill(Plan(name="killed", dp=2, tp=2, seed=0, save_every=SAVE_EVERY))
    after_kill = [check_killed(killed, site.store)]
    step = site.store[RUN].step
    # Another seed each: whatever the new processes have in common with the killed ones, they have from the store.
    resumed = [
        site.train(Plan(name="resumed A", tp=4, seed=1, resume="newest", save_every=SAVE_EVERY)),
        site.train(Plan(name="resumed B", dp=2, seed=2, resume=str(step))),
        site.train(Plan(name="resumed C", seed=3, resume=str(step))),
    ]
    with site.console.status("comparing"):
        checks = after_kill + compare(site, reference, killed, resumed)
    return show(site, reference, [killed, *resumed], checks)


def compare(site: Site, reference: Run, killed: Run, resumed: Sequence[Run]) -> list[Check]:
    """Return all that can be checked once the runs are over."""
    step = resumed[0].first_step
    stored = stored_digests(site.store[f"{RUN}@{step}"])
    checks = [check_state(killed, stored, step, f"checkpoint {step} is what the {killed.plan.num_ranks} ranks held")]
    checks += [check_state(run, stored, step, f"{run.plan.name} starts from that state") for run in resumed]
    checks += [check_losses(run, reference) for run in (killed, *resumed)]
    checks += [check_steps(site.store), check_verify(site.store.url)]
    return checks + check_export(site.store, resumed[0], site.folder / "export")


def show(site: Site, reference: Run, others: Sequence[Run], checks: Sequence[Check]) -> int:
    """Print and draw everything; return 0 if all checks hold and 1 otherwise."""
    picture = site.folder / "loss.png"
    plot_runs(reference, others[0], others[1:], picture)
    site.console.print(runs_table(reference, others), checks_table(checks), sep="\n")
    failed = sum(not check.passed for check in checks)
    site.console.print(
        f"[bold red]{failed} of {len(checks)} checks FAILED[/]"
        if failed
        else f"[bold green]all {len(checks)} checks hold[/]"
    )
    site.console.print(f"loss curves: {picture.relative_to(OUT.parent)}")
    return 1 if failed else 0


@contextmanager
def place_on_s3(folder: Path, console: Console) -> Iterator[str]:
    """Start an S3 server, put its address and credentials where every S3 client looks for them, and yield a URL."""
    with SeaweedServer(folder / STORE) as server:
        server.create_bucket("demo")
        console.print(f"an S3 server listens on {server.endpoint_url}")
        os.environ |= {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": server.key,
            "AWS_SECRET_ACCESS_KEY": server.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield "s3://demo/checkpoints"


if __name__ == "__main__":
    sys.exit(main())
