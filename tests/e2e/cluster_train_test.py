"""Training between supernodes of an emulated cluster: the same losses as on one host, and how a run
ends when the network does."""

import re
import time

import cluster
import program
from program import losses, metrics

FP64 = ("--set", "precision.compute=fp64")
NO_EVAL = ("--set", "eval.every=0", "--set", "eval.at_end=false")
LONG = ("--set", "schedule.steps=100000", "--set", "eval.every=0")
TIMEOUT_S = 10
# Over the timeout: what a rank needs to find out why, and to end.
SLACK_S = 15
ACROSS = r"\w+ #\d+(?: of unit '[^']*')? on axis '[\w:]+' between supernodes"


class ClusterProgramTest(program.ProgramTest):
    """A test that trains on emulated clusters. In options {run} is the run's folder."""

    def emulate(self, *options, run, sets=(), config=program.TINY_CONFIG):
        path = self.write_config(config, run)
        return self.run_command([
            cluster.EMULATE, *(str(option).format(run=run) for option in options), "--",
            *self.command("train", path, *sets)])

    def emulate_well(self, *options, sets=()):
        """Trains in a new run folder and returns (result, folder)."""
        run = self.new_run()
        result = self.emulate(*options, run=run, sets=sets)
        self.assertEqual(result.code, 0, result)
        return result, run

    def check_same_losses(self, ranks, sets, *options):
        mesh = ("--set", "parallel.replicate=2", *FP64, *sets)
        _, alone = self.train_well("--ranks", 2 * ranks, "--set", "parallel.supernodes=2", *mesh)
        result, run = self.emulate_well("--ranks-per-supernode", ranks, *options, sets=mesh)
        self.assert_close(losses(run), losses(alone), 1e-10)
        return result, run


class ClusterTrainTest(ClusterProgramTest):

    def test_losses_are_those_of_one_host(self):
        for ranks in (1, 2):
            for strategy in ("hsdp", "hierarchical"):
                with self.subTest(ranks=ranks, strategy=strategy):
                    self.check_same_losses(
                        ranks, ("--set", f"parallel.strategy={strategy}"), "--rate", "1gbit")

    def test_accumulated_steps_have_the_same_bits_each_time(self):
        sets = ("--set", "parallel.replicate=2", "--set", "parallel.strategy=hierarchical",
                "--set", "batch.global_batch=16", "--set", "batch.accumulation=2")
        _, first = self.emulate_well("--ranks-per-supernode", 2, "--rate", "1gbit", sets=sets)
        _, second = self.emulate_well("--ranks-per-supernode", 2, "--rate", "1gbit", sets=sets)
        self.assertEqual(len(losses(first)), 6)
        for name in ("loss", "grad_norm", "eval_loss"):
            self.assertEqual([line[name] for line in metrics(second)],
                             [line[name] for line in metrics(first)], name)

    def test_ranks_of_a_supernode_share_memory_and_others_do_not(self):
        sets = ("--set", "parallel.replicate=2", "--set", "parallel.strategy=hsdp")
        self.emulate_well("--ranks-per-supernode", 2, sets=(*sets, "--set", "parallel.share=on"))
        result = self.emulate("--ranks-per-supernode", 2, run=self.new_run(),
                              sets=(*sets, "--set", "parallel.backend=shm"))
        self.assert_fails(result, 2, "crosses supernodes")


class ClusterLinksTest(ClusterProgramTest):

    def test_late_peers_beside_near_ones_change_no_loss(self):
        for strategy in ("hierarchical", "zero3"):
            with self.subTest(strategy=strategy):
                sets = ("--set", f"parallel.strategy={strategy}", "--set", "schedule.steps=3")
                self.check_same_losses(2, (*sets, *NO_EVAL), "--rate", "1gbit", "--delay", "20ms",
                                       "--jitter", "5ms")

    def test_slow_and_lossy_links_change_no_loss(self):
        # The cut comes once a step is done, and the other steps cannot be done before its end.
        sets = ("--set", "parallel.strategy=hierarchical", "--set", "schedule.steps=4",
                "--set", "checkpoint.every=1", *NO_EVAL)
        result, slow = self.check_same_losses(
            1, sets, "--rate", "200mbit", "--delay", "40ms", "--jitter", "5ms", "--loss", "0.5%",
            "--cut", "1@{run}/checkpoints/latest+1")
        self.assertRegex(result.err, r"(?s) s: cut supernode 1\n.* s: reconnect supernode 1\n")
        # A gradient and the parameters made of it cross one after the other, each late.
        self.assertGreater(min(line["step_ms"] for line in metrics(slow)), 2 * (40 - 5))

    def test_metrics_show_how_late_and_how_slow_the_link_is(self):
        # In a delay, which every exchange begins with, the link could carry more than its shaper
        # ever lets pass at once: so none may seem faster than the rate.
        _, run = self.emulate_well(
            "--rate", "40mbit", "--delay", "40ms",
            sets=("--set", "parallel.replicate=2", "--set", "parallel.strategy=hierarchical",
                  "--set", "model.dim=128", "--set", "schedule.steps=3", *NO_EVAL))
        for line in metrics(run):
            with self.subTest(step=line["step"]):
                self.assertGreaterEqual(line["exposed_between_share"] * line["step_ms"], 40 - 5)
                self.assertLessEqual(line["between_bytes_per_s"], 40e6 / 8)


class ClusterFaults(ClusterProgramTest):
    """Breaks the network once steps are done; every survivor must say what it was waiting for."""

    def check_fault(self, event, broken, supernodes=2, ranks=2):
        begin = time.monotonic()
        result = self.emulate(
            "--supernodes", supernodes, "--ranks-per-supernode", ranks, "--grace", 60, "--prefix",
            f"--{event}", f"{broken}@{{run}}/checkpoints/latest", run=self.new_run(),
            sets=("--set", f"parallel.replicate={supernodes}",
                  "--set", "parallel.strategy=hierarchical", "--set", "checkpoint.every=3",
                  "--set", f"parallel.timeout_s={TIMEOUT_S}", *LONG))
        self.assertLess(time.monotonic() - begin, program.TIMEOUT_S)
        self.assertEqual(result.code, 3, result)
        at_s = float(re.search(rf"([\d.]+) s: {event} supernode {broken}\n", result.err)[1])
        places = range(supernodes)
        for place in (place for place in places if event == "cut" or place != broken):
            out_of_reach = set(places) - {broken} if place == broken else {broken}
            lost = [rank for rank in range(supernodes * ranks) if rank // ranks in out_of_reach]
            said = [self.last_words(result, place * ranks + i, at_s, lost) for i in range(ranks)]
            self.assertRegex("\n".join(said), self.blame(lost), result)

    def last_words(self, result, rank, at_s, lost):
        """Returns what a rank said, which names a collective and a rank that it lost, in time."""
        end = re.search(rf"([\d.]+) s: rank {rank} on supernode \d ended with exit code 3",
                        result.err)
        self.assertIsNotNone(end, result)
        self.assertLess(float(end[1]) - at_s, TIMEOUT_S + SLACK_S, result)
        said = "\n".join(re.findall(rf"rank {rank}\] (.*)", result.err))
        # A rank may wait inside for one that waits across; there, ranks have numbers of their own.
        self.assertRegex(said, rf"(?m)^(?=.*\branks? {self.any_of(lost)}\b(?! \(global))"
                               r"(?=.*(?:all_|reduce_|barrier|broadcast)\w* #\d+)", result)
        return said

    def any_of(self, ranks):
        return f"[{''.join(map(str, ranks))}]"

    def blame(self, lost):
        """Matches what a rank says that waits across: whom it lost, and in which collective."""
        if 0 in lost:  # and with it the store, without which nobody's signs of life are seen
            return (r"\brank 0 \(which hosts the job's store\) (?:is gone|does not answer "
                    rf"\(stopped, or cut off\)); {ACROSS} cannot complete")
        return (rf"\branks? {self.any_of(lost)}\b[^;]* \(no sign of life for [\d.]+ s\) "
                rf"during {ACROSS};")


class ClusterFaultsTest(ClusterFaults):

    def test_cut_link_ends_every_rank(self):
        self.check_fault("cut", 1)

    def test_killed_host_of_the_store_ends_the_others(self):
        self.check_fault("kill", 0)


class ClusterFaultsSweep(ClusterFaults):

    def test_killed_supernode_ends_the_others(self):
        self.check_fault("kill", 1)

    def test_cut_host_of_the_store_ends_those_that_reach_each_other(self):
        self.check_fault("cut", 0, supernodes=3, ranks=1)


if __name__ == "__main__":
    cluster.main()
