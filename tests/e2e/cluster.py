"""Runs things on an emulated cluster, and says whether this machine permits one."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

SOURCE = os.environ.get("HS_SOURCE_DIR",
                        os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
EMULATE = os.path.join(SOURCE, "scripts", "cluster-emulate")
NOT_PERMITTED = 77
TRUE = ("1", "true", "on", "yes")


def main():
    """unittest.main(), skipped as a whole where nothing can be emulated, unless that is required."""
    checked = subprocess.run([EMULATE, "--check"], capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        print(checked.stderr, end="", file=sys.stderr)
        is_required = os.environ.get("HS_REQUIRE_NETNS", "").lower() in TRUE
        if is_required or checked.returncode != NOT_PERMITTED:
            sys.exit("error: these tests need an emulated cluster, and here they must not be skipped")
        print("skipped: these tests need an emulated cluster")
        sys.exit(NOT_PERMITTED)
    unittest.main()


def namespaces():
    """Returns the network namespaces of all processes of this machine."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            found.add(os.readlink(f"/proc/{name}/ns/net"))
        except OSError:
            pass
    return found


def tagged_processes(tag):
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if f"CLUSTER_TAG={tag}".encode() in file.read():
                    found.append(int(name))
        except OSError:
            pass
    return found


class ClusterTest(unittest.TestCase):
    """A test that starts clusters and leaves nothing of them behind."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="hs_cluster_")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def setUp(self):
        self.tag = uuid.uuid4().hex

    def tearDown(self):
        self.wait_until(lambda: not tagged_processes(self.tag), "processes are left")

    def environment(self, **extra):
        env = {name: value for name, value in os.environ.items() if not name.startswith("HS_")}
        return {**env, "CLUSTER_TAG": self.tag, **extra}

    def start(self, *options, command, **extra):
        return subprocess.Popen(
            [EMULATE, *map(str, options), "--", *map(str, command)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(**extra))

    def finish(self, process, timeout_s=60):
        try:
            process.out, process.err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.out, process.err = process.communicate()
            self.fail(f"it did not end within {timeout_s} s: {self.text_of(process)}")
        return process

    def run_cluster(self, *options, command, **extra):
        return self.finish(self.start(*options, command=command, **extra))

    def text_of(self, process):
        return f"exit code {process.returncode}\n--- stdout\n{process.out}\n--- stderr\n{process.err}"

    def assert_ends(self, process, code):
        self.assertEqual(process.returncode, code, self.text_of(process))

    def wait_until(self, is_true, what, seconds=15):
        deadline = time.monotonic() + seconds
        while not is_true():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)

    def wait_for_file(self, path, process):
        def is_there():
            if process.poll() is not None:
                self.fail(f"it ended early: {self.text_of(self.finish(process))}")
            return os.path.exists(path)
        self.wait_until(is_there, f"no file {path}", seconds=60)


def kill(process, number=signal.SIGKILL):
    os.kill(process.pid, number)
