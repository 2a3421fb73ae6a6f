"""What `hypershard explain` prints; that its plan is right is tested beside it (run_plan_test)."""

import re
import unittest

import program

# Of the tiny model over 256 bytes: 4 matrices of 32 x 32, 3 of 32 x 128 and 2 norms a block, each
# of which is cut among 4 ranks without padding; embedding and norm of the root, with some.
BLOCK = 4 * 32 * 32 + 3 * 32 * 128 + 2 * 32
ROOT = 256 * 32 + 32 + 32
FLOAT = 4


def short_bytes(value):
    """Writes bytes as the program does: three digits and a unit."""
    unit = 0
    while value >= 1023.5:
        value /= 1024
        unit += 1
    digits = f"{value:.0f}" if unit == 0 else \
        f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
    return f"{digits} {['B', 'KiB', 'MiB'][unit]}"


def rows_of(text, head):
    """Returns the cells of a table's rows by their first cell; `head` is the line above it."""
    lines = text[text.index(head):].splitlines()[1:]
    rows = {}
    for line in lines:
        if not line.startswith("  "):
            break
        cells = re.split(r"\s{2,}", line.strip())
        rows[cells[0]] = cells[1:]
    return rows


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

    def two_tiers(self, *sets):
        return self.explain("--ranks", 4, "--set", "parallel.replicate=2",
                            "--set", "parallel.supernodes=2", *sets)

    def test_hierarchical_tells_bytes_of_each_tier_and_memory(self):
        text = self.two_tiers("--set", "parallel.strategy=hierarchical")
        self.assertIn("4 ranks in 2 supernodes", text)
        self.assertIn("runtime   replicate: Replicate, shard: Flat", text)
        self.assertIn("gradient  replicate: Flat, shard: Flat", text)
        self.assertIn("one unit a bucket here; a run measures the link", text)
        traffic = rows_of(text, "the same by unit (inside a supernode")
        def cells(calls, numel, ranks=1):
            # Inside: half a gradient, to the other rank. Between: of the half that is left, half a
            # gradient to the other supernode, and the half that was updated here.
            inside = ranks * numel // 2 * FLOAT
            between = ranks * 2 * (numel // 4) * FLOAT
            return [str(calls), short_bytes(inside), str(2 * calls), short_bytes(between)]
        step = 2 * BLOCK + ROOT
        self.assertEqual(traffic["root"], cells(1, ROOT), text)
        self.assertEqual(traffic["all, a rank"], cells(3, step), text)
        self.assertEqual(traffic["a supernode, if its 2 ranks are as this one"],
                         cells(6, step, ranks=2), text)
        blocks = [name for name in traffic if name.startswith("blocks.")]
        self.assertEqual(len(blocks), 1, text)
        self.assertIn("each of 2", blocks[0])
        self.assertEqual(traffic[blocks[0]], cells(1, BLOCK), text)
        memory = rows_of(text, "memory of rank 0:")
        self.assertEqual(memory["optimizer state"][0], short_bytes(2 * step // 4 * FLOAT), text)
        self.assertEqual(memory["gradients"][0], short_bytes(step // 4 * FLOAT), text)
        self.assertEqual(memory["shared parameters"][0], short_bytes(step * FLOAT), text)
        units = rows_of(text, "the same by unit, of what a rank keeps")
        for name, numel in (("root", ROOT), ("blocks.0 ... blocks.1 (2 alike)", BLOCK)):
            self.assertEqual(units[name], [short_bytes(numel * FLOAT) + " shared", "0 B",
                                           short_bytes(2 * numel // 4 * FLOAT),
                                           short_bytes(numel // 4 * FLOAT)], text)

    def test_zero3_over_two_tiers_makes_one_copy_a_supernode(self):
        text = self.two_tiers()
        self.assertIn("gathered once a supernode", text)
        memory = rows_of(text, "memory of rank 0:")
        # The root stays whole; of the blocks, one and the next.
        whole = (ROOT + 2 * BLOCK) * FLOAT
        self.assertEqual(memory["shared unsharded parameters"][0], short_bytes(whole), text)
        self.assertIn("once for all ranks of a supernode",
                      memory["shared unsharded parameters"][1], text)
        self.assertNotIn("unsharded parameters", memory, text)
        self.assertEqual(memory["runtime parameters"][0],
                         short_bytes((ROOT + 2 * BLOCK) // 4 * FLOAT), text)

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
