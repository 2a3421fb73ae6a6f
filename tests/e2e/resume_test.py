"""What goes on from a checkpoint: training, and sampling."""

import os
import unittest

import program
from program import metrics


class ResumeTest(program.ProgramTest):

    def check_resume(self, *args):
        _, whole = self.train_well(*args)
        _, half = self.train_well(*args, "--set", "checkpoint.every=3", "--set", "checkpoint.keep=0")
        middle = os.path.join(half, "checkpoints", "step-00000003")
        result = self.run_program("train", "--resume", middle, *args)
        self.assertEqual(result.code, 0, result)
        ignored = ("step_ms", "tokens_per_s", "mfu", "exposed_comm_share", "exposed_inside_share",
                   "exposed_between_share", "inside_bytes_per_s", "inside_overlap",
                   "between_bytes_per_s", "between_overlap", "peak_bytes")
        def comparable(run):
            return [{name: value for name, value in line.items() if name not in ignored
                     and not name.endswith("_bytes")} for line in metrics(run)]
        self.assertEqual(comparable(half), comparable(whole))

    def test_resumed_run_continues_bit_for_bit_on_one_rank(self):
        self.check_resume()

    def test_resumed_run_continues_bit_for_bit_on_two_ranks(self):
        self.check_resume("--ranks", 2)

    def test_finished_run_has_nothing_left_to_do(self):
        _, run = self.train_well()
        before = metrics(run)
        result = self.run_program("train", "--resume", run)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(metrics(run), before)

    def test_schedule_that_ends_before_the_checkpoint_is_refused(self):
        _, run = self.train_well()
        before = metrics(run)
        result = self.run_program("train", "--resume", run, "--set", "schedule.steps=3")
        self.assert_fails(result, 2, "after step 6", "schedule.steps = 3")
        self.assertEqual(metrics(run), before)

    def test_run_folder_of_any_name_is_resumed_in_place(self):
        run = self.new_run() + " \"odd\" \\ 'é'"
        path = self.write_config(program.TINY_CONFIG.replace('dir = "{run}"', ""), run)
        self.assertEqual(self.run_program("train", path, "--set", f"run.dir={run}").code, 0)
        result = self.run_program("train", "--resume", run, "--set", "schedule.steps=8")
        self.assertEqual(result.code, 0, result)
        self.assertEqual([line["step"] for line in metrics(run)], list(range(1, 9)))

    def test_longer_schedule_goes_on(self):
        _, run = self.train_well("--set", "schedule.decay=constant")
        result = self.run_program("train", "--resume", run, "--set", "schedule.steps=8")
        self.assertEqual(result.code, 0, result)
        self.assertEqual([line["step"] for line in metrics(run)], list(range(1, 9)))

    def test_existing_run_is_replaced_only_if_told(self):
        _, run = self.train_well()
        config = self.write_config(program.TINY_CONFIG, run)
        refused = self.run_program("train", config)
        self.assert_fails(refused, 2, "holds a run already", "--resume", "--overwrite")
        replaced = self.run_program("train", config, "--overwrite", "--set", "schedule.steps=2")
        self.assertEqual(replaced.code, 0, replaced)
        self.assertEqual(len(metrics(run)), 2)

    def test_old_checkpoints_are_removed(self):
        _, run = self.train_well("--set", "checkpoint.every=1", "--set", "checkpoint.keep=2")
        kept = [name for name in os.listdir(os.path.join(run, "checkpoints"))
                if name.startswith("step-")]
        self.assertEqual(sorted(kept), ["step-00000005", "step-00000006"])


class SampleTest(program.ProgramTest):

    def test_same_seed_gives_the_same_text(self):
        _, run = self.train_well("--ranks", 2, "--set", "schedule.steps=32")
        def sample(*args):
            result = self.run_program("sample", run, "--prompt", "the king", "--tokens", 60, *args)
            self.assertEqual(result.code, 0, result)
            return result.out
        first = sample("--seed", 3)
        self.assertTrue(first.startswith("the king"), first)
        self.assertEqual(sample("--seed", 3), first)
        self.assertNotEqual(sample("--seed", 4), first)

    def test_run_without_checkpoint_is_refused(self):
        _, run = self.train_well("--set", "checkpoint.at_end=false")
        self.assert_fails(self.run_program("sample", run), 2, "run without a checkpoint")


if __name__ == "__main__":
    unittest.main()
