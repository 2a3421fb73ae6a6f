"""scripts/cluster-emulate by itself: places, links, faults and mistakes."""

import json
import os
import subprocess
import sys

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
        done = self.run_where_refused(cluster.EMULATE, "--", "true")
        self.assertEqual(done.returncode, cluster.NOT_PERMITTED, done.stderr)
        self.assertIn("skipped: network namespaces are not permitted here", done.stderr)
        self.assertIn("CAP_SYS_ADMIN", done.stderr)

    def test_tests_are_skipped_where_refused_unless_they_are_required(self):
        # One that starts nothing is named, should they not be skipped.
        tests = (sys.executable, os.path.abspath(__file__),
                 "ClusterEmulateTest.test_command_that_is_not_there_is_named")
        for extra in ({}, {"HS_REQUIRE_NETNS": "0"}):
            with self.subTest(extra=extra):
                done = self.run_where_refused(*tests, **extra)
                self.assertEqual(done.returncode, cluster.NOT_PERMITTED, done.stderr)
                self.assertIn("skipped: these tests need an emulated cluster", done.stdout)
        for switch in ("1", "On"):
            with self.subTest(switch=switch):
                done = self.run_where_refused(*tests, HS_REQUIRE_NETNS=switch)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("here they must not be skipped", done.stderr)
                self.assertIn("network namespaces are not permitted here", done.stderr)

    def run_where_refused(self, *command, **extra):
        """Runs it without the privilege, and without more namespaces for users."""
        if os.geteuid() != 0:
            self.skipTest("only root can give up what permits it")
        return subprocess.run(
            ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "sh", "-c",
             'exec "$@"', "sh", *command),
            capture_output=True, text=True, env=self.environment(**extra), timeout=60, check=False)

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
