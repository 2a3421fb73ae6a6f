"""Plans in the program: losses under tensor, sequence and vocabulary parallelism, what explain shows
of them, and what validate finds."""

import os
import re
import unittest

import program
from program import losses, metrics

FP64 = ("--set", "precision.compute=fp64")
TWO = ("--set", "parallel.tp=2")
ALL = (*TWO, "--set", "parallel.plan=tensor,sequence,vocabulary")

# Rules that cut the feed-forward layers and forget to add up what comes out.
FORGETFUL = program.TINY_CONFIG + """
[plan.parameters]
"blocks.*.mlp.w1.weight" = {{ tp = "shard(0)" }}
"blocks.*.mlp.w3.weight" = {{ tp = "shard(0)" }}
"blocks.*.mlp.w2.weight" = {{ tp = "shard(1)" }}
[plan.inputs]
"blocks.*.mlp" = {{ tp = "replicate" }}
"""
WHOLE = FORGETFUL + """
[plan.outputs]
"blocks.*.mlp" = {{ tp = "replicate" }}
"""
OWN_RULES = (*TWO, "--set", "parallel.plan=[]")


class PlanTest(program.ProgramTest):

    def validate(self, *args, config=program.TINY_CONFIG):
        path = self.write_config(config, self.new_run())
        return self.run_program("validate", path, *args)

    # --- training

    def test_ranks_that_share_rows_give_the_losses_of_one(self):
        _, one = self.train_well(*FP64)
        for sets in (TWO, (*TWO, "--set", "parallel.plan=vocabulary"), ALL,
                     (*ALL, "--set", "model.recompute=true", "--set", "parallel.backend=c10d")):
            with self.subTest(sets=sets):
                _, two = self.train_well("--ranks", 2, *FP64, *sets)
                self.assert_close(losses(two), losses(one), 1e-10)
                self.assertEqual([line["eval_loss"] is None for line in metrics(two)],
                                 [True, True, False, True, True, False])
                self.assertAlmostEqual(metrics(two)[-1]["eval_loss"], metrics(one)[-1]["eval_loss"],
                                       delta=1e-9)

    def test_every_strategy_gives_the_losses_of_one(self):
        quick = (*FP64, "--set", "schedule.steps=3", "--set", "eval.at_start=false",
                 "--set", "eval.at_end=false", "--set", "checkpoint.at_end=false")
        _, one = self.train_well(*quick)
        for strategy in ("ddp", "zero1", "zero2", "zero3"):
            with self.subTest(strategy=strategy):
                _, four = self.train_well("--ranks", 4, *quick, *ALL,
                                          "--set", f"parallel.strategy={strategy}")
                self.assert_close(losses(four), losses(one), 1e-10)
        for strategy in ("hsdp", "hierarchical"):
            with self.subTest(strategy=strategy):
                _, four = self.train_well(
                    "--ranks", 4, *quick, *ALL, "--set", f"parallel.strategy={strategy}",
                    "--set", "parallel.replicate=2", "--set", "parallel.supernodes=2",
                    "--set", "batch.accumulation=2", "--set", "batch.sync=inner")
                self.assert_close(losses(four), losses(one), 1e-10)

    def test_rules_of_the_user_train_as_well(self):
        _, one = self.train_well(*FP64)
        _, two = self.train_well("--ranks", 2, *FP64, *OWN_RULES, config=WHOLE)
        self.assert_close(losses(two), losses(one), 1e-10)

    def test_metrics_count_rows_once(self):
        _, run = self.train_well("--ranks", 2, *TWO)
        for line in metrics(run):
            self.assertEqual(line["tokens_seen"], line["step"] * 12 * 32)
            self.assertGreater(line["mfu"], 0)

    def test_run_is_resumed_with_another_number_of_ranks_a_row(self):
        sets = (*FP64, "--set", "checkpoint.every=3", "--set", "checkpoint.keep=0")
        _, one = self.train_well(*sets)
        for first, then in ((ALL, ("--set", "parallel.tp=1")), ((), ALL)):
            with self.subTest(first=first):
                _, run = self.train_well("--ranks", 2, *sets, *first)
                middle = os.path.join(run, "checkpoints", "step-00000003")
                result = self.run_program("train", "--resume", middle, "--ranks", 2, *sets, *then)
                self.assertEqual(result.code, 0, result)
                self.assert_close(losses(run), losses(one), 1e-10)
        result = self.run_program("sample", run, "--tokens", 3, "--temperature", 0)
        self.assertEqual(result.code, 0, result)

    def test_wrong_plan_is_refused_before_a_step(self):
        result, _ = self.train("--ranks", 2, *OWN_RULES, config=FORGETFUL)
        self.assert_fails(result, 2, "blocks.0", "Partial", "hint")

    # --- explaining

    def test_explain_shows_every_boundary_and_what_is_cut(self):
        path = self.write_config(program.TINY_CONFIG, self.new_run())
        result = self.run_program("explain", path, "--ranks", 4, *TWO, "--set",
                                  "parallel.plan=tensor,sequence")
        self.assertEqual(result.code, 0, result)
        for fragment in ("input 0 of blocks.1.mlp", "output 0 of blocks.0.attn", "all_gather over tp",
                         "reduce_scatter over tp", "sends", "blocks.0.attn.wq.weight",
                         "gradient all-reduced over", "blocks.0.attn_norm.weight", "tp:reduce"):
            self.assertIn(fragment, result.out)
        expected = ["output 0 of embed", "output 0 of norm"] + [
            f"{side} 0 of blocks.{block}.{layer}"
            for side in ("input", "output") for block in (0, 1) for layer in ("attn", "mlp")]
        found = re.findall(r"^ +((?:input|output) \d+ of \S+)", result.out, re.MULTILINE)
        self.assertEqual(sorted(found), sorted(expected))
        for direction in ("forward", "backward"):
            flows = re.findall(rf"^ +{direction} +\{{.*\}} -> \{{.*\}} ", result.out, re.MULTILINE)
            self.assertEqual(len(flows), len(expected), (direction, flows))

    # --- validating

    def test_right_configurations_are_found_right(self):
        for ranks, sets in ((1, FP64), (2, ("--steps", 2)), (2, (*FP64, *ALL)),
                            (4, (*TWO, "--set", "precision.compute=bf16"))):
            with self.subTest(ranks=ranks, sets=sets):
                result = self.validate("--ranks", ranks, *sets)
                self.assertEqual(result.code, 0, result)
                for fragment in ("step 1 validated", "embed.weight", "gradients are equal",
                                 "equal those of one rank"):
                    self.assertIn(fragment, result.out)

    def test_random_tokens_stand_in_for_data(self):
        result = self.validate("--ranks", 2, *TWO, "--vocab", 50, "--set", "data.path=absent")
        self.assertEqual(result.code, 0, result)
        self.assertIn("step 1 validated", result.out)

    def test_wrong_plan_is_found_and_named(self):
        result = self.validate("--ranks", 2, *OWN_RULES, config=FORGETFUL)
        self.assert_fails(result, 1, "blocks.0", "Partial", "hint")
        self.assertEqual(result.err.count("hint"), 1, result)

    def test_parts_that_do_not_fit_each_other_are_found(self):
        for line, fragment in (('"blocks.*.mlp.w3.weight" = {{ tp = "shard(0)" }}', "w3.weight is"),
                               ('"blocks.*.mlp.w2.weight" = {{ tp = "shard(1)" }}', "weight is")):
            with self.subTest(fragment=fragment):
                self.assertIn(line, WHOLE)
                result = self.validate("--ranks", 2, *OWN_RULES, config=WHOLE.replace(line, ""))
                self.assert_fails(result, 1, "blocks.0.mlp", "the unsharded model runs", fragment)

    def test_ranks_that_hold_nothing_raise_no_alarm(self):
        for ranks, sets in ((2, ("--set", "model.hidden_dim=1")),
                            (4, ("--vocab", 3, "--set", "parallel.tp=4", "--set", "model.heads=4",
                                 "--set", "model.sequence=3"))):
            with self.subTest(sets=sets):
                result = self.validate("--ranks", ranks, *FP64, *ALL, *sets)
                self.assertEqual(result.code, 0, result)

    def test_bad_input_is_no_finding(self):
        self.assert_fails(self.validate("--ranks", 2, "--set", "data.path=absent"), 2, "absent")
        self.assert_fails(self.validate("--ranks", 3, *TWO), 2, "parallel.tp")

    def test_validated_steps_leave_the_bits_of_a_run(self):
        for sets in ((), ALL):
            with self.subTest(sets=sets):
                _, plain = self.train_well("--ranks", 2, *sets)
                result, checked = self.train_well("--ranks", 2, *sets, "--validate-every", 2)
                self.assertEqual(losses(checked), losses(plain))
                self.assertEqual([line["grad_norm"] for line in metrics(checked)],
                                 [line["grad_norm"] for line in metrics(plain)])
                for step in (2, 4, 6):
                    self.assertIn(f"step {step} validated", result.out)
                self.assertNotIn("step 3 validated", result.out)


if __name__ == "__main__":
    unittest.main()
