"""scripts/cluster-emulate by itself: places, links, faults, and that nothing is left of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import cluster

# What rank 1 does with rank 0: sends it bytes (rank 0 prints their rate), asks it for some seconds
# (rank 1 prints the longest wait) or sends it datagrams (rank 0 prints how many came). A file named
# after that is made once they talk.
PEER = r"""
import os, socket, sys, time
job, number = sys.argv[1], int(sys.argv[2])
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 30000)
if rank > 1:
    sys.exit(0)
if job == "count":
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if rank == 0:
        peer.bind(("", place[1]))
        peer.settimeout(5)
        received = 0
        try:
            while peer.recv(100) != b"end":
                received += 1
        except TimeoutError:
            pass
        print(received, flush=True)
    time.sleep(rank)
    for _ in range(number * rank):
        peer.sendto(b"one", place)
        time.sleep(0.0002)
    for _ in range(20 * rank):
        peer.sendto(b"end", place)
    sys.exit(0)
if rank == 0:
    server = socket.create_server(("", place[1]))
    server.settimeout(10)
    peer = server.accept()[0]
else:
    for _ in range(200):
        try:
            peer = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.05)
peer.settimeout(4)
if job == "send" and rank == 1:
    for _ in range(number // 65536):
        peer.sendall(b"x" * 65536)
elif job == "send":
    received, first, start = 0, None, time.monotonic()
    while received < number:
        received += len(peer.recv(1 << 20))
        if first is None:
            first, start = received, time.monotonic()
    print((received - first) * 8 / (time.monotonic() - start), flush=True)
elif job == "talk":
    slowest, end = 0.0, time.monotonic() + number
    while rank == 1 and time.monotonic() < end:
        start = time.monotonic()
        peer.sendall(b"?")
        peer.recv(1)
        if len(sys.argv) > 3:
            open(sys.argv[3], "w").close()
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.01)
    while rank == 0 and peer.recv(1):
        peer.sendall(b"!")
    if rank == 1:
        print(f"slowest {slowest}", flush=True)
"""

SHOW = r"""
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "GLOO_SOCKET_IFNAME", "HS_LINK_DELAY_US", "HS_LINK_JITTER_US", "HS_THREADS")
print(json.dumps({**{name: os.environ.get(name) for name in names},
                  "network": os.readlink("/proc/self/ns/net"),
                  "cores": len(os.sched_getaffinity(0))}))
"""

PYTHON = (sys.executable, "-c")


class ClusterEmulateTest(cluster.ClusterTest):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="hs_cluster_")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def places(self, *options):
        """Returns what SHOW printed, by rank."""
        done = self.run_cluster(*options, command=(*PYTHON, SHOW))
        self.assert_ends(done, 0)
        shown = [json.loads(line[line.index("{"):]) for line in done.out.splitlines()]
        return {int(place["RANK"]): place for place in shown}, done

    def rate_of(self, *options, num_bytes):
        done = self.run_cluster(*options, command=(*PYTHON, PEER, "send", num_bytes))
        self.assert_ends(done, 0)
        return float(done.out.splitlines()[0])

    # --- places

    def test_ranks_are_told_their_places(self):
        for supernodes, ranks in ((1, 2), (2, 1), (2, 2), (3, 1)):
            with self.subTest(supernodes=supernodes, ranks=ranks):
                places, _ = self.places("--supernodes", supernodes, "--ranks-per-supernode", ranks)
                self.assertEqual(sorted(places), list(range(supernodes * ranks)))
                for rank, place in places.items():
                    self.assertEqual(place["WORLD_SIZE"], str(supernodes * ranks))
                    self.assertEqual(place["LOCAL_RANK"], str(rank % ranks))
                    self.assertEqual(place["LOCAL_WORLD_SIZE"], str(ranks))
                    self.assertEqual(place["MASTER_ADDR"], "10.77.0.1")
                    same = [other for other in places
                            if places[other]["network"] == place["network"]]
                    self.assertEqual({other // ranks for other in same}, {rank // ranks})
                    self.assertEqual(len(same), ranks)

    def test_pinned_ranks_get_a_share_of_the_cores(self):
        cores = len(os.sched_getaffinity(0))
        places, _ = self.places("--pin")
        self.assertEqual([places[rank]["cores"] for rank in (0, 1)], [max(1, cores // 2)] * 2)
        self.assertEqual(places[0]["HS_THREADS"], str(max(1, cores // 2)))

    def test_lines_say_who_wrote_them(self):
        script = 'echo "out $RANK"; echo "err $RANK" >&2; printf "no end $RANK"'
        done = self.run_cluster("--ranks-per-supernode", 2, command=("sh", "-c", script))
        self.assert_ends(done, 0)
        for rank in (1, 2, 3):
            for text, stream in (("out", done.out), ("err", done.err), ("no end", done.out)):
                self.assertIn(f"[supernode {rank // 2} rank {rank}] {text} {rank}\n", stream)
        self.assertIn("out 0\n", done.out)
        self.assertNotIn("rank 0]", done.out)
        done = self.run_cluster("--prefix", command=("sh", "-c", script))
        self.assertIn("[supernode 0 rank 0] out 0\n", done.out)

    # --- links

    def test_rate_is_what_was_asked_for(self):
        for supernodes in (2, 3):
            rate = self.rate_of("--supernodes", supernodes, "--rate", "40mbit", num_bytes=8 << 20)
            self.assertLess(rate, 44e6)
            self.assertGreater(rate, 20e6)
        # Without a limit it is another order of magnitude.
        self.assertGreater(self.rate_of(num_bytes=64 << 20), 200e6)

    def test_delay_is_in_the_packets_or_left_to_the_communicators(self):
        places, done = self.places("--delay", "30ms", "--jitter", "500us")
        talk = self.run_cluster("--delay", "30ms", command=(*PYTHON, PEER, "talk", 1))
        self.assert_ends(talk, 0)
        slowest_s = float(talk.out.split("slowest ")[1].split()[0])
        if places[1]["HS_LINK_DELAY_US"] is None:
            self.assertGreaterEqual(slowest_s, 0.059)
            return
        self.assertEqual(places[1]["HS_LINK_DELAY_US"], "30000")
        self.assertEqual(places[1]["HS_LINK_JITTER_US"], "500")
        self.assertEqual(done.err.count("no netem"), 1, done.err)

    def test_packets_are_lost_as_often_as_asked_for(self):
        for loss, low, high in ((0.0001, 2990, 3000), (10, 2600, 2800), (100, 0, 0)):
            with self.subTest(loss=loss):
                done = self.run_cluster("--loss", f"{loss}%",
                                        command=(*PYTHON, PEER, "count", 3000))
                self.assert_ends(done, 0)
                self.assertGreaterEqual(int(done.out), low)
                self.assertLessEqual(int(done.out), high)

    def test_loss_breaks_no_connection(self):
        self.assertGreater(self.rate_of("--loss", "2%", num_bytes=4 << 20), 0)

    def test_short_cut_only_slows(self):
        done = self.run_cluster("--cut", "1@0.7+1", command=(*PYTHON, PEER, "talk", 4))
        self.assert_ends(done, 0)
        self.assertGreater(float(done.out.split("slowest ")[1].split()[0]), 0.9)
        for text in ("cut supernode 1", "reconnect supernode 1"):
            self.assertIn(text, done.err)

    def test_cut_is_silent(self):
        event = os.path.join(self.folder, "now")
        done = self.run_cluster("--cut", f"1@{event}", "--supernodes", 3, "--grace", 30,
                                command=(*PYTHON, PEER, "talk", 60, event))
        self.assert_ends(done, 1)
        self.assertIn("cut supernode 1", done.err)
        # Both ends wait until their own patience ends; nobody tells them.
        self.assertEqual(done.err.count("TimeoutError: timed out"), 2, done.err)

    def test_killed_supernode_says_no_farewell(self):
        event = os.path.join(self.folder, "then")
        done = self.run_cluster("--kill", f"0@{event}",
                                command=(*PYTHON, PEER, "talk", 60, event))
        self.assert_ends(done, 1)
        self.assertIn("kill supernode 0", done.err)
        self.assertEqual(done.err.count("TimeoutError: timed out"), 1, done.err)
        self.assertIn("rank 1 on supernode 1 ended with exit code 1", done.err)
        self.assertNotIn("rank 0 on supernode 0 was killed", done.err)

    # --- ends

    def test_exit_code_is_the_first_failing_ranks(self):
        script = 'case $RANK in 1) sleep 0.3; exit 7;; 2) sleep 2; exit 9;; 3) kill -9 $$;; esac'
        done = self.run_cluster("--supernodes", 3, command=("sh", "-c", script))
        self.assert_ends(done, 7)
        self.assertIn("rank 2 on supernode 2 ended with exit code 9", done.err)
        done = self.run_cluster("--ranks-per-supernode", 2, command=("sh", "-c", script))
        self.assert_ends(done, 128 + 9)

    def test_others_are_ended_after_a_while(self):
        script = '[ $RANK = 1 ] && exit 5; exec sleep 600'
        done = self.run_cluster("--grace", "0.5", command=("sh", "-c", script))
        self.assert_ends(done, 5)
        self.assertIn("ending rank 0 on supernode 0", done.err)

    def test_time_is_limited(self):
        stubborn = 'trap "" TERM; echo $RANK; while :; do sleep 1; done'
        done = self.run_cluster("--timeout", 1, command=("sh", "-c", stubborn))
        self.assert_ends(done, 124)
        self.assertIn("time is up after 1 s", done.err)

    def test_stop_signals_reach_all_ranks(self):
        script = 'trap "echo stopped; exit 130" INT TERM; touch "$0.$RANK"; sleep 600 & wait'
        for number in (signal.SIGINT, signal.SIGTERM):
            path = os.path.join(self.folder, f"up{number}")
            process = self.start(command=("sh", "-c", script, path))
            for rank in (0, 1):
                self.wait_for_file(f"{path}.{rank}", process)
            cluster.kill(process, number)
            self.assert_ends(self.finish(process), 130)
            self.assertEqual(process.out.count("stopped"), 2, process.out)

    def test_second_stop_signal_kills(self):
        path = os.path.join(self.folder, "deaf")
        script = 'trap "touch $0.heard.$RANK" INT; touch "$0.$RANK"; while :; do sleep 0.1; done'
        process = self.start(command=("sh", "-c", script, path))
        for name in ("", "heard."):
            for rank in (0, 1):
                self.wait_for_file(f"{path}.{name}{rank}", process)
            cluster.kill(process, signal.SIGINT)
        self.assert_ends(self.finish(process), 128 + 9)

    def test_nothing_is_left_after_a_crash(self):
        before = cluster.namespaces()
        path = os.path.join(self.folder, "crash")
        # With a process that leaves its session, and one that ignores what it can.
        script = ('trap "" TERM HUP INT; setsid sleep 601 & sh -c "sleep 602" & '
                  'touch "$0.$RANK"; sleep 603')
        processes = [
            self.start("--supernodes", 3, "--rate", "1gbit", "--loss", "1%",
                       command=("sh", "-c", script, f"{path}{run}")) for run in (0, 1)]
        for run, process in enumerate(processes):
            for rank in (0, 1, 2):
                self.wait_for_file(f"{path}{run}.{rank}", process)
        self.assertEqual(len(cluster.namespaces() - before), 8)  # 3 and a switch, twice
        cluster.kill(processes[0])
        processes[0].wait()
        self.wait_until(lambda: len(cluster.namespaces() - before) == 4, "namespaces are left")
        self.assertIsNone(processes[1].poll())  # the other one does not mind
        cluster.kill(processes[1])
        processes[1].wait()
        self.wait_until(lambda: not cluster.namespaces() - before, "namespaces are left")
        self.wait_until(lambda: not cluster.tagged_processes(self.tag), "processes are left")
        for process in processes:
            process.stdout.close()
            process.stderr.close()
        self.assertEqual(self.on_this_machine(), "")

    def on_this_machine(self):
        """Returns the links and filters of the machine itself that could be an emulation's."""
        found = subprocess.run("ip link show; nft list tables", shell=True, text=True, check=False,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        return "".join(line for line in found.splitlines(keepends=True)
                       if any(word in line for word in ("port0", "switch", "emulated")))

    def test_stopped_inside_it_is_killed_all_the_same(self):
        path = os.path.join(self.folder, "stopped")
        process = self.start(command=("sh", "-c", 'touch "$0.$RANK"; sleep 604', path))
        for rank in (0, 1):
            self.wait_for_file(f"{path}.{rank}", process)
        for pid in cluster.tagged_processes(self.tag):
            if pid != process.pid:
                os.kill(pid, signal.SIGSTOP)
        cluster.kill(process)
        process.wait()
        self.wait_until(lambda: not cluster.tagged_processes(self.tag), "processes are left")
        process.stdout.close()
        process.stderr.close()

    # --- mistakes

    def test_mistakes_are_named(self):
        for options, texts in (
                ([], ["no command"]),
                (["--rate", "5", "--", "true"], ["'5' is not a rate", "500mbit"]),
                (["--rate", "1kbit", "--", "true"], ["'1kbit' is out of range"]),
                (["--delay", "2", "--", "true"], ["'2' is not a duration", "2ms"]),
                (["--jitter", "2ms", "--", "true"], ["--jitter 0.002s is more than --delay 0s"]),
                (["--loss", "1", "--", "true"], ["'1' is not a loss", "0.1%"]),
                (["--loss", "101%", "--", "true"], ["'101%' is out of range"]),
                (["--cut", "2@1", "--", "true"], ["--cut: there is no supernode 2", "0 to 1"]),
                (["--cut", "now", "--", "true"], ["'now' has another form", "SUPERNODE@WHEN"]),
                (["--kill", "1@1+1", "--", "true"], ["--kill: a supernode does not come back"]),
                (["--supernodes", "0", "--", "true"], ["'0' is not a number of at least 1"]),
                (["--supernodes", "251", "--", "true"], ["251 is too many", "at most 250"]),
                (["--speed", "9", "--", "true"], ["--speed"])):
            with self.subTest(options=options):
                done = subprocess.run([cluster.EMULATE, *options], capture_output=True, text=True,
                                      env=self.environment(), timeout=60, check=False)
                self.assertEqual(done.returncode, 2, done.stderr)
                for text in texts:
                    self.assertIn(text, done.stderr)
                self.assertNotIn("Traceback", done.stderr)

    def test_command_that_is_not_there_is_named(self):
        done = self.run_cluster(command=("/absent/program",))
        self.assert_ends(done, 127)
        self.assertIn("cannot start '/absent/program': No such file", done.err)

    def test_machine_that_does_not_permit_it_is_told_so(self):
        # Without the privilege, and without more namespaces for users.
        if os.geteuid() != 0:
            self.skipTest("only root can give up what permits it")
        refusing = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "sh", "-c",
                    'exec "$@"', "sh", cluster.EMULATE, "--", "true")
        done = subprocess.run(refusing, capture_output=True, text=True, env=self.environment(),
                              timeout=60, check=False)
        self.assertEqual(done.returncode, cluster.NOT_PERMITTED, done.stderr)
        self.assertIn("skipped: network namespaces are not permitted here", done.stderr)
        self.assertIn("CAP_SYS_ADMIN", done.stderr)

    def test_a_user_may_emulate_too(self):
        if os.geteuid() != 0:
            self.skipTest("the other tests show it")
        done = subprocess.run(("setpriv", "--reuid=65534", "--clear-groups", cluster.EMULATE,
                               "--check"), capture_output=True, text=True, cwd="/",
                              env=self.environment(), timeout=60, check=False)
        if done.returncode == cluster.NOT_PERMITTED:
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("namespaces: yes, as a user", done.stderr)


if __name__ == "__main__":
    cluster.main()
