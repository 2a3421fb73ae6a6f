"""What a training run tells of itself: metrics, progress, traces and profiles."""

import json
import os
import pty
import subprocess
import unittest

import program
from program import metrics

# Steps of tens of milliseconds.
LARGER = ("--set", "model.dim=128", "--set", "model.sequence=128", "--set", "eval.every=0")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def memory_rows(report):
    """The rows of a profile's memory, in bytes, down to their sum."""
    rows = {}
    lines = report[report.index("  memory  "):].splitlines()[1:]
    for line in lines:
        name, number, unit = line[2:52].strip(), *line[52:].split()
        rows[name] = float(number) * UNITS[unit]
        if name.startswith("sum"):
            break
    return rows


class ReportTest(program.ProgramTest):

    def test_metrics_tell_what_each_tier_cost(self):
        result, run = self.train_well(
            "--ranks", 4, "--set", "parallel.strategy=hsdp", "--set", "parallel.replicate=2",
            "--set", "parallel.supernodes=2")
        # The blocks' matrices and norms, the embedding and the last norm. Half a gradient of fp32
        # goes to the other rank of the supernode, and the half that is left is summed with the
        # other supernode's: each of 4 ranks sends half a gradient to either.
        numel = 2 * (4 * 32 * 32 + 3 * 32 * 128 + 2 * 32) + 256 * 32 + 32
        planned = 4 * numel // 2 * 4
        for line in metrics(run):
            shares = [line[f"exposed_{tier}_share"] for tier in ("inside", "between")]
            self.assertAlmostEqual(sum(shares), line["exposed_comm_share"], delta=1e-12)
            for tier, share in zip(("inside", "between"), shares):
                with self.subTest(tier=tier, step=line["step"]):
                    self.assertGreaterEqual(share, 0)
                    self.assertLess(share, 1)
                    self.assertGreaterEqual(line[f"{tier}_bytes"], planned)
                    self.assertLess(line[f"{tier}_bytes"], 1.05 * planned)
                    self.assertGreater(line[f"{tier}_bytes_per_s"], 0)
                    self.assertGreaterEqual(line[f"{tier}_overlap"], 0)
                    self.assertLessEqual(line[f"{tier}_overlap"], 1)
        self.assertRegex(result.out, r"comm \S+% \(inside \S+%, between \S+%\)")

    def test_metrics_of_one_supernode_name_no_other(self):
        result, run = self.train_well("--ranks", 2)
        for line in metrics(run):
            self.assertEqual((line["between_bytes"], line["exposed_between_share"]), (0, 0))
            self.assertIsNone(line["between_bytes_per_s"])
            self.assertIsNone(line["between_overlap"])
            self.assertGreater(line["inside_bytes"], 0)
        self.assertNotRegex(result.out, r"comm .*between")

    def test_metrics_tell_what_a_step_was_like(self):
        _, run = self.train_well("--ranks", 2)
        lines = metrics(run)
        self.assertEqual([line["step"] for line in lines], [1, 2, 3, 4, 5, 6])
        for line in lines:
            self.assertEqual(line["tokens_seen"], line["step"] * 12 * 32)
            self.assertGreater(line["lr"], 0)
            self.assertGreater(line["grad_norm"], 0)
            self.assertGreater(line["step_ms"], 0)
            self.assertGreater(line["tokens_per_s"], 0)
            self.assertGreater(line["mfu"], 0)
            self.assertGreaterEqual(line["exposed_comm_share"], 0)
            self.assertLessEqual(line["exposed_comm_share"], 1)
            self.assertGreater(line["peak_bytes"], 1 << 20)
            self.assertEqual(line["copied_bytes"], 0)
        self.assertEqual([line["eval_loss"] is None for line in lines],
                         [True, True, False, True, True, False])

    def test_facts_of_the_run_are_kept(self):
        _, run = self.train_well("--ranks", 2)
        with open(os.path.join(run, "run.json"), encoding="utf-8") as file:
            facts = json.load(file)
        self.assertEqual(facts["world_size"], 2)
        self.assertGreater(facts["gemm_peak_flops_per_s"], 0)
        self.assertEqual(facts["tokens_per_step"], 12 * 32)

    def test_trace_has_the_spans_of_units_on_every_rank(self):
        path = os.path.join(self.folder, "trace.json")
        self.train_well("--ranks", 2, "--trace", path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        spans = {(event["pid"], event["name"]) for event in events if event.get("ph") == "X"}
        for rank in (0, 1):
            names = {name for pid, name in spans if pid == rank}
            for unit in ("root", "blocks.0", "blocks.1"):
                for part in ("forward", "backward", "unshard", "reduce"):
                    self.assertIn(f"{part} {unit}", names)
            self.assertIn("backward", names)
            rows = {event["tid"] for event in events if event["name"] == "thread_name"
                    and event["pid"] == rank and event["args"]["name"] == "wait"}
            waits = {event["name"] for event in events if event.get("ph") == "X"
                     and event["pid"] == rank and event["tid"] in rows}
            self.assertIn("unshard blocks.1", waits)
        self.assertEqual([name for name in os.listdir(self.folder) if ".rank" in name], [])

    def test_trace_of_two_tiers_leads_from_backward_to_its_reductions(self):
        path = os.path.join(self.folder, "two_tiers.json")
        self.train_well("--ranks", 4, "--trace", path, "--set", "parallel.strategy=hierarchical",
                        "--set", "parallel.replicate=2", "--set", "parallel.supernodes=2")
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X"]
        def near(a, b):
            return abs(a - b) < 0.01  # microseconds: an arrow starts a nanosecond before the end
        def same_row(a, b):
            return (a["pid"], a["tid"]) == (b["pid"], b["tid"])
        def led_to(span):
            """Spans that the arrows lead to which start at the end of this one."""
            names = {event["id"] for event in events if event.get("ph") == "s"
                     and same_row(event, span) and near(event["ts"], span["ts"] + span["dur"])}
            ends = [event for event in events if event.get("ph") == "f" and event["id"] in names]
            return [other for other in spans
                    if any(same_row(other, end) and near(other["ts"], end["ts"]) for end in ends)]
        for rank in range(4):
            lanes = {event["args"]["name"] for event in events
                     if event["name"] == "thread_name" and event["pid"] == rank}
            for lane in ("compute", "reduce", "between supernodes"):
                self.assertIn(lane, lanes)
            for unit in ("blocks.0", "blocks.1"):
                backwards = [span for span in spans if span["pid"] == rank
                             and span["name"] == f"backward {unit}" and span["cat"] == "compute"]
                self.assertGreaterEqual(len(backwards), 3, f"rank {rank}, {unit}")
                for backward in backwards:
                    inside = [(span["pid"], span["cat"], span["name"]) for span in led_to(backward)]
                    self.assertIn((rank, "reduce", f"reduce {unit}"), inside)
            crossing = [span for span in spans if span["pid"] == rank and span["cat"] == "reduce"
                        and span["name"].startswith("reduce ")]
            self.assertGreaterEqual(len(crossing), 9)
            for span in crossing:
                between = [(other["pid"], other["cat"], other["name"]) for other in led_to(span)]
                self.assertIn((rank, "between supernodes", span["name"]), between)

    def test_trace_that_cannot_be_written_keeps_the_former_run(self):
        _, run = self.train_well()
        config = os.path.join(self.folder, "tiny.toml")
        absent = os.path.join(self.folder, "absent", "trace.json")
        for rank in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):  # the launcher's check, and the rank's
            result = self.run_program("train", config, "--overwrite", "--trace", absent, env=rank)
            self.assert_fails(result, 2, absent, "No such file", "--trace")
            self.assertTrue(os.path.exists(os.path.join(run, "checkpoints", "latest")), result)

    def test_trace_part_that_cannot_be_written_is_told_by_all_ranks(self):
        path = os.path.join(self.folder, "blocked.json")
        os.mkdir(path + ".rank1")
        result, _ = self.train("--ranks", 2, "--trace", path)
        self.assert_fails(result, 2, path + ".rank1")

    def test_profile_adds_up_and_names_modules(self):
        result, run = self.train_well("--ranks", 2, "--profile", "--set", "log.trace_steps=3")
        self.assertIn("profile of rank 0: 3 steps of", result.out)
        lines = result.out[result.out.index("profile of rank 0"):].splitlines()
        step_ms = float(lines[0].split()[-2])
        end = next(i for i, line in enumerate(lines) if line.startswith("  sum  "))
        parts = [float(line.split()[-2]) for line in lines[2:end]]
        self.assertAlmostEqual(sum(parts), step_ms, delta=0.002 * len(parts))
        self.assertAlmostEqual(float(lines[end].split()[-2]), step_ms, delta=0.002)
        for module in ("blocks.*.attn.wq", "blocks.*.mlp.w2", "root"):
            self.assertTrue(any(line.split()[0] == module for line in lines if line.strip()), result)
        self.assertTrue(os.path.exists(os.path.join(run, "trace.json")))

    def test_profile_agrees_with_the_clock_and_the_kernel(self):
        result, run = self.train_well("--ranks", 2, *LARGER, "--profile",
                                      "--set", "schedule.steps=14")
        report = result.out[result.out.index("profile of rank 0: 10 steps of"):]
        steps = [line["step_ms"] for line in metrics(run) if 3 <= line["step"] <= 12]
        self.assertEqual(len(steps), 10)
        mean_ms = sum(steps) / 10
        self.assertAlmostEqual(float(report.splitlines()[0].split()[-2]), mean_ms,
                               delta=0.05 * mean_ms)
        rows = memory_rows(report)
        total = rows.pop("sum: resident at its highest")
        for name in ("program and libraries", "gradient buffers", "optimizer state",
                     "activations, workspace and the rest"):
            self.assertGreater(rows[name], 0, result)
        # Every number is rounded to three digits.
        self.assertAlmostEqual(sum(rows.values()), total, delta=0.01 * total)
        peak = max(line["peak_bytes"] for line in metrics(run) if line["step"] <= 12)
        self.assertLessEqual(total, 1.01 * peak)

    def test_progress_line_comes_every_n_steps(self):
        result, _ = self.train_well("--set", "log.every=4", "--set", "eval.every=0")
        steps = [line.split()[1] for line in result.out.splitlines() if line.startswith("step")]
        self.assertEqual(steps, ["1/6", "4/6", "6/6"], result)

    def test_terminal_line_is_rewritten_in_place(self):
        run = self.new_run()
        config = self.write_config(program.TINY_CONFIG, run)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(self.command("train", config, "--ranks", 2), stdout=theirs,
                                   stderr=subprocess.PIPE, text=True, env=self.environment(),
                                   cwd=self.folder, start_new_session=True)
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        os.close(ours)
        self.assertEqual(self.finish(process).code, 0, shown)
        self.assertEqual(shown.count(b"\r\x1b[Kstep"), 6, shown)
        self.assertEqual(shown.count(b"\nstep"), 0, shown)


if __name__ == "__main__":
    unittest.main()
