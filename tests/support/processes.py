"""Programs in processes of their own, which are killed where it hurts."""

import os
import random
import signal
import subprocess
import sys
import time

from places import SUPPORT

#: What every program begins with; `ready` tells the test that it has imported all.
BEGIN = """
import sys, warnings
sys.path[:0] = {places!r}
warnings.simplefilter("ignore")
import torch
from pathlib import Path
def ready():
    print("ready", flush=True)
"""


def launch(code, *arguments, places=(), **pipes):
    """A process that runs this code with these arguments, and has said that it is ready."""
    begin = BEGIN.format(places=[str(SUPPORT), *map(str, places)])
    process = subprocess.Popen(
        [sys.executable, "-c", begin + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **pipes,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def kill_until_done(begin, directory, saved, kills):
    """Kills a run again and again, begins it again, and lets it end.

    Args:
        begin: starts a process of it.
        directory: of its checkpoints.
        saved: the file that it writes at its end.
        kills: how often it is killed, unless it ends before.
    """
    source, done = random.Random(kills), 0

    def checkpoints():
        numbers = (int(file.name.partition("-")[2]) for file in directory.glob("state-*"))
        return max(numbers, default=0)

    while not saved.exists():
        process = begin()
        if done < kills:
            enough = checkpoints() + source.randrange(5)
            while checkpoints() < enough and process.poll() is None:
                time.sleep(0.01)
            time.sleep(source.uniform(0.0, 0.1))
            done += process.poll() is None
            process.kill()
        process.wait()
        assert done < kills or process.returncode in (0, -signal.SIGKILL)
    assert done >= min(kills, 2)
