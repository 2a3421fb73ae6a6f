"""scripts/cluster-emulate by itself: how it ends, and that nothing is left of it."""

import os
import signal
import subprocess

import cluster


class ClusterEndsTest(cluster.ClusterTest):

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


if __name__ == "__main__":
    cluster.main()
