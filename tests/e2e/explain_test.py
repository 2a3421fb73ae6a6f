"""What `hypershard explain` prints; that its plan is right is tested beside it (run_plan_test)."""

import unittest

import program


class ExplainTest(program.ProgramTest):

    def explain(self, *args):
        config = self.write_config(program.TINY_CONFIG, self.new_run())
        result = self.run_program("explain", config, *args)
        self.assertEqual(result.code, 0, result)
        return result.out

    def test_shows_units_layouts_collectives_and_memory(self):
        text = self.explain("--ranks", 2, "--set", "parallel.share=off")
        for fragment in ("blocks.0 ... blocks.1 (2 alike)", "shard: Flat", "all_gather",
                         "reduce_scatter", "gathered", "optimizer state", "sharing is off"):
            self.assertIn(fragment, text)

    def test_shared_parameters_are_not_gathered(self):
        text = self.explain("--ranks", 2)
        self.assertNotIn("all_gather", text)
        self.assertIn("once for all ranks of a supernode", text)

    def test_one_rank_communicates_nothing(self):
        self.assertIn("none: the layouts need no communication", self.explain())

    def test_big_mesh_needs_no_data_and_no_memory(self):
        text = self.explain(
            "--ranks", 1024, "--vocab", 32000, "--set", "data.path=absent",
            "--set", "model.layers=32", "--set", "model.dim=4096", "--set", "model.heads=32",
            "--set", "parallel.strategy=hierarchical", "--set", "parallel.replicate=128",
            "--set", "parallel.supernodes=128", "--set", "batch.global_batch=1024")
        self.assertIn("1024 ranks in 128 supernodes", text)
        self.assertIn("between supernodes", text)

    def test_bad_input_is_refused(self):
        config = self.write_config(program.TINY_CONFIG, self.new_run())
        result = self.run_program("explain", config, "--ranks", 5)
        self.assert_fails(result, 2, "batch.global_batch")
        result = self.run_program("explain", config, "--ranks", 2, "--rank", 2)
        self.assert_fails(result, 2, "rank")


if __name__ == "__main__":
    unittest.main()
