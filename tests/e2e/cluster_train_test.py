"""Training between supernodes of an emulated cluster: the same losses as on one host, and how a run
ends when the network does."""

import os
import re
import time
import unittest

import cluster
import program
from program import losses, metrics

FP64 = ("--set", "precision.compute=fp64")
LONG = ("--set", "schedule.steps=100000", "--set", "eval.every=0")
TIMEOUT_S = 10
# Over the timeout: what a rank needs to find out why, and to end.
SLACK_S = 15


class ClusterTrainTest(program.ProgramTest):

    def emulate(self, *options, run, sets=(), config=program.TINY_CONFIG):
        path = self.write_config(config, run)
        return self.run_command([cluster.EMULATE, *map(str, options), "--",
                                 *self.command("train", path, *sets)])

    def check_same_losses(self, ranks, sets, *options):
        mesh = ("--set", "parallel.replicate=2", *FP64, *sets)
        _, alone = self.train_well("--ranks", 2 * ranks, "--set", "parallel.supernodes=2", *mesh)
        run = self.new_run()
        result = self.emulate("--ranks-per-supernode", ranks, *options, run=run, sets=mesh)
        self.assertEqual(result.code, 0, result)
        self.assert_close(losses(run), losses(alone), 1e-10)
        return run

    def test_losses_are_those_of_one_host(self):
        for ranks in (1, 2):
            for strategy in ("hsdp", "hierarchical"):
                with self.subTest(ranks=ranks, strategy=strategy):
                    self.check_same_losses(
                        ranks, ("--set", f"parallel.strategy={strategy}"), "--rate", "1gbit")

    def test_ranks_of_a_supernode_share_memory_and_others_do_not(self):
        run = self.new_run()
        sets = ("--set", "parallel.replicate=2", "--set", "parallel.strategy=hsdp")
        result = self.emulate("--ranks-per-supernode", 2, run=run,
                              sets=(*sets, "--set", "parallel.share=on"))
        self.assertEqual(result.code, 0, result)
        result = self.emulate("--ranks-per-supernode", 2, run=self.new_run(),
                              sets=(*sets, "--set", "parallel.backend=shm"))
        self.assert_fails(result, 2, "crosses supernodes")

    def test_slow_and_lossy_links_change_no_loss(self):
        sets = ("--set", "parallel.strategy=hierarchical", "--set", "schedule.steps=3")
        slow = self.check_same_losses(1, sets, "--rate", "200mbit", "--delay", "40ms",
                                      "--jitter", "5ms", "--loss", "0.5%", "--cut", "1@2+1")
        # A gradient and the parameters made of it cross one after the other, each late.
        self.assertGreater(min(line["step_ms"] for line in metrics(slow)), 2 * (40 - 5))

    # --- faults

    def check_fault(self, option, survivors):
        """Breaks the network once steps are done; every survivor must say what it was waiting for."""
        run = self.new_run()
        begin = time.monotonic()
        result = self.emulate(
            "--ranks-per-supernode", 2, "--grace", 60, "--prefix", option,
            f"1@{os.path.join(run, 'checkpoints', 'latest')}", run=run,
            sets=("--set", "parallel.replicate=2", "--set", "parallel.strategy=hierarchical",
                  "--set", "checkpoint.every=3",
                  "--set", f"parallel.timeout_s={TIMEOUT_S}", *LONG))
        self.assertEqual(result.code, 3, result)
        at_s = float(re.search(r"([\d.]+) s: (?:cut|kill) supernode 1", result.err)[1])
        for rank in survivors:
            end = re.search(rf"([\d.]+) s: rank {rank} on supernode \d ended with exit code 3",
                            result.err)
            self.assertIsNotNone(end, result)
            self.assertLess(float(end[1]) - at_s, TIMEOUT_S + SLACK_S, result)
            said = "\n".join(re.findall(rf"rank {rank}\] (.*)", result.err))
            # A rank may wait inside for one that waits across: then it says who is out of reach.
            self.assertRegex(said, r"between supernodes|does not answer \(stopped, or cut off\)",
                             result)
            self.assertRegex(said, r"(all_|reduce_|barrier|broadcast)\w* #\d+", result)
            self.assertRegex(said, r"\branks? [23]\b" if rank < 2 else r"\branks? [01]\b", result)
        self.assertLess(time.monotonic() - begin, program.TIMEOUT_S)
        return result

    def test_cut_link_ends_every_rank(self):
        self.check_fault("--cut", (0, 1, 2, 3))

    def test_killed_supernode_ends_the_others(self):
        self.check_fault("--kill", (0, 1))


if __name__ == "__main__":
    cluster.main()
