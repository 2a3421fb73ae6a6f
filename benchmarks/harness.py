"""What all benchmarks share: ranks as processes, alternation, the result table and its JSON form.

A benchmark is `benchmarks/NAME [--config C] [--quick] --json FILE`. It checks that both sides compute
the same (`compare`: losses; `collectives`: sums; `engine` has one program, with the engine and
without), runs them in alternation, prints a table and writes
{"rows": [{"name", "unit", "ours", "peer", "ratio", "bar", "holds"}], "machine": {...}}, where `ours`
and `peer` are {"min", "median", "n"}; it exits 0 only if every bar holds.
"""

import argparse
import ctypes
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PEERS = os.path.join(ROOT, "benchmarks", "peers")
BUILD = os.environ.get("HS_BUILD", os.path.join(ROOT, "build"))
LIMIT_S = 600


class BenchmarkError(RuntimeError):
    pass


def built(*path):
    program = os.path.join(BUILD, *path)
    if not os.access(program, os.X_OK):
        raise BenchmarkError(f"no {program}\n  hint: scripts/build")
    return program


def tcmalloc():
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
        library = os.path.join(folder, "libtcmalloc_minimal.so.4")
        if os.path.exists(library):
            return library
    raise BenchmarkError("the peer's best allocator is missing\n"
                         "  hint: apt-get install libtcmalloc-minimal4")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pss_bytes(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class MemorySampler(threading.Thread):
    """Samples the sum of PSS over processes every 50 ms; `peak` is its largest value."""

    def __init__(self, pids):
        super().__init__(daemon=True)
        self.pids, self.peak, self.ended = pids, 0, threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, sum(pss_bytes(pid) for pid in self.pids))


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Processes:
    """Processes that are all gone at the end of the block, with their stderr in files: a pipe that
    nobody reads yet would hold up the one that writes."""

    def __init__(self):
        self.all, self.errors = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            if process.poll() is None:
                process.kill()
        for process, file in zip(self.all, self.errors):
            process.wait()
            file.close()

    def start(self, command, env, core, stdout):
        def prepare():
            _end_with_parent()
            if core is not None:
                os.sched_setaffinity(0, {core})

        # pylint: disable=consider-using-with
        self.errors.append(tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace"))
        self.all.append(subprocess.Popen(
            command, cwd=ROOT, env=env, preexec_fn=prepare, text=True, stdout=stdout,
            stderr=self.errors[-1]))

    def finish(self, command, limit_s):
        """Waits for all and returns what those with a pipe wrote to stdout."""
        deadline, outputs = time.monotonic() + limit_s, []
        try:
            for process in self.all:
                left_s = max(1, deadline - time.monotonic())
                outputs.append(process.communicate(timeout=left_s)[0])
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{' '.join(command)}: not done within {limit_s} s\n"
                                 + self.error_text()) from error
        if any(process.returncode for process in self.all):
            raise BenchmarkError(f"{' '.join(command)} failed:\n{self.error_text()}")
        return outputs

    def error_text(self):
        texts = []
        for file in self.errors:
            file.seek(0)
            texts.append(file.read().strip())
        return "\n".join(filter(None, texts))


def run_ranks(command, ranks, env=None, pin=False, memory=False, limit_s=LIMIT_S):
    """Runs `command` as so many ranks; returns the JSON lines of rank 0, and the peak of PSS."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "GLOO_SOCKET_IFNAME": "lo", "HS_JOB_NONCE": f"bench-{os.getpid()}-{time.time_ns()}"}
    cores = sorted(os.sched_getaffinity(0))
    with Processes() as processes:
        for rank in range(ranks):
            own = {**os.environ, **shared, **(env or {}), "RANK": str(rank),
                   "LOCAL_RANK": str(rank)}
            processes.start(command, own, cores[rank % len(cores)] if pin else None,
                            subprocess.PIPE if rank == 0 else subprocess.DEVNULL)
        sampler = MemorySampler([p.pid for p in processes.all])
        if memory:
            sampler.start()
        try:
            out = processes.finish(command, limit_s)[0]
        finally:
            sampler.ended.set()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return lines, sampler.peak


def run_floor(command, copies, env=None):
    """Runs copies that do not know of each other, each pinned to a core; returns all summaries."""
    cores = sorted(os.sched_getaffinity(0))
    with Processes() as processes:
        for i in range(copies):
            processes.start(command, {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                            cores[i % len(cores)], subprocess.PIPE)
        return [json.loads(out.splitlines()[-1]) for out in processes.finish(command, LIMIT_S)]


def spread(samples):
    """Of medians (or minima) of several runs: the best minimum, the median of medians."""
    return {"min": min(s["min"] for s in samples),
            "median": statistics.median(s["median"] for s in samples), "n": len(samples)}


def row(name, unit, ours, peer, bar, ratio=None, at_most=True):
    if ratio is None:
        ratio = ours["median"] / peer["median"]
    holds = ratio <= bar if at_most else ratio >= bar
    return {"name": name, "unit": unit, "ours": ours, "peer": peer, "ratio": round(ratio, 4),
            "bar": bar, "holds": bool(holds)}


def exactly(value):
    return {"min": value, "median": value, "n": 1}


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return {"cpu": models[0] if models else platform.processor(), "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(), "python": platform.python_version(),
            "load_1min": os.getloadavg()[0]}


def number(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(rows):
    head = ("what", "ours min / median", "peer min / median", "ratio", "bar", "")
    table = [head] + [(
        f"{r['name']} ({r['unit']})",
        f"{number(r['ours']['min'])} / {number(r['ours']['median'])}",
        f"{number(r['peer']['min'])} / {number(r['peer']['median'])}",
        f"{r['ratio']:.3f}", f"{r['bar']:g}", "holds" if r["holds"] else "MISSED") for r in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def main(description, configs, measure):
    """Parses the common arguments, calls measure(config, arguments) -> rows for each config."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", choices=list(configs),
                        help="what to measure; may be given several times (default: all)")
    parser.add_argument("--quick", action="store_true",
                        help="one short alternation: shows that it works, bars mean little")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    rows = []
    try:
        for name in arguments.config or configs:
            rows += measure(name, arguments)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    print_table(rows)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "machine": machine()}, file, indent=1)
            file.write("\n")
    sys.exit(0 if all(r["holds"] for r in rows) else 1)
