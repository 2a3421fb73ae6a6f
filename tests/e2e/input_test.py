"""Bad input: refused before anything is started, with the place and a way out."""

import os
import socket
import unittest

import program
from program import TINY_CONFIG


class InputTest(program.ProgramTest):

    def check(self, fragments, *sets, config=TINY_CONFIG, ranks=1):
        options = [item for each in sets for item in ("--set", each)]
        result, run = self.train("--ranks", ranks, *options, config=config)
        self.assert_fails(result, 2, *fragments)
        self.assertFalse(os.path.exists(run), "a run folder was made for bad input")

    def test_configuration(self):
        cases = {
            "unknown key": (TINY_CONFIG.replace("layers", "layer"),
                            ("tiny.toml:10", "model.layer", "did you mean", "layers")),
            "unknown section": (TINY_CONFIG.replace("[optimizer]", "[optimiser]"),
                                ("optimiser", "optimizer")),
            "wrong type": (TINY_CONFIG.replace("steps = 6", 'steps = "six"'),
                           ("schedule.steps", "integer")),
            "out of range": (TINY_CONFIG.replace("lr = 1e-2", "lr = -1e-2"), ("optimizer.lr",)),
            "wrong word": (TINY_CONFIG + '\n[parallel]\nstrategy = "zero4"\n',
                           ("parallel.strategy", "zero3")),
            "no TOML": (TINY_CONFIG + "\n[[[\n", ("tiny.toml",)),
        }
        for name, (config, fragments) in cases.items():
            with self.subTest(name):
                self.check(fragments, config=config)

    def test_values_that_do_not_fit_each_other(self):
        cases = {
            "heads": (("model.heads=3",), 1, ("model.heads", "do not divide")),
            "batch": (("batch.global_batch=13",), 2, ("batch.global_batch", "13 rows", "12 or 14")),
            "more ranks than rows": (("batch.global_batch=2",), 3,
                                     ("fewer rows than parts", "2 rows", "3 ranks")),
            "mesh": (("parallel.shard=3",), 2, ("parallel.shard", "2 ranks")),
            "warm-up": (("schedule.warmup_steps=7",), 1, ("schedule.warmup_steps",)),
            "override": (("schedule.step=3",), 1, ("schedule.step", "did you mean", "steps")),
        }
        for name, (sets, ranks, fragments) in cases.items():
            with self.subTest(name):
                self.check(fragments, *sets, ranks=ranks)

    def test_data(self):
        self.check(("nowhere",), "data.path=nowhere")
        self.check(("tokens",), "model.sequence=100000")

    def test_empty_file_cannot_be_prepared(self):
        empty = os.path.join(self.folder, "empty.txt")
        with open(empty, "w", encoding="utf-8"):
            pass
        result = self.run_program("data", "text", empty, "--out", os.path.join(self.folder, "out"))
        self.assert_fails(result, 2, "empty.txt", "empty")

    def test_missing_text_is_named(self):
        result = self.run_program("data", "text", "absent.txt", "--out", "out")
        self.assert_fails(result, 2, "absent.txt")

    def test_missing_configuration_is_named(self):
        self.assert_fails(self.run_program("train", "absent.toml"), 2, "absent.toml")

    def test_command_line(self):
        for arguments, fragment in (
            (("trian",), "did you mean 'train'"),
            (("train",), "neither a configuration nor --resume"),
            (("train", "x.toml", "--rank", "2"), "did you mean '--ranks'"),
            (("train", "x.toml", "--ranks", "0"), "--ranks"),
            (("sample",), "RUN"),
            (("train", "--resume", "absent"), "absent"),
        ):
            with self.subTest(arguments):
                self.assert_fails(self.run_program(*arguments), 2, fragment)

    def test_environment(self):
        result = self.run_program("info", env={"HS_LOG_LEVEL": "loud"})
        self.assert_fails(result, 2, "HS_LOG_LEVEL", "loud")
        result, _ = self.train("--ranks", 2, env={"HS_SHRAE": "off"})
        self.assertEqual(result.code, 0, result)
        self.assertIn("HS_SHRAE", result.err)

    def test_ranks_must_have_one_configuration(self):
        config = self.write_config(TINY_CONFIG, self.new_run())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = [self.start_program("train", config, env={
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "HS_SEED": str(5 + rank)}) for rank in range(2)]
        results = [self.finish(rank) for rank in ranks]
        self.assert_fails(results[0], 2, "rank 1 has run.seed = 6, rank 0 has run.seed = 5")
        self.assertEqual(results[1].code, 2, results[1])

    def test_ranks_option_must_agree_with_the_launcher(self):
        result, _ = self.train("--ranks", 2, env={"RANK": "0", "WORLD_SIZE": "3"})
        self.assert_fails(result, 2, "WORLD_SIZE")

    def test_help_and_version(self):
        for arguments in ((), ("train",), ("data", "text"), ("sample",), ("explain",), ("info",)):
            result = self.run_program(*arguments, "--help")
            self.assertEqual(result.code, 0, result)
        for word in ("train", "data", "sample", "explain", "info", "Exit codes"):
            self.assertIn(word, self.run_program("--help").out)
        self.assertIn("torch", self.run_program("--version").out)
        self.assertIn("Examples", self.run_program("train", "--help").out)

    def test_info_describes_build_and_environment(self):
        info = self.run_program("info")
        self.assertEqual(info.code, 0, info)
        for word in ("torch", "cores", "shm", "c10d:gloo"):
            self.assertIn(word, info.out)
        self.assertIn("HS_TIMEOUT_S", self.run_program("info", "env").out)


if __name__ == "__main__":
    unittest.main()
