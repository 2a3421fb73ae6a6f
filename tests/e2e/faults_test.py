"""How a run ends when something goes wrong: one message, the right exit code, nothing left."""

import os
import signal
import time
import unittest

import program
from program import interrupt, metrics

LONG = ("--set", "schedule.steps=100000", "--set", "eval.every=0")


class FaultsTest(program.ProgramTest):

    def test_interrupt_ends_all_ranks_after_the_step_with_a_checkpoint(self):
        run = self.new_run()
        process = self.start_program(
            "train", self.write_config(program.TINY_CONFIG, run), "--ranks", 2, *LONG)
        self.wait_for_step(run, 3, process)
        interrupt(process)
        result = self.finish(process)
        self.assertEqual(result.code, 130, result)
        self.assertIn("stopped after step", result.out)
        steps = metrics(run)[-1]["step"]
        self.assertEqual(os.listdir(os.path.join(run, "checkpoints")).count(f"step-{steps:08d}"), 1)
        resumed = self.run_program("train", "--resume", run, "--ranks", 2,
                                   "--set", f"schedule.steps={steps + 1}")
        self.assertEqual(resumed.code, 0, resumed)
        self.assertEqual([line["step"] for line in metrics(run)], list(range(1, steps + 2)))

    def test_interrupt_ends_a_single_rank(self):
        run = self.new_run()
        process = self.start_program("train", self.write_config(program.TINY_CONFIG, run), *LONG)
        self.wait_for_step(run, 2, process)
        interrupt(process)
        self.assertEqual(self.finish(process).code, 130)

    def test_termination_counts_as_an_interrupt(self):
        run = self.new_run()
        process = self.start_program(
            "train", self.write_config(program.TINY_CONFIG, run), "--ranks", 2, *LONG)
        self.wait_for_step(run, 2, process)
        os.kill(process.pid, signal.SIGTERM)
        self.assertEqual(self.finish(process).code, 130)

    def test_interrupt_ends_a_validation_after_the_step(self):
        config = self.write_config(program.TINY_CONFIG, self.new_run())
        process = self.start_program("validate", config, "--ranks", 2, "--steps", 100000)
        self.wait_for_output(process, "step 2 validated")
        interrupt(process)
        result = self.finish(process)
        self.assertEqual(result.code, 130, result)
        self.assertIn("stopped after step", result.out)

    def test_hangup_leaves_a_run_under_nohup_alone(self):
        run = self.new_run()
        config = self.write_config(program.TINY_CONFIG, run)
        process = self.start_command(
            ["nohup", *self.command("train", config, "--ranks", 2, *LONG)])
        self.wait_for_step(run, 2, process)
        os.kill(process.pid, signal.SIGHUP)
        self.wait_for_step(run, metrics(run)[-1]["step"] + 20, process)
        interrupt(process)
        self.assertEqual(self.finish(process).code, 130)

    def test_hangup_counts_as_an_interrupt(self):
        run = self.new_run()
        process = self.start_program(
            "train", self.write_config(program.TINY_CONFIG, run), "--ranks", 2, *LONG)
        self.wait_for_step(run, 2, process)
        os.kill(process.pid, signal.SIGHUP)
        result = self.finish(process)
        self.assertEqual(result.code, 130, result)
        self.assertIn("stopped after step", result.out)

    def test_memory_that_does_not_suffice_is_no_internal_error(self):
        for sets in (("batch.global_batch=4294967296",),
                     ("model.dim=1048576", "parallel.share=off")):
            with self.subTest(sets):
                options = [item for each in sets for item in ("--set", each)]
                result, _ = self.train("--ranks", 2, *options)
                self.assert_fails(result, 2, "memory is too short", "batch.global_batch")
                self.assertNotIn("frame #", result.err)

    def check_killed_rank(self, *sets):
        run = self.new_run()
        process = self.start_program(
            "train", self.write_config(program.TINY_CONFIG, run), "--ranks", 3, *LONG, *sets)
        self.wait_for_step(run, 2, process)
        ranks = self.ranks_of(process)
        self.assertEqual(sorted(ranks), [0, 1, 2])
        os.kill(ranks[1], signal.SIGKILL)
        begin = time.monotonic()
        result = self.finish(process)
        self.assert_fails(result, 3, "rank 1 was killed by signal 9")
        self.assertLess(time.monotonic() - begin, 45)  # well inside the collectives' timeout
        # The others say what they were doing when they lost it.
        survivors = [line for line in result.err.splitlines() if "error" in line and "rank 1" in line]
        self.assertTrue(survivors, result)

    def test_killed_rank_is_named_over_shared_memory(self):
        self.check_killed_rank()

    def test_killed_rank_is_named_over_c10d(self):
        self.check_killed_rank("--set", "parallel.backend=c10d")

    def test_killed_launcher_takes_its_ranks_along(self):
        run = self.new_run()
        process = self.start_program(
            "train", self.write_config(program.TINY_CONFIG, run), "--ranks", 2, *LONG)
        self.wait_for_step(run, 2, process)
        process.kill()
        self.finish(process)  # tearDown waits for the ranks

    def test_loss_that_is_not_a_number_names_a_parameter_once(self):
        result, _ = self.train("--ranks", 2, "--set", "optimizer.lr=1e30",
                               "--set", "schedule.warmup_steps=0", "--set", "schedule.steps=50",
                               "--set", "optimizer.clip_norm=0")
        self.assert_fails(result, 2, "the first non-finite one is parameter '", "optimizer.lr")
        self.assertEqual(result.err.count("non-finite one"), 1, result)

    def test_full_disk_while_writing_metrics_ends_all_ranks(self):
        result, _ = self.train("--ranks", 2, "--set", "log.metrics=/dev/full")
        self.assert_fails(result, 2, "/dev/full", "No space left on device")
        self.assertEqual(result.err.count("No space left"), 1, result)


if __name__ == "__main__":
    unittest.main()
