"""Runs the program under test and checks that nothing of it is left behind.

The environment names the binary: HYPERSHARD=build/hypershard.
"""

import glob
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import uuid

PROGRAM = os.path.abspath(os.environ.get("HYPERSHARD", "build/hypershard"))
TIMEOUT_S = 100

WORDS = ("the king and his crown shall not be moved by any storm of night or day while we "
         "stand here upon this stage and speak our lines aloud to those who came").split()


def write_text(path, seed, num_words):
    """Writes a text that has something to learn; the same for the same seed."""
    state = seed
    words = []
    for _ in range(num_words):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(WORDS[(state >> 33) % len(WORDS)])
    with open(path, "w", encoding="utf-8") as file:
        for at in range(0, num_words, 8):
            file.write(" ".join(words[at:at + 8]) + ".\n")


TINY_CONFIG = """
[run]
name = "tiny"
dir = "{run}"

[data]
path = "{data}"

[model]
layers = 2
dim = 32
heads = 2
sequence = 32

[batch]
global_batch = 12

[optimizer]
lr = 1e-2

[schedule]
steps = 6
warmup_steps = 2

[eval]
every = 3
tokens = 500

[log]
every = 1
"""


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    def __str__(self):
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class ProgramTest(unittest.TestCase):
    """A test with a folder, prepared data and a tiny configuration."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="hs_e2e_")
        cls.texts = os.path.join(cls.folder, "texts")
        os.mkdir(cls.texts)
        for number in range(4):
            write_text(os.path.join(cls.texts, f"play{number}.txt"), number, 2000)
        cls.data = os.path.join(cls.folder, "data")
        made = subprocess.run(
            [PROGRAM, "data", "text", cls.texts, "--out", cls.data, "--holdout", "play3"],
            capture_output=True, text=True, timeout=TIMEOUT_S)
        if made.returncode != 0:
            raise RuntimeError(f"data text failed: {made.stdout}{made.stderr}")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def setUp(self):
        self.tag = uuid.uuid4().hex
        self.shm_before = set(os.listdir("/dev/shm"))
        self.number = 0

    def tearDown(self):
        deadline = time.monotonic() + 10
        while self.left_processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(self.left_processes(), [], "processes are left")
        left = [name for name in set(os.listdir("/dev/shm")) - self.shm_before
                if name.startswith(("hs", "hypershard", "torch", "gloo", "sem."))]
        self.assertEqual(left, [], "files are left in /dev/shm")

    def left_processes(self):
        found = []
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                with open(path, "rb") as file:
                    if self.tag.encode() in file.read():
                        found.append(path)
            except OSError:
                pass
        return found

    # --- running

    def environment(self, extra=None):
        env = {name: value for name, value in os.environ.items() if not name.startswith("HS_")}
        env.update({"E2E_TAG": self.tag, "HS_TIMEOUT_S": "30", "OMP_NUM_THREADS": "1"})
        env.update(extra or {})
        return env

    def command(self, *args):
        return [PROGRAM, *map(str, args)]

    def run_command(self, command, env=None):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S,
                              env=self.environment(env), cwd=self.folder)
        return Result(done.returncode, done.stdout, done.stderr)

    def run_program(self, *args, env=None):
        return self.run_command(self.command(*args), env)

    def start_program(self, *args, env=None):
        return self.start_command(self.command(*args), env)

    def start_command(self, command, env=None):
        """Starts it as a shell would: in a process group of its own."""
        return subprocess.Popen(command, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env=self.environment(env),
                                cwd=self.folder, start_new_session=True)

    def finish(self, process):
        out, err = process.communicate(timeout=TIMEOUT_S)
        return Result(process.returncode, out, err)

    def train(self, *args, config=None, env=None):
        """Trains in a new run folder and returns (result, folder)."""
        run = self.new_run()
        path = self.write_config(config or TINY_CONFIG, run)
        return self.run_program("train", path, *args, env=env), run

    def train_well(self, *args, config=None, env=None):
        result, run = self.train(*args, config=config, env=env)
        self.assertEqual(result.code, 0, result)
        return result, run

    def new_run(self):
        self.number += 1
        return os.path.join(self.folder, f"{self.id().split('.')[-1]}-{self.number}")

    def write_config(self, text, run, name="tiny.toml"):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.format(run=run, data=self.data))
        return path

    def wait_for_step(self, run, step, process):
        """Waits until a run has written the metrics of a step."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self.fail(f"the run ended early: {self.finish(process)}")
            try:
                if any(line["step"] >= step for line in metrics(run)):
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        self.fail(f"no step {step}")

    def wait_for_output(self, process, text):
        """Reads what a program prints until a line with this text; finish() returns the rest."""
        for line in process.stdout:
            if text in line:
                return
        self.fail(f"{text!r} was never printed: {self.finish(process)}")

    def ranks_of(self, process):
        """Returns the process ids of a launcher's ranks, by rank."""
        ranks = {}
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                with open(path, "rb") as file:
                    variables = file.read().split(b"\0")
            except OSError:
                continue
            values = dict(item.split(b"=", 1) for item in variables if b"=" in item)
            if values.get(b"E2E_TAG") == self.tag.encode() and b"RANK" in values:
                ranks[int(values[b"RANK"])] = int(path.split("/")[2])
        self.assertNotIn(process.pid, ranks.values())
        return ranks

    # --- looking

    def assert_fails(self, result, code, *fragments):
        self.assertEqual(result.code, code, result)
        for fragment in fragments:
            self.assertIn(fragment, result.err, result)

    def assert_close(self, ours, theirs, relative):
        self.assertEqual(len(ours), len(theirs))
        for step, (a, b) in enumerate(zip(ours, theirs), 1):
            self.assertLessEqual(abs(a - b), relative * abs(b), f"step {step}: {a!r} and {b!r}")


def metrics(run):
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def losses(run):
    return [line["loss"] for line in metrics(run)]


def interrupt(process):
    os.kill(process.pid, signal.SIGINT)
