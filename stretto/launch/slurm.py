"""A job as an sbatch script: srun starts the ranks, which find each other by Slurm's own variables."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from stretto.errors import JobError, RunError
from stretto.launch.placing import Placing

WARNED = 120  # seconds before the time is over at which ranks are asked to save and stop

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
{gpus}#SBATCH --output={name}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@{warned}
{more}
set -euo pipefail
{threads}
# Ranks meet on the first node of the job, at a port made from its number. Set both to meet elsewhere:
# export MASTER_ADDR=... MASTER_PORT=...
# Where nodes have several networks, name the one to use: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=...

# A job that is requeued keeps its number, so it goes on from its newest checkpoint. So does this command, given again with
# the same --out. {warned} s before the time is over each rank hears SIGUSR1: it finishes its step, saves, and ends.
srun --kill-on-bad-exit=1 {command}
"""


def script(name: str, words: Sequence[str], place: Placing, out: str | None, options: Sequence[str]) -> str:
    """The text of the batch script. words: [JOB] [KEY=VALUE ...] as the user wrote them. options: for sbatch, each a word."""
    folder = shlex.quote(out) if out else f'"runs/{name}-$SLURM_JOB_ID"'
    command = shlex.join([sys.executable, "-m", "stretto", "train", *words])
    return SCRIPT.format(
        name=name,
        nodes=place.nodes,
        per_node=place.per_node,
        gpus=f"#SBATCH --gpus-per-node={place.per_node}\n" if place.gpus else "",
        warned=WARNED,
        more="".join(f"#SBATCH {option}\n" for option in options),
        threads="" if place.gpus else "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}\n",
        command=f"{command} --out {folder} --resume=auto",
    )


def submit(text: str) -> str:
    """Hand the script to sbatch; returns the number of the job. Raises JobError where there is no Slurm here."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise JobError(
            "--on slurm: there is no sbatch here to submit with; write --print for the script, or go to a login node of the cluster"
        )
    told = subprocess.run([sbatch, "--parsable"], input=text, capture_output=True, text=True, check=False)
    if told.returncode:
        raise RunError(f"sbatch refused the job: {' '.join(told.stderr.split()) or f'exit code {told.returncode}'}")
    return told.stdout.strip().partition(";")[0]
