"""What a training run does when all is well."""

import os
import subprocess
import sys
import unittest

import program
from program import PROGRAM, losses, metrics

FP64 = ("--set", "precision.compute=fp64")


class TrainTest(program.ProgramTest):

    def test_two_ranks_give_the_losses_of_one(self):
        _, one = self.train_well(*FP64)
        for sets in ((), ("--set", "parallel.backend=c10d"), ("--set", "parallel.share=off"),
                     ("--set", "parallel.strategy=ddp"), ("--set", "parallel.strategy=zero2")):
            with self.subTest(sets=sets):
                _, two = self.train_well("--ranks", 2, *FP64, *sets)
                self.assert_close(losses(two), losses(one), 1e-10)

    def test_accumulation_gives_the_losses_of_one_batch(self):
        _, whole = self.train_well(*FP64)
        for sync in ("every", "last"):
            with self.subTest(sync=sync):
                _, parts = self.train_well("--ranks", 2, *FP64, "--set", "batch.accumulation=3",
                                           "--set", f"batch.sync={sync}")
                self.assert_close(losses(parts), losses(whole), 1e-10)

    def test_pretended_supernodes_give_the_losses_of_one(self):
        _, one = self.train_well(*FP64)
        for strategy in ("hsdp", "hierarchical", "zero3"):
            with self.subTest(strategy=strategy):
                _, four = self.train_well(
                    "--ranks", 4, *FP64, "--set", f"parallel.strategy={strategy}",
                    "--set", "parallel.replicate=2", "--set", "parallel.supernodes=2")
                self.assert_close(losses(four), losses(one), 1e-10)

    def test_loss_falls(self):
        _, run = self.train_well("--set", "schedule.steps=40")
        self.assertGreater(losses(run)[0], 5.3)
        self.assertLess(losses(run)[-1], 4.0)

    def test_stepping_in_backward_gives_the_same_losses(self):
        for sync in ("every", "last"):
            with self.subTest(sync=sync):
                plain = ("--set", "optimizer.clip_norm=0", "--set", "batch.accumulation=2",
                         "--set", f"batch.sync={sync}")
                _, after = self.train_well("--ranks", 2, *plain)
                _, inside = self.train_well("--ranks", 2, *plain,
                                            "--set", "optimizer.step_in_backward=true")
                self.assertEqual(losses(inside), losses(after))
                self.assertEqual({line["grad_norm"] for line in metrics(inside)}, {None})

    def test_stepping_in_backward_refuses_to_clip(self):
        result, _ = self.train("--set", "optimizer.step_in_backward=true")
        self.assert_fails(result, 2, "optimizer.step_in_backward", "clip_norm = 0")

    def test_resolved_configuration_gives_the_same_run(self):
        _, first = self.train_well("--set", "model.dim=48")
        again = self.new_run()
        result = self.run_program("train", os.path.join(first, "config.toml"),
                                  "--set", f"run.dir={again}")
        self.assertEqual(result.code, 0, result)
        self.assertEqual(losses(again), losses(first))

    def test_dry_run_starts_nothing(self):
        result, run = self.train("--ranks", 2, "--dry-run")
        self.assertEqual(result.code, 0, result)
        self.assertIn("heads = 2", result.out)
        self.assertFalse(os.path.exists(run))

    def test_torchrun_starts_the_same_program(self):
        _, ours = self.train_well("--ranks", 2, *FP64)
        run = self.new_run()
        config = self.write_config(program.TINY_CONFIG, run)
        probe = subprocess.run([sys.executable, "-c", "import torch.distributed.run"],
                               capture_output=True, timeout=60)
        if probe.returncode != 0:
            self.skipTest("this python has no torch.distributed.run")
        result = self.run_command([
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            "--no-python", PROGRAM, "train", config, *FP64])
        self.assertEqual(result.code, 0, result)
        self.assertEqual(losses(run), losses(ours))


if __name__ == "__main__":
    unittest.main()
